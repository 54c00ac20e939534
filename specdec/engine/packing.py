"""Packing: the missing committed tokens and the tree nodes of many requests become one token batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from specdec.kernels.tree_attention.metadata import AttentionMetadata, HostMetadata


@dataclass(frozen=True, kw_only=True, eq=False)
class TreeNodes:
    """M nodes of B requests, in request order, that take part in a forward."""

    tokens: Tensor
    """`[M]` int64."""
    depths: Tensor
    """`[M]` int64."""
    slots: Tensor
    """`[M]` int64, tree slot of each node's K/V; 0 is the root's."""
    ancestors: Tensor
    """`[M, W]` int32, bit set over tree slots of the node and its ancestors."""
    counts: Sequence[int]
    """Nodes of each request, length B."""
    num_slots: Sequence[int]
    """Tree slots of each request that hold K/V after the forward, length B."""
    slot_depths: Tensor
    """`[B, 32 * W]` int32, depth of the node in each tree slot."""
    max_depth: int


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedBatch:
    """N tokens of one forward."""

    tokens: Tensor
    """`[N]` int64."""
    meta: AttentionMetadata
    node_rows: Tensor | None
    """`[M]` int64, packed row of each tree node; None when all rows are nodes."""

    def select_nodes(self, values: Tensor) -> Tensor:
        """Rows of the tree nodes of a `[N, ...]` tensor."""
        return values if self.node_rows is None else values[self.node_rows]


def pack(
    nodes: TreeNodes,
    root_positions: Sequence[int],
    block_tables: Tensor,
    block_size: int,
    missing: Sequence[Sequence[int]] | None = None,
) -> PackedBatch:
    """Builds the token batch of a forward.

    Args:
        nodes: tree nodes of B requests.
        root_positions: position of each root, length B.
        block_tables: `[B, P]` int32.
        block_size: tokens a page.
        missing: committed tokens before each root whose K/V is missing (a prefill); None for none.
    """
    device = nodes.tokens.device
    num_missing = [len(tokens) for tokens in missing] if missing else [0] * len(root_positions)
    counts = [extra + count for extra, count in zip(num_missing, nodes.counts, strict=True)]
    offsets = [0, *accumulate(counts)]
    request = _repeat(range(len(counts)), nodes.counts, device)  # [M]
    roots = torch.tensor(root_positions, dtype=torch.int64, device=device)  # [B]
    root_of_node = roots[request]
    columns = _Columns(
        tokens=nodes.tokens,
        positions=root_of_node + nodes.depths,
        limits=root_of_node,
        depths=nodes.depths,
        logical=root_of_node + nodes.slots,
        request=request,
        ancestors=nodes.ancestors,
    )
    node_rows = None
    if missing is not None and any(num_missing):
        columns, node_rows = _insert_missing(columns, missing, nodes.counts, root_positions)
    pages = block_tables[columns.request, columns.logical // block_size].long()
    kv_lens = [root + slots for root, slots in zip(root_positions, nodes.num_slots, strict=True)]
    meta = AttentionMetadata(
        query_offsets=torch.tensor(offsets, dtype=torch.int32, device=device),
        tree_starts=roots.int(),
        causal_limits=columns.limits.int(),
        ancestors=columns.ancestors,
        positions=columns.positions,
        depths=columns.depths.int(),
        slot_depths=nodes.slot_depths,
        slots=pages * block_size + columns.logical % block_size,
        block_tables=block_tables,
        block_size=block_size,
        max_query_len=max(counts),
        max_kv_len=max(kv_lens),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        host=HostMetadata(
            query_offsets=offsets,
            tree_starts=list(root_positions),
            kv_lens=kv_lens,
            num_prefill=num_missing,
            max_depth=nodes.max_depth,
        ),
    )
    return PackedBatch(tokens=columns.tokens, meta=meta, node_rows=node_rows)


def physical_slots(
    block_tables: Sequence[Sequence[int]], rows: Sequence[int], logical: Sequence[int], block_size: int
) -> list[int]:
    """Physical slots of logical slots, on the host."""
    return [
        block_tables[row][slot // block_size] * block_size + slot % block_size
        for row, slot in zip(rows, logical, strict=True)
    ]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Columns:
    """Per-query columns; `logical` is the logical slot of the query's own K/V."""

    tokens: Tensor
    positions: Tensor
    limits: Tensor
    depths: Tensor
    logical: Tensor
    request: Tensor
    ancestors: Tensor


def _insert_missing(
    nodes: _Columns, missing: Sequence[Sequence[int]], node_counts: Sequence[int], roots: Sequence[int]
) -> tuple[_Columns, Tensor]:
    """Puts each request's missing committed tokens before its nodes."""
    device = nodes.tokens.device
    tokens: list[int] = []
    positions: list[int] = []
    request: list[int] = []
    order: list[int] = []
    next_node = len(nodes.tokens)
    first_missing = 0
    node_base = 0
    for row, (lacking, count) in enumerate(zip(missing, node_counts, strict=True)):
        tokens += lacking
        positions += range(roots[row] - len(lacking), roots[row])
        request += [row] * len(lacking)
        # Row indices into the concatenation (all nodes, then all missing tokens).
        order += range(next_node + first_missing, next_node + first_missing + len(lacking))
        order += range(node_base, node_base + count)
        first_missing += len(lacking)
        node_base += count
    permutation = torch.tensor(order, device=device)
    position = torch.tensor(positions, dtype=torch.int64, device=device)
    zeros = torch.zeros_like(position)

    def merge(node_values: Tensor, values: Tensor) -> Tensor:
        return torch.cat((node_values, values))[permutation]

    columns = _Columns(
        tokens=merge(nodes.tokens, torch.tensor(tokens, dtype=torch.int64, device=device)),
        positions=merge(nodes.positions, position),
        limits=merge(nodes.limits, position + 1),
        depths=merge(nodes.depths, zeros),
        logical=merge(nodes.logical, position),
        request=merge(nodes.request, torch.tensor(request, dtype=torch.int64, device=device)),
        ancestors=merge(nodes.ancestors, nodes.ancestors.new_zeros(len(tokens), nodes.ancestors.shape[1])),
    )
    rows_of_nodes = torch.empty_like(permutation)
    rows_of_nodes[permutation] = torch.arange(len(order), device=device)
    return columns, rows_of_nodes[: len(nodes.tokens)]


def _repeat(values: Sequence[int], counts: Sequence[int], device: torch.device) -> Tensor:
    repeated = [value for value, count in zip(values, counts, strict=True) for _ in range(count)]
    return torch.tensor(repeated, dtype=torch.int64, device=device)
