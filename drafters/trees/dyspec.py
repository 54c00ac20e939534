"""DySpec: a drawn tree that grows where the drafter expects acceptance.

A heap holds slots, places for one more draw, by estimated acceptance: that of reaching the slot's node with all
siblings drawn before rejected. The best slot is filled with a draw y from what is left of q there; with q' its
share of what was left, a slot of value v leaves one below y of value v q' and one beside y of value v (1 - q').
Filling `num_nodes` slots is optimal where acceptance equals q. Every drawn node is kept, and where to draw next is
decided by earlier draws only, so each draw has the law it claims.
All requests fill one slot a round; a draft model is asked about at most one node of each.
Law: WITHOUT_REPLACEMENT.
Needs of a drafter: next-token logits after any path.
Source: Xiong et al., "DySpec", arXiv:2410.11744.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.core import ProposalLaw, TokenTree
from specdec.core.checks import check_positive
from specdec.core.sampling import sample
from specdec.drafters.base import DraftBatch, DraftModel, TreeProposer
from specdec.drafters.trees.builder import TreeBuilder
from specdec.drafters.trees.draws import draft_coins

Slot = tuple[float, int]
"""Value, negated for the heap, and the node to draw below; of equal values the earlier node comes first."""


class DySpecProposer(TreeProposer):
    """Draws without replacement, next wherever the estimated acceptance is largest, until `num_nodes` are drawn."""

    law = ProposalLaw.WITHOUT_REPLACEMENT

    def __init__(self, num_nodes: int = 12, max_depth: int = 8) -> None:
        check_positive("num_nodes", num_nodes)
        check_positive("max_depth", max_depth)
        self.max_nodes = num_nodes
        self.max_depth = max_depth

    def propose(self, model: DraftModel, batch: DraftBatch, budget: Sequence[int]) -> TokenTree:
        limits = [min(nodes, self.max_nodes) for nodes in budget]
        depths = [min(self.max_depth, depth) for depth in batch.max_depths]
        builder = TreeBuilder(batch, max(limits))
        pool = _Residuals(builder, sum(limits))
        heaps: list[list[Slot]] = [[(-1.0, 0)] if depth else [] for depth in depths]
        while rows := _going(heaps, builder, limits):
            best = [heapq.heappop(heaps[row]) for row in rows]
            parents = [node for _, node in best]
            children, shares = pool.draw(model, rows, parents)
            for row, (negated, parent), child, share in zip(rows, best, children, shares, strict=True):
                if share < 1:
                    heapq.heappush(heaps[row], (negated * (1 - share), parent))
                if builder.depths[row][child] < depths[row]:
                    heapq.heappush(heaps[row], (negated * share, child))
        pool.record()
        return builder.build(self.law)


def _going(heaps: Sequence[list[Slot]], builder: TreeBuilder, limits: Sequence[int]) -> list[int]:
    """Requests with room for one more node and somewhere to draw it."""
    return [row for row, heap in enumerate(heaps) if heap and len(builder.parents[row]) <= limits[row]]


class _Residuals:
    """q of every node drawn from, and what is left of it."""

    def __init__(self, builder: TreeBuilder, capacity: int) -> None:
        self.builder = builder
        self.capacity = capacity
        self.line_of: dict[tuple[int, int], int] = {}
        self.q: Tensor | None = None  # [E, V]
        self.left: Tensor | None = None  # [E, V]

    def draw(self, model: DraftModel, rows: list[int], nodes: list[int]) -> tuple[list[int], list[float]]:
        """Draws one child of each of n nodes of different requests.

        Returns:
            The new nodes, and the share each token had of what was left before.
        """
        new = [(row, node) for row, node in zip(rows, nodes, strict=True) if (row, node) not in self.line_of]
        if new:
            self._expand(model, new)
        assert self.q is not None
        assert self.left is not None
        lines = [self.line_of[pair] for pair in zip(rows, nodes, strict=True)]
        weights = self.left[lines]  # [n, V]
        tokens = sample(weights, draft_coins(self.builder, rows, self.builder.next_nodes(rows)))
        mass = weights.sum(-1, dtype=torch.float64)
        shares = weights.gather(1, tokens.unsqueeze(1)).squeeze(1) / mass
        self.left[lines, tokens] = 0
        return self.builder.add(rows, nodes, tokens, self.q[lines, tokens].log()), shares.tolist()

    def record(self) -> None:
        """Hands q to the tree."""
        if self.q is not None:
            rows, nodes = zip(*self.line_of, strict=True)
            self.builder.record_q(rows, nodes, self.q[: len(rows)])

    def _expand(self, model: DraftModel, new: list[tuple[int, int]]) -> None:
        frontier = self.builder.frontier([row for row, _ in new], [node for _, node in new])
        q = frontier.warp(model.expand(frontier))
        if self.q is None or self.left is None:
            self.q, self.left = (q.new_empty(self.capacity, q.shape[1]) for _ in range(2))
        first = len(self.line_of)
        self.q[first : first + len(new)] = q
        self.left[first : first + len(new)] = q
        self.line_of.update((pair, first + index) for index, pair in enumerate(new))
