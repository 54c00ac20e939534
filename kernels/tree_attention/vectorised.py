"""Tree attention in PyTorch operations, for any device and dtype.

Long runs of committed queries (prefill chunks) are causal, so each goes by itself through
`scaled_dot_product_attention`. All other queries form one padded batch with an explicit mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specdec.kernels.tree_attention.metadata import AttentionMetadata

MIN_CHUNK = 32
"""Shortest run of committed queries that is worth its own call."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of committed queries of one request."""

    request: int
    rows: slice
    first_position: int
    end_position: int


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """The queries outside chunks: R requests, L queries a request, S slots a request."""

    rows: Tensor
    """`[M]` int64: packed rows of the real queries."""
    places: Tensor
    """`[M]` int64: where they go in the flattened `[R * L]` batch."""
    num_queries: int
    slots: Tensor
    """`[R, S]` int64: physical slot of each logical slot, 0 where no query looks."""
    mask: Tensor
    """`[R, L, S]` bool: visibility; padding queries see the first slot, so that no row is empty."""
    seen: Tensor
    """`[R, S]` bool: slots that at least one query sees. The others may never have been written."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a forward needs of its metadata, shared by all layers with the same window."""

    chunks: list[Chunk]
    batch: PaddedBatch | None


_latest: tuple[AttentionMetadata, dict[int | None, Plan]] | None = None


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
    plan = _plan(meta, window)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for chunk in plan.chunks:
        out[chunk.rows] = _attend_chunk(q[chunk.rows], k_cache, v_cache, meta, chunk, scale, window, soft_cap)
    if plan.batch is not None:
        out[plan.batch.rows] = _attend_batch(q, k_cache, v_cache, plan.batch, scale, soft_cap)
    return out


def _plan(meta: AttentionMetadata, window: int | None) -> Plan:
    global _latest
    latest = _latest
    if latest is None or latest[0] is not meta:
        latest = _latest = (meta, {})
    if window not in latest[1]:
        latest[1][window] = _build_plan(meta, window)
    return latest[1][window]


def _build_plan(meta: AttentionMetadata, window: int | None) -> Plan:
    chunks: list[Chunk] = []
    rest: list[tuple[int, int, int]] = []
    host = meta.host
    for request, prefill in enumerate(host.num_prefill):
        start, stop = host.query_offsets[request], host.query_offsets[request + 1]
        if prefill >= MIN_CHUNK:
            end = host.tree_starts[request]
            chunks.append(Chunk(request, slice(start, start + prefill), end - prefill, end))
            start += prefill
        if start < stop:
            rest.append((request, start, stop))
    return Plan(chunks, _build_batch(meta, rest, window) if rest else None)


def _build_batch(
    meta: AttentionMetadata, rest: list[tuple[int, int, int]], window: int | None
) -> PaddedBatch:
    device = meta.block_tables.device
    num_queries = max(stop - start for _, start, stop in rest)
    num_slots = max(meta.host.kv_lens[request] for request, _, _ in rest)
    places = [i * num_queries + j for i, (_, start, stop) in enumerate(rest) for j in range(stop - start)]
    rows = torch.tensor([n for _, start, stop in rest for n in range(start, stop)], device=device)  # [M]
    owners = torch.tensor(
        [request for request, start, stop in rest for _ in range(start, stop)], device=device
    )  # [M]
    requests = torch.tensor([request for request, _, _ in rest], device=device)  # [R]

    mask = torch.zeros(len(rest) * num_queries, num_slots, dtype=torch.bool, device=device)
    mask[torch.tensor(places, device=device)] = _visible(meta, rows, owners, num_slots, window)
    mask = mask.view(len(rest), num_queries, num_slots)
    seen = mask.any(1)  # [R, S]
    logical = torch.arange(num_slots, device=device)
    pages = meta.block_tables.long()[requests][:, logical // meta.block_size]  # [R, S]
    slots = torch.where(seen, pages * meta.block_size + logical % meta.block_size, 0)
    mask[..., 0] |= ~mask.any(-1)
    return PaddedBatch(rows, torch.tensor(places, device=device), num_queries, slots, mask, seen)


def _visible(
    meta: AttentionMetadata, rows: Tensor, owners: Tensor, num_slots: int, window: int | None
) -> Tensor:
    """Visibility of every logical slot for the given query rows, `[M, S]` bool."""
    slots = torch.arange(num_slots, device=rows.device)
    committed = slots < meta.causal_limits[rows, None]
    words = meta.ancestors
    if window is not None:
        committed &= slots > meta.positions[rows, None] - window
        words = meta.ancestors_within(window)
    node = slots - meta.tree_starts[owners, None].long()  # [M, S]
    in_tree = (node >= 0) & (node < 32 * words.shape[1])
    node = node.clamp(0, 32 * words.shape[1] - 1)
    bits = words[rows].long().gather(1, node // 32) >> (node % 32) & 1
    return committed | (in_tree & bits.bool())


def _attend_batch(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PaddedBatch, scale: float, soft_cap: float | None
) -> Tensor:
    num_requests = batch.slots.shape[0]
    num_heads, num_kv_heads, dim = q.shape[1], k_cache.shape[2], q.shape[2]
    group = num_heads // num_kv_heads
    padded = q.new_zeros(num_requests * batch.num_queries, num_heads, dim)
    padded[batch.places] = q[batch.rows]
    # The heads of a group become rows, so that each key is read once per key head.
    packed = padded.view(num_requests, batch.num_queries, num_kv_heads, group, dim).transpose(1, 2)
    packed = packed.reshape(num_requests, num_kv_heads, batch.num_queries * group, dim)
    mask = batch.mask.repeat_interleave(group, dim=1).unsqueeze(1)  # [R, 1, L * G, S]
    # Zero what nobody sees: unwritten slots may hold NaN, and 0 * NaN is NaN.
    unseen = ~batch.seen.unsqueeze(1).unsqueeze(-1)  # [R, 1, S, 1]
    k = k_cache.flatten(0, 1)[batch.slots].transpose(1, 2).masked_fill(unseen, 0)  # [R, Hkv, S, D]
    v = v_cache.flatten(0, 1)[batch.slots].transpose(1, 2).masked_fill(unseen, 0)
    out = _attend(packed, k, v, mask, scale, soft_cap)
    out = out.view(num_requests, num_kv_heads, batch.num_queries, group, dim).transpose(1, 2)
    return out.reshape(-1, num_heads, dim)[batch.places]


def _attend_chunk(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMetadata,
    chunk: Chunk,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Tensor:
    first = 0 if window is None else max(0, chunk.first_position - window + 1)
    logical = torch.arange(first, chunk.end_position, device=q.device)
    pages = meta.block_tables[chunk.request].long()[logical // meta.block_size]
    slots = pages * meta.block_size + logical % meta.block_size
    group = q.shape[1] // k_cache.shape[2]
    k = k_cache.flatten(0, 1)[slots].transpose(0, 1).repeat_interleave(group, 0).unsqueeze(0)  # [1, Hq, S, D]
    v = v_cache.flatten(0, 1)[slots].transpose(0, 1).repeat_interleave(group, 0).unsqueeze(0)
    positions = torch.arange(chunk.first_position, chunk.end_position, device=q.device).unsqueeze(1)
    mask = None
    if chunk.first_position > 0 or window is not None or soft_cap is not None:
        mask = logical <= positions
        if window is not None:
            mask &= logical > positions - window
    return _attend(q.transpose(0, 1).unsqueeze(0), k, v, mask, scale, soft_cap).squeeze(0).transpose(0, 1)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, soft_cap: float | None
) -> Tensor:
    """Attention over `[..., L, D]` queries and `[..., S, D]` keys; no mask means causal."""
    if soft_cap is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    assert mask is not None
    scores = (q.float() @ k.float().transpose(-1, -2)) * scale
    scores = soft_cap * torch.tanh(scores / soft_cap)
    return (scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v.float()).to(q.dtype)
