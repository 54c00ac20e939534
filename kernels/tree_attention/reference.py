"""Tree attention, written to be checked by eye: one query at a time, in float64."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from specdec.kernels.tree_attention.metadata import AttentionMetadata


def tree_attention(
    q: Tensor,  # [N, Hq, D]
    k_cache: Tensor,  # [num_blocks, block_size, Hkv, D]
    v_cache: Tensor,  # [num_blocks, block_size, Hkv, D]
    meta: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """See `specdec.kernels.tree_attention.op.tree_attention`."""
    out = torch.zeros_like(q)
    group = q.shape[1] // k_cache.shape[2]
    offsets = meta.query_offsets.tolist()
    for request, (start, stop) in enumerate(pairwise(offsets)):
        for n in range(start, stop):
            visible = visible_slots(meta, request, n, window)
            if not visible:
                continue
            slots = torch.tensor(visible, device=q.device)
            pages = meta.block_tables[request, slots // meta.block_size].long()
            k = k_cache[pages, slots % meta.block_size].double()  # [S, Hkv, D]
            v = v_cache[pages, slots % meta.block_size].double()  # [S, Hkv, D]
            for head in range(q.shape[1]):
                scores = k[:, head // group] @ q[n, head].double() * scale  # [S]
                if soft_cap is not None:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                out[n, head] = (scores.softmax(0) @ v[:, head // group]).to(out.dtype)
    return out


def visible_slots(meta: AttentionMetadata, request: int, n: int, window: int | None) -> list[int]:
    """Logical slots that query row n sees, in increasing order."""
    position, limit, root = int(meta.positions[n]), int(meta.causal_limits[n]), int(meta.tree_starts[request])
    committed = [s for s in range(limit) if window is None or s > position - window]
    words = [int(word) & 0xFFFFFFFF for word in meta.ancestors[n]]
    nodes = [i for i in range(32 * len(words)) if words[i // 32] >> (i % 32) & 1]
    if window is not None:
        depth = int(meta.depths[n])
        nodes = [i for i in nodes if depth - int(meta.slot_depths[request, i]) < window]
    return sorted({*committed, *(root + i for i in nodes)})
