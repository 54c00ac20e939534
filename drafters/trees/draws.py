"""How the children of a node are chosen, and the law that each way gives.

    top_k                 the likeliest tokens                                  DETERMINISTIC
    with_replacement      independent draws from q, duplicates and all          IID
    without_replacement   draws from q, each token's mass removed once drawn    WITHOUT_REPLACEMENT

q is the distribution after the request's warping, in float32, and the tree carries it as it was drawn from: its
mass before the first draw, since the verifier renormalises by itself. Drawn siblings stay in the order of their
draws. Without replacement a node whose q has run out of tokens has fewer children.
The coin of a draw is keyed by the root's position and the index of the new node in its tree.
Source: SpecInfer, arXiv:2305.09781 (with); RSD, arXiv:2402.14160, Sequoia, arXiv:2402.12374 (without).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor

from specdec.core import ProposalLaw, Stream
from specdec.core.sampling import sample
from specdec.drafters.base import DraftModel
from specdec.drafters.trees.builder import Frontier, TreeBuilder


class Draw(Enum):
    """A way to choose children."""

    TOP_K = "top_k"
    WITH_REPLACEMENT = "with_replacement"
    WITHOUT_REPLACEMENT = "without_replacement"

    @property
    def law(self) -> ProposalLaw:
        return _LAWS[self]

    @staticmethod
    def parse(draw: str) -> Draw:
        """The member of that name.

        Raises:
            ValueError: there is none.
        """
        known = [member.value for member in Draw]
        if draw not in known:
            raise ValueError(f"draw={draw!r}: expected one of {', '.join(known)}")
        return Draw(draw)


_LAWS = {
    Draw.TOP_K: ProposalLaw.DETERMINISTIC,
    Draw.WITH_REPLACEMENT: ProposalLaw.IID,
    Draw.WITHOUT_REPLACEMENT: ProposalLaw.WITHOUT_REPLACEMENT,
}


def add_children(
    model: DraftModel, frontier: Frontier, ranks: Sequence[Sequence[int]], draw: Draw
) -> list[list[int]]:
    """Expands n nodes and adds children to them.

    Args:
        model: what to expand with.
        frontier: n nodes.
        ranks: sibling ranks wanted of each node, ascending; for drawn children they count up from 0.
        draw: how to choose.

    Returns:
        The new nodes of each node, in the order of its ranks; fewer where there are not so many tokens.
    """
    if draw is Draw.TOP_K:
        width = 1 + max(own[-1] for own in ranks)
        tokens, log_q = model.top_k(frontier, width)
        return take_children(frontier.builder, frontier.rows, frontier.nodes, tokens, log_q, ranks)
    assert all(list(own) == list(range(len(own))) for own in ranks), "drawn children count up from 0"
    q = frontier.warp(model.expand(frontier))  # [n, V]
    counts = [len(own) for own in ranks]
    return draw_children(frontier.builder, frontier.rows, frontier.nodes, q, counts, draw)


def take_children(
    builder: TreeBuilder,
    rows: Sequence[int],
    nodes: Sequence[int],
    tokens: Tensor,
    log_q: Tensor,
    ranks: Sequence[Sequence[int]],
) -> list[list[int]]:
    """Adds chosen ranks of given candidates to n nodes: tokens and log q `[n, k]`, best first.

    A candidate whose log q is -inf or NaN is none. Returns as `add_children` does.
    """
    exists = (log_q > float("-inf")).tolist()
    kept = [[rank for rank in own if line[rank]] for own, line in zip(ranks, exists, strict=True)]
    if not any(kept):
        return kept
    lines = [line for line, own in enumerate(kept) for _ in own]
    columns = [rank for own in kept for rank in own]
    parents = [nodes[line] for line in lines]
    added = builder.add(
        [rows[line] for line in lines], parents, tokens[lines, columns], log_q[lines, columns]
    )
    return _split(added, [len(own) for own in kept])


def draw_children(
    builder: TreeBuilder,
    rows: Sequence[int],
    nodes: Sequence[int],
    q: Tensor,
    counts: Sequence[int],
    draw: Draw,
) -> list[list[int]]:
    """Draws up to `counts[i]` children of node i from `q[i]`, adds them and records q. Returns as `add_children`.

    Args:
        builder: where the nodes are.
        rows: n request rows.
        nodes: n nodes, never drawn from before.
        q: `[n, V]` float32.
        counts: at least one child each.
        draw: with or without replacement.
    """
    removes = draw is Draw.WITHOUT_REPLACEMENT and max(counts) > 1
    if removes:
        # How many tokens have mass is known before the first draw: it can't depend on what is drawn.
        support = (q > 0).sum(-1).tolist()
        counts = [min(count, most) for count, most in zip(counts, support, strict=True)]
    lines = [line for line, count in enumerate(counts) for _ in range(count)]
    child_rows, parents = [rows[line] for line in lines], [nodes[line] for line in lines]
    children = builder.next_nodes(child_rows)
    coins = draft_coins(builder, child_rows, children)
    drawn = torch.empty_like(coins, dtype=torch.int64)
    weights = q.clone() if removes else q
    order = [rank for count in counts for rank in range(count)]
    for rank in range(max(counts)):
        entries = [entry for entry, own in enumerate(order) if own == rank]
        sources = [lines[entry] for entry in entries]
        tokens = sample(weights if len(sources) == len(weights) else weights[sources], coins[entries])
        drawn[entries] = tokens
        if removes:
            weights[sources, tokens] = 0
    added = builder.add(child_rows, parents, drawn, q[lines, drawn].log())
    assert added == children, "the coins belong to these nodes"
    builder.record_q(rows, nodes, q)
    return _split(added, counts)


def draft_coins(builder: TreeBuilder, rows: Sequence[int], nodes: Sequence[int]) -> Tensor:
    """The coins `[n]` float64 that draw the tokens of n nodes, known by their indices before they exist."""
    device = builder.tokens.device
    requests = torch.tensor(rows, device=device)
    positions = builder.batch.root_positions[requests]
    indices = torch.tensor(nodes, device=device)
    return builder.batch.rng.uniform(requests, positions, indices, Stream.DRAFT)


def _split(nodes: list[int], counts: Sequence[int]) -> list[list[int]]:
    remaining = iter(nodes)
    return [[next(remaining) for _ in range(count)] for count in counts]
