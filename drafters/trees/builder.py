"""Growing trees level by level: proposers add nodes, draft models expand them.

Topology lives on the host, so node counts need no synchronisation; tokens and scores stay on the device. An
expanded node gets the next free tree slot of its request: its K/V in a draft cache goes there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from specdec.core import ProposalLaw, TokenTree
from specdec.drafters.base import DraftBatch


@dataclass(frozen=True, kw_only=True, eq=False)
class Frontier:
    """The n nodes a draft model is asked to expand."""

    builder: TreeBuilder
    rows: list[int]
    """Request row of each node; nodes of one request are adjacent."""
    nodes: list[int]
    """Index of each node inside its tree."""

    @property
    def batch(self) -> DraftBatch:
        return self.builder.batch

    @cached_property
    def tokens(self) -> Tensor:
        """`[n]` int64."""
        return self.builder.tokens[self.rows, self.nodes]

    @cached_property
    def slots(self) -> list[int]:
        """Tree slot of each node's K/V."""
        return [self.builder.slots[row][node] for row, node in zip(self.rows, self.nodes, strict=True)]

    @cached_property
    def depths(self) -> list[int]:
        return [self.builder.depths[row][node] for row, node in zip(self.rows, self.nodes, strict=True)]

    @cached_property
    def ancestor_slots(self) -> list[int]:
        """Bit set over tree slots of each node's path, itself included."""
        return [self.builder.slot_masks[row][node] for row, node in zip(self.rows, self.nodes, strict=True)]

    @property
    def only_roots(self) -> bool:
        return not any(self.nodes)

    def paths(self) -> list[list[int]]:
        """Drafted tokens from the root (excluded) to each node, for models that look at text."""
        tokens = self.builder.tokens.tolist()
        result = []
        for row, node in zip(self.rows, self.nodes, strict=True):
            path = []
            while node:
                path.append(tokens[row][node])
                node = self.builder.parents[row][node]
            result.append(path[::-1])
        return result


class TreeBuilder:
    """Trees of B requests under construction.

    Args:
        batch: the requests; their roots become node 0.
        capacity: nodes of the largest tree, root not counted.
    """

    def __init__(self, batch: DraftBatch, capacity: int) -> None:
        self.batch = batch
        shape = (batch.size, capacity + 1)
        self.tokens = batch.roots.new_zeros(shape)  # [B, C]
        self.tokens[:, 0] = batch.roots
        self.scores = torch.zeros(shape, device=batch.roots.device)  # [B, C] log path probability
        self.parents: list[list[int]] = [[-1] for _ in range(batch.size)]
        self.depths: list[list[int]] = [[0] for _ in range(batch.size)]
        self.slots: list[list[int]] = [[-1] for _ in range(batch.size)]
        self.slot_masks: list[list[int]] = [[0] for _ in range(batch.size)]
        self.num_slots = [0] * batch.size

    def frontier(self, rows: Sequence[int], nodes: Sequence[int]) -> Frontier:
        """Claims a slot for each node and returns what a draft model needs to expand them."""
        for row, node in zip(rows, nodes, strict=True):
            assert self.slots[row][node] < 0, f"node {node} of row {row} was expanded before"
            slot = self.slots[row][node] = self.num_slots[row]
            self.num_slots[row] += 1
            parent = self.parents[row][node]
            above = self.slot_masks[row][parent] if parent >= 0 else 0
            self.slot_masks[row][node] = above | (1 << slot)
        return Frontier(builder=self, rows=list(rows), nodes=list(nodes))

    def add(self, rows: Sequence[int], parents: Sequence[int], tokens: Tensor, log_q: Tensor) -> list[int]:
        """Appends n children, tokens `[n]` int64 and log q given the parent `[n]`. Returns their indices."""
        nodes = []
        for row, parent in zip(rows, parents, strict=True):
            nodes.append(len(self.parents[row]))
            self.parents[row].append(parent)
            self.depths[row].append(self.depths[row][parent] + 1)
            self.slots[row].append(-1)
            self.slot_masks[row].append(0)
        rows, parents = list(rows), list(parents)
        self.tokens[rows, nodes] = tokens
        self.scores[rows, nodes] = self.scores[rows, parents] + log_q
        return nodes

    def build(self, law: ProposalLaw, keep: Sequence[Sequence[int]] | None = None) -> TokenTree:
        """The finished trees.

        Args:
            law: how the children were chosen.
            keep: nodes to keep of each request, ascending, with the root and all parents; None keeps all.
        """
        if keep is None:
            keep = [range(len(parents)) for parents in self.parents]
        rows = [row for row, nodes in enumerate(keep) for _ in nodes]
        columns = list(chain.from_iterable(keep))
        parents = []
        for row, nodes in enumerate(keep):
            new_index = {node: index for index, node in enumerate(nodes)}
            parents += [new_index.get(self.parents[row][node], -1) for node in nodes]
        device = self.tokens.device

        def gather(values: list[list[int]]) -> Tensor:
            return torch.tensor(
                [values[row][node] for row, node in zip(rows, columns, strict=True)], device=device
            )

        return TokenTree(
            tokens=self.tokens[rows, columns],
            parents=torch.tensor(parents, device=device),
            depth=gather(self.depths),
            num_nodes=[len(nodes) for nodes in keep],
            root_positions=self.batch.root_positions,
            laws=[law] * self.batch.size,
            score=self.scores[rows, columns],
            draft_slots=gather(self.slots),
        )
