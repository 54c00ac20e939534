"""Best-first tree: the nodes with the largest cumulative q, within a node budget.

Each round expands, in one batch, the nodes that are among the best known ones and not expanded yet; it ends
when all of them are. Scores fall along a path, so the best nodes form a tree; with enough expansions it is
the best tree of its size under q.
Source: the idea is shared by OPT-Tree, arXiv:2406.17276, and EAGLE-2, arXiv:2406.16858; the rounds are ours.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from specdec.core import ProposalLaw, TokenTree
from specdec.core.checks import check_positive
from specdec.drafters.base import DraftBatch, DraftModel, TreeProposer
from specdec.drafters.trees.builder import TreeBuilder


class BestFirstProposer(TreeProposer):
    """The `num_nodes` nodes with the largest cumulative q, up to `max_depth` levels."""

    law = ProposalLaw.DETERMINISTIC

    def __init__(self, num_nodes: int = 16, max_depth: int = 6, branching: int = 4) -> None:
        for name, value in (("num_nodes", num_nodes), ("max_depth", max_depth), ("branching", branching)):
            check_positive(name, value)
        self.max_nodes = num_nodes
        self.max_depth = max_depth
        self.branching = branching

    def propose(self, model: DraftModel, batch: DraftBatch, budget: Sequence[int]) -> TokenTree:
        limits = [min(nodes, self.max_nodes) for nodes in budget]
        depths = [min(self.max_depth, depth) for depth in batch.max_depths]
        # At most 1 + limit expansions a request (its slots), each adding `branching` candidates.
        builder = TreeBuilder(batch, self.branching * (1 + max(limits)))
        # Scores on the host, in step with the builder's nodes.
        scores: list[list[float]] = [[0.0] for _ in range(batch.size)]
        best: list[list[int]] = [[0] for _ in range(batch.size)]
        while sources := self._to_expand(builder, best, limits, depths):
            self._expand(model, builder, sources, scores)
            for row in {row for row, _ in sources}:
                # heapq.nlargest keeps the earlier node among equals, so parents stay before their children.
                best[row] = heapq.nlargest(
                    limits[row] + 1, range(len(scores[row])), key=scores[row].__getitem__
                )
        return builder.build(self.law, keep=[sorted(nodes) for nodes in best])

    def _to_expand(
        self, builder: TreeBuilder, best: list[list[int]], limits: list[int], depths: list[int]
    ) -> list[tuple[int, int]]:
        sources = []
        for row, nodes in enumerate(best):
            room = limits[row] + 1 - builder.num_slots[row] if limits[row] else 0
            waiting = [
                node
                for node in nodes
                if builder.slots[row][node] < 0 and builder.depths[row][node] < depths[row]
            ]
            sources += [(row, node) for node in waiting[:room]]
        return sources

    def _expand(
        self,
        model: DraftModel,
        builder: TreeBuilder,
        sources: list[tuple[int, int]],
        scores: list[list[float]],
    ) -> None:
        frontier = builder.frontier([row for row, _ in sources], [node for _, node in sources])
        tokens, log_q = model.top_k(frontier, self.branching)  # [n, k]
        found = (log_q > float("-inf")).nonzero().tolist()
        if not found:
            return
        lines, ranks = [line for line, _ in found], [rank for _, rank in found]
        rows, parents = [sources[line][0] for line in lines], [sources[line][1] for line in lines]
        values = log_q[lines, ranks]
        builder.add(rows, parents, tokens[lines, ranks], values)
        for row, parent, value in zip(rows, parents, values.tolist(), strict=True):
            scores[row].append(scores[row][parent] + value)
