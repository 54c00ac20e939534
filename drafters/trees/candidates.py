"""Scored candidates: what trees that keep the best nodes share.

A score is the log probability of a node's path under the drafter, so it falls along every path. Hence the best
nodes form a tree, parents first among equals. And a node that isn't among the best now never will be, nor will
anything below it: it need not be expanded, and if it was, its slot is given back. A request never holds more
slots than its tree may have nodes, root included, however many nodes are expanded on the way.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.core import ProposalLaw, TokenTree
from specdec.drafters.base import DraftBatch, DraftModel
from specdec.drafters.trees.builder import TreeBuilder

Node = tuple[int, int]
"""Request row and index inside its tree."""


class Candidates:
    """The best `limits[b]` nodes of each request b among those seen so far, no deeper than `depths[b]`.

    Ties go to the node that came first; a candidate whose score is NaN or -inf is none.
    """

    def __init__(self, batch: DraftBatch, limits: Sequence[int], depths: Sequence[int]) -> None:
        self.limits = limits
        self.depths = depths
        # A level adds no more nodes than can be kept.
        capacity = max(limit * depth for limit, depth in zip(limits, depths, strict=True))
        self.builder = TreeBuilder(batch, capacity)
        # Host copies, in step with the builder's nodes.
        self.scores: list[list[float]] = [[0.0] for _ in range(batch.size)]
        self.best: list[list[int]] = [[0] for _ in range(batch.size)]
        """Nodes kept of each request, the root included, best first."""

    def waiting(self, row: int) -> list[int]:
        """Nodes of a request that are kept and can be expanded, best first."""
        if not self.limits[row]:
            return []
        slots, depths = self.builder.slots[row], self.builder.depths[row]
        return [node for node in self.best[row] if slots[node] < 0 and depths[node] < self.depths[row]]

    def expand(self, model: DraftModel, sources: Sequence[Node], branching: int) -> dict[int, list[int]]:
        """Adds the top children of the sources, as many of each request as could be kept.

        Args:
            model: what to expand with.
            sources: nodes not expanded before, those of a request adjacent.
            branching: children looked at of each node.

        Returns:
            For each row with sources the new nodes, best first.
        """
        rows, nodes = [row for row, _ in sources], [node for _, node in sources]
        tokens, log_q = model.top_k(self.builder.frontier(rows, nodes), branching)  # [n, k]
        scores = self.builder.scores[rows, nodes].unsqueeze(1) + log_q  # [n, k]
        lines, ranks, values = self._choose(rows, scores)
        fresh: dict[int, list[int]] = {row: [] for row in rows}
        if lines:
            parents = [nodes[line] for line in lines]
            child_rows = [rows[line] for line in lines]
            added = self.builder.add(child_rows, parents, tokens[lines, ranks], log_q[lines, ranks])
            for row, parent, node, value in zip(child_rows, parents, added, values, strict=True):
                assert value <= self.scores[row][parent], f"log q of {value} above its parent's"
                self.scores[row].append(value)
                fresh[row].append(node)
        for row, new in fresh.items():
            self._update(row, new)
        return fresh

    def build(self, law: ProposalLaw) -> TokenTree:
        """Trees of the kept nodes."""
        return self.builder.build(law, keep=[sorted(nodes) for nodes in self.best])

    def _choose(self, rows: Sequence[int], scores: Tensor) -> tuple[list[int], list[int], list[float]]:
        """The best entries of `scores` `[n, k]` within each request: lines, ranks and scores, best first."""
        own = list(dict.fromkeys(rows))
        first_line = {row: rows.index(row) for row in own}
        columns = [line - first_line[row] for line, row in enumerate(rows)]
        branching = scores.shape[1]
        table = scores.new_full((len(own), 1 + max(columns), branching), float("-inf"))  # [R, W, k]
        usable = scores.masked_fill(scores.isnan(), float("-inf"))
        table[[own.index(row) for row in rows], columns] = usable
        # A stable sort, not topk: ties must fall alike whatever the neighbours' widths.
        ordered, order = table.flatten(1).sort(dim=1, descending=True, stable=True)
        lines, ranks, kept = [], [], []
        width = max(self.limits)
        on_host = torch.stack((ordered[:, :width].double(), order[:, :width].double())).tolist()
        for row, values, places in zip(own, *on_host, strict=True):
            for value, place in zip(values[: self.limits[row]], places, strict=False):
                if value == float("-inf"):
                    break
                lines.append(first_line[row] + int(place) // branching)
                ranks.append(int(place) % branching)
                kept.append(value)
        return lines, ranks, kept

    def _update(self, row: int, new: list[int]) -> None:
        pool = self.best[row] + new
        # heapq.nlargest keeps the earlier among equals, so parents stay before their children.
        self.best[row] = heapq.nlargest(self.limits[row] + 1, pool, key=self.scores[row].__getitem__)
        for node in set(pool).difference(self.best[row]):
            self.builder.release(row, node)
