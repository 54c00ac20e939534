"""Growing trees level by level: proposers add nodes, draft models expand them.

Topology lives on the host, so node counts need no synchronisation; tokens and scores stay on the device. An
expanded node gets the lowest free tree slot of its request: its K/V in a draft cache goes there.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from specdec.core import ProposalLaw, TokenTree
from specdec.core.sampling import warp
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

    @cached_property
    def path_tokens(self) -> Tensor:
        """`[n, D]` int64, drafted tokens from the root (excluded) to each node, itself included; -1 pads."""
        paths = [self.builder.path(row, node) for row, node in zip(self.rows, self.nodes, strict=True)]
        width = max(map(len, paths))
        device = self.builder.tokens.device
        padded = [path + [-1] * (width - len(path)) for path in paths]
        nodes = torch.tensor(padded, dtype=torch.int64, device=device).view(len(paths), width)
        rows = torch.tensor(self.rows, device=device).unsqueeze(1)
        return torch.where(nodes < 0, -1, self.builder.tokens[rows, nodes.clamp(min=0)])

    def paths(self) -> list[list[int]]:
        """`path_tokens` on the host and without padding, for models that look at text."""
        return [[token for token in path if token >= 0] for path in self.path_tokens.tolist()]

    def warp(self, logits: Tensor) -> Tensor:
        """q: what children of the n nodes are drawn from, by each request's sampling parameters.

        A row that nothing can be drawn from (NaN, or no token left) becomes uniform: honest, and no other request
        pays for it.

        Args:
            logits: `[n, V]`, any float dtype.

        Returns:
            `[n, V]` float32, rows summing to 1.
        """
        sampling = self.batch.sampling
        requests = torch.tensor(self.rows, device=logits.device)
        q = warp(logits, sampling, requests, self.path_tokens if sampling.uses_history else None)
        return torch.where(q.amax(-1, keepdim=True) > 0, q, 1 / q.shape[1])


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
        self._free_slots: list[list[int]] = [[] for _ in range(batch.size)]
        self._drawn_from: list[tuple[Sequence[int], Sequence[int], Tensor]] = []

    def path(self, row: int, node: int) -> list[int]:
        """Nodes from the root (excluded) to a node, itself included."""
        nodes = []
        while node:
            nodes.append(node)
            node = self.parents[row][node]
        return nodes[::-1]

    def frontier(self, rows: Sequence[int], nodes: Sequence[int]) -> Frontier:
        """Claims a slot for each node and returns what a draft model needs to expand them."""
        for row, node in zip(rows, nodes, strict=True):
            assert self.slots[row][node] < 0, f"node {node} of row {row} was expanded before"
            slot = self.slots[row][node] = self._claim_slot(row)
            parent = self.parents[row][node]
            above = self.slot_masks[row][parent] if parent >= 0 else 0
            self.slot_masks[row][node] = above | (1 << slot)
        return Frontier(builder=self, rows=list(rows), nodes=list(nodes))

    def release(self, row: int, node: int) -> None:
        """Gives back the slot of an expanded node that is no ancestor of anything still to be expanded."""
        if self.slots[row][node] >= 0:
            heapq.heappush(self._free_slots[row], self.slots[row][node])
            self.slots[row][node] = -1

    def next_nodes(self, rows: Sequence[int]) -> list[int]:
        """The indices that `add` gives to one more node for each entry of `rows`."""
        counts = {row: len(self.parents[row]) for row in rows}
        nodes = []
        for row in rows:
            nodes.append(counts[row])
            counts[row] += 1
        return nodes

    def add(self, rows: Sequence[int], parents: Sequence[int], tokens: Tensor, log_q: Tensor) -> list[int]:
        """Appends n children, tokens `[n]` int64 and log q given the parent `[n]`. Returns their indices."""
        rows, parents, nodes = list(rows), list(parents), self.next_nodes(rows)
        for row, parent in zip(rows, parents, strict=True):
            self.parents[row].append(parent)
            self.depths[row].append(self.depths[row][parent] + 1)
            self.slots[row].append(-1)
            self.slot_masks[row].append(0)
        self.tokens[rows, nodes] = tokens
        self.scores[rows, nodes] = self.scores[rows, parents] + log_q
        return nodes

    def record_q(self, rows: Sequence[int], nodes: Sequence[int], q: Tensor) -> None:
        """Notes the distributions `[n, V]` float32 that all children of n nodes were drawn from."""
        self._drawn_from.append((rows, nodes, q))

    def build(self, law: ProposalLaw, keep: Sequence[Sequence[int]] | None = None) -> TokenTree:
        """The finished trees.

        Args:
            law: how the children were chosen.
            keep: nodes to keep of each request, ascending, with the root and all parents; None keeps all.
                Drawn nodes are all kept: dropping some by their tokens would break the law.
        """
        assert keep is None or not self._drawn_from, "drawn nodes can't be dropped"
        if keep is None:
            keep = [range(len(parents)) for parents in self.parents]
        rows = [row for row, nodes in enumerate(keep) for _ in nodes]
        columns = list(chain.from_iterable(keep))
        parents = []
        for row, nodes in enumerate(keep):
            new_index = {-1: -1} | {node: index for index, node in enumerate(nodes)}
            parents += [new_index[self.parents[row][node]] for node in nodes]
        device = self.tokens.device

        def gather(values: list[list[int]]) -> Tensor:
            return torch.tensor(
                [values[row][node] for row, node in zip(rows, columns, strict=True)], device=device
            )

        q, q_row = self._recorded_q()
        return TokenTree(
            tokens=self.tokens[rows, columns],
            parents=torch.tensor(parents, device=device),
            depth=gather(self.depths),
            num_nodes=[len(nodes) for nodes in keep],
            root_positions=self.batch.root_positions,
            laws=[law] * self.batch.size,
            q=q,
            q_row=q_row,
            score=self.scores[rows, columns],
            draft_slots=gather(self.slots),
        )

    def _claim_slot(self, row: int) -> int:
        if self._free_slots[row]:
            return heapq.heappop(self._free_slots[row])
        self.num_slots[row] += 1
        return self.num_slots[row] - 1

    def _recorded_q(self) -> tuple[Tensor | None, Tensor | None]:
        """q `[E, V]` and, for each of the N nodes, its row of q or -1 `[N]`; None if nothing was drawn."""
        if not self._drawn_from:
            return None, None
        q_row = [[-1] * len(parents) for parents in self.parents]
        drawn = [pair for rows, nodes, _ in self._drawn_from for pair in zip(rows, nodes, strict=True)]
        for index, (row, node) in enumerate(drawn):
            q_row[row][node] = index
        q = torch.cat([q for _, _, q in self._drawn_from])
        return q, torch.tensor(list(chain.from_iterable(q_row)), device=q.device)
