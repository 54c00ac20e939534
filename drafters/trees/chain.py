"""Chain: one child a level, the likeliest or one drawn from q.

Sources: Leviathan et al., arXiv:2211.17192 (drawn); Stern et al., arXiv:1811.03115 (argmax).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specdec.core import ProposalLaw, Stream, TokenTree
from specdec.core.checks import is_integer
from specdec.core.sampling import sample, warp
from specdec.drafters.base import DraftBatch, DraftModel, TreeProposer
from specdec.drafters.trees.builder import Frontier, TreeBuilder


class ChainProposer(TreeProposer):
    """A single path of up to `num_tokens` tokens, argmax or (`sample=true`) drawn from q."""

    possible_laws = (ProposalLaw.DETERMINISTIC, ProposalLaw.CHAIN)

    def __init__(self, num_tokens: int = 5, sample: bool = False) -> None:
        if not is_integer(num_tokens) or num_tokens < 1:
            raise ValueError(
                f"num_tokens={num_tokens!r}: a chain needs at least 1; for plain decoding use drafter=none"
            )
        self.max_nodes = num_tokens
        self.sample = sample
        self.law = ProposalLaw.CHAIN if sample else ProposalLaw.DETERMINISTIC

    def propose(self, model: DraftModel, batch: DraftBatch, budget: Sequence[int]) -> TokenTree:
        lengths = [
            min(nodes, self.max_nodes, depth) for nodes, depth in zip(budget, batch.max_depths, strict=True)
        ]
        builder = TreeBuilder(batch, max(lengths))
        rows = [row for row, length in enumerate(lengths) if length > 0]
        nodes = [0] * len(rows)
        distributions: list[Tensor] = []
        parents: list[tuple[list[int], list[int]]] = []
        while rows:
            frontier = builder.frontier(rows, nodes)
            if self.sample:
                tokens, log_q, q = _draw(model, frontier)
                distributions.append(q)
                parents.append((rows, nodes))
            else:
                candidates, log_candidates = model.top_k(frontier, 1)
                tokens, log_q = candidates[:, 0], log_candidates[:, 0]
                # A model without a candidate ends its chain: nothing is drafted in its place.
                found = (log_q > float("-inf")).tolist()
                if not all(found):
                    rows = [row for row, exists in zip(rows, found, strict=True) if exists]
                    nodes = [node for node, exists in zip(nodes, found, strict=True) if exists]
                    tokens, log_q = tokens[found], log_q[found]
            nodes = builder.add(rows, nodes, tokens, log_q)
            going = [(row, node) for row, node in zip(rows, nodes, strict=True) if node < lengths[row]]
            rows, nodes = [row for row, _ in going], [node for _, node in going]
        tree = builder.build(self.law)
        return _with_q(tree, distributions, parents) if distributions else tree


def _draw(model: DraftModel, frontier: Frontier) -> tuple[Tensor, Tensor, Tensor]:
    """One draw a node from the warped q: tokens `[n]`, log q `[n]`, and q itself `[n, V]` float32."""
    batch, device = frontier.batch, frontier.tokens.device
    requests = torch.tensor(frontier.rows, device=device)
    logits = model.expand(frontier)
    # A row that nothing can be drawn from becomes uniform: honest, and no other request pays for it.
    usable = logits.amax(-1, keepdim=True).isfinite()
    q = warp(torch.where(usable, logits, 0.0), batch.sampling, requests)  # [n, V]
    positions = batch.root_positions[requests] + torch.tensor(frontier.depths, device=device) + 1
    coins = batch.rng.uniform(requests, positions, torch.zeros_like(positions), Stream.DRAFT)
    tokens = sample(q, coins)
    return tokens, q.gather(1, tokens.unsqueeze(1)).squeeze(1).log(), q


def _with_q(
    tree: TokenTree, distributions: list[Tensor], parents: list[tuple[list[int], list[int]]]
) -> TokenTree:
    q_row = [-1] * len(tree.tokens)
    drawn = [(row, node) for rows, nodes in parents for row, node in zip(rows, nodes, strict=True)]
    for index, (row, node) in enumerate(drawn):
        q_row[tree.host_offsets[row] + node] = index
    return replace(tree, q=torch.cat(distributions), q_row=torch.tensor(q_row, device=tree.tokens.device))
