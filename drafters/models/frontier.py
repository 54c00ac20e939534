"""Frontier nodes as the token batch of an autoregressive draft model."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.drafters.trees.builder import Frontier
from specdec.engine.packing import TreeNodes

_WORD = 0xFFFFFFFF


def frontier_nodes(frontier: Frontier) -> tuple[TreeNodes, list[int], Tensor]:
    """Packs a frontier: its nodes, the root positions and the block tables of the requests it touches.

    A node's K/V goes to the tree slot it claimed when it joined the frontier; it sees the slots of its path.
    """
    builder, batch = frontier.builder, frontier.batch
    device = batch.roots.device
    rows = list(dict.fromkeys(frontier.rows))
    counts = [frontier.rows.count(row) for row in rows]
    num_slots = [builder.num_slots[row] for row in rows]
    width = -(-max(num_slots) // 32)
    words = [[mask >> (32 * word) & _WORD for word in range(width)] for mask in frontier.ancestor_slots]
    slot_depths = [[0] * (32 * width) for _ in rows]
    for line, row in enumerate(rows):
        for slot, depth in zip(builder.slots[row], builder.depths[row], strict=True):
            if slot >= 0:
                slot_depths[line][slot] = depth
    nodes = TreeNodes(
        tokens=frontier.tokens,
        depths=torch.tensor(frontier.depths, dtype=torch.int64, device=device),
        slots=torch.tensor(frontier.slots, dtype=torch.int64, device=device),
        # int64 to int32 keeps the low 32 bits, bit 31 included.
        ancestors=torch.tensor(words, dtype=torch.int64, device=device).to(torch.int32),
        counts=counts,
        num_slots=num_slots,
        slot_depths=torch.tensor(slot_depths, dtype=torch.int32, device=device),
        max_depth=max(frontier.depths),
    )
    positions = [len(batch.token_ids[row]) - 1 for row in rows]
    tables = batch.block_tables if len(rows) == batch.size else batch.block_tables[rows]
    return nodes, positions, tables
