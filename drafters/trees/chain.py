"""Chain: one child a level, the likeliest or one drawn from q.

Law: DETERMINISTIC (argmax), or CHAIN (`sample=true`): one draw a level from q after the request's warping.
`coupled` draws from q by the race that verifier `gumbel` draws its tokens with, so that the two often agree; the
request's seed then fixes the token, which makes the law DETERMINISTIC.
`min_confidence` ends a chain where the largest q falls below it. The test comes before the draw and looks only at
what was drawn before, so a drawn chain keeps its law; one that looked at the drawn token's own q would not. A drawn
chain is judged by q after warping, which is certain at temperature 0; an argmax chain by the model's own.
Needs of a drafter: next-token logits after any path.
Sources: Leviathan et al., arXiv:2211.17192 (drawn); Stern et al., arXiv:1811.03115 (argmax); Daliri et al.,
arXiv:2408.07978 (coupled).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.core import ProposalLaw, TokenTree
from specdec.core.checks import check, is_integer, is_real
from specdec.core.sampling import race
from specdec.drafters.base import DraftBatch, DraftModel, TreeProposer
from specdec.drafters.trees.builder import Frontier, TreeBuilder
from specdec.drafters.trees.draws import Draw, draw_children, take_children


class ChainProposer(TreeProposer):
    """A single path of up to `num_tokens` tokens: argmax, drawn from q (`sample`), or `coupled` to `gumbel`."""

    possible_laws = (ProposalLaw.DETERMINISTIC, ProposalLaw.CHAIN)

    def __init__(
        self, num_tokens: int = 5, sample: bool = False, min_confidence: float = 0.0, coupled: bool = False
    ) -> None:
        if not is_integer(num_tokens) or num_tokens < 1:
            raise ValueError(
                f"num_tokens={num_tokens!r}: a chain needs at least 1; for plain decoding use drafter=none"
            )
        for name, value in (("sample", sample), ("coupled", coupled)):
            check(name, value, isinstance(value, bool), "to be true or false")
        check(
            "coupled",
            coupled,
            not (sample and coupled),
            "false with sample=true: a chain is one or the other",
        )
        valid = is_real(min_confidence) and 0 <= min_confidence <= 1
        check("min_confidence", min_confidence, valid, "in [0, 1]; 0 never stops")
        self.max_nodes = num_tokens
        self.sample = sample
        self.coupled = coupled
        self.min_confidence = float(min_confidence)
        self.law = ProposalLaw.CHAIN if sample else ProposalLaw.DETERMINISTIC

    def propose(self, model: DraftModel, batch: DraftBatch, budget: Sequence[int]) -> TokenTree:
        lengths = [
            min(nodes, self.max_nodes, depth) for nodes, depth in zip(budget, batch.max_depths, strict=True)
        ]
        builder = TreeBuilder(batch, max(lengths))
        going = [(row, 0) for row, length in enumerate(lengths) if length > 0]
        while going:
            frontier = builder.frontier([row for row, _ in going], [node for _, node in going])
            if self.sample:
                grown = self._drawn(model, frontier)
            else:
                candidates = _race(model, frontier) if self.coupled else model.top_k(frontier, 1)
                grown = self._take(frontier, *candidates)
            # A chain's node number is its depth.
            going = [(row, node) for row, node in grown if node < lengths[row]]
        return builder.build(self.law)

    def _take(self, frontier: Frontier, tokens: Tensor, log_q: Tensor) -> list[tuple[int, int]]:
        """Adds the candidate of each node, `[n, 1]`; nothing where there is none, or none likely enough."""
        if self.min_confidence:
            log_q = log_q.masked_fill(log_q < math.log(self.min_confidence), float("-inf"))
        rows, nodes = frontier.rows, frontier.nodes
        children = take_children(frontier.builder, rows, nodes, tokens, log_q, [[0]] * len(rows))
        return _pairs(rows, children)

    def _drawn(self, model: DraftModel, frontier: Frontier) -> list[tuple[int, int]]:
        """Draws one child of each node whose q is peaked enough."""
        rows, nodes = frontier.rows, frontier.nodes
        q = frontier.warp(model.expand(frontier))  # [n, V]
        if self.min_confidence:
            lines = (q.amax(-1) >= self.min_confidence).nonzero().squeeze(1).tolist()
            rows, nodes, q = [rows[line] for line in lines], [nodes[line] for line in lines], q[lines]
        if not rows:
            return []
        counts = [1] * len(rows)
        return _pairs(rows, draw_children(frontier.builder, rows, nodes, q, counts, Draw.WITH_REPLACEMENT))


def _race(model: DraftModel, frontier: Frontier) -> tuple[Tensor, Tensor]:
    """The winner of each node's race and its log q, both `[n, 1]`."""
    batch, q = frontier.batch, frontier.warp(model.expand(frontier))  # [n, V]
    requests = torch.tensor(frontier.rows, device=q.device)
    positions = batch.root_positions[requests] + torch.tensor(frontier.depths, device=q.device) + 1
    tokens = race(q, batch.rng.race(requests, positions, q.shape[1])).unsqueeze(1)
    return tokens, q.gather(1, tokens).log()


def _pairs(rows: Sequence[int], children: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    return [(row, node) for row, nodes in zip(rows, children, strict=True) for node in nodes]
