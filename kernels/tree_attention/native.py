"""Tree attention through the compiled kernel in `cpu.cpp`."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.kernels import build
from specdec.kernels.tree_attention.metadata import AttentionMetadata


class AttentionCall(ctypes.Structure):
    """Mirrors `Call` in cpu.cpp: everything that the layers of a forward share."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query_offsets", "tree_starts", "kv_lens", "causal_limits")),
        *((name, ctypes.c_void_p) for name in ("ancestors", "block_tables", "positions")),
        *((name, ctypes.c_int64) for name in ("num_queries", "num_requests", "num_words", "table_width")),
        *(
            (name, ctypes.c_int64)
            for name in ("block_size", "num_blocks", "num_heads", "num_kv_heads", "head_dim")
        ),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    )


class _Prepared(NamedTuple):
    """A call and what it was prepared for."""

    function: Any
    call: AttentionCall
    q_shape: torch.Size
    cache_shape: torch.Size
    dtype: torch.dtype
    ancestors: Tensor
    """Keeps the words alive that the call points to."""


_LayerKind = tuple[float, int | None, float | None]
_latest: tuple[AttentionMetadata | None, dict[_LayerKind, _Prepared]] = (None, {})
"""Calls prepared for the metadata of the running forward, by scale, window and soft cap."""


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
    global _latest
    latest = _latest
    if latest[0] is not meta:
        latest = _latest = (meta, {})
    kind = (scale, window, soft_cap)
    prepared = latest[1].get(kind)
    cache_shape, dtype = k_cache.shape, q.dtype
    if (
        prepared is None
        or q.shape != prepared.q_shape
        or cache_shape != prepared.cache_shape
        or dtype != prepared.dtype
    ):
        prepared = latest[1][kind] = _prepare(q, k_cache, meta, kind)
    if not (
        v_cache.shape == cache_shape
        and k_cache.dtype == dtype == v_cache.dtype
        and k_cache.is_contiguous()
        and v_cache.is_contiguous()
    ):
        raise ValueError(
            f"k_cache and v_cache must be contiguous {dtype} {tuple(cache_shape)}, got k_cache "
            f"{k_cache.dtype} {tuple(k_cache.shape)} and v_cache {v_cache.dtype} {tuple(v_cache.shape)}; "
            "keep the layers outermost in the pool."
        )
    if not q.is_contiguous():
        q = q.contiguous()
    out = torch.empty_like(q)
    threads = torch.get_num_threads()
    function, call = prepared.function, prepared.call
    if function(call, q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr(), threads):
        raise ValueError(f"block_tables name a page outside the cache of {k_cache.shape[0]} pages.")
    return out


def _prepare(q: Tensor, k_cache: Tensor, meta: AttentionMetadata, kind: _LayerKind) -> _Prepared:
    num_queries, num_heads, head_dim = q.shape
    num_blocks, block_size, num_kv_heads, cache_dim = k_cache.shape
    if head_dim != cache_dim or num_heads % num_kv_heads or block_size != meta.block_size:
        raise ValueError(
            f"q {tuple(q.shape)} and k_cache {tuple(k_cache.shape)} do not fit: head sizes must be equal, "
            f"query heads a multiple of key heads, and the page size {meta.block_size}, as in the metadata."
        )
    if num_queries < meta.host.query_offsets[-1]:
        raise ValueError(f"q has {num_queries} rows, the metadata describes {meta.host.query_offsets[-1]}.")
    scale, window, soft_cap = kind
    ancestors = meta.ancestors if window is None else meta.ancestors_within(window)
    int32 = (
        meta.query_offsets,
        meta.tree_starts,
        meta.kv_lens,
        meta.causal_limits,
        ancestors,
        meta.block_tables,
    )
    for tensor, dtype in (*((tensor, torch.int32) for tensor in int32), (meta.positions, torch.int64)):
        if not (tensor.is_cpu and tensor.dtype == dtype and tensor.is_contiguous()):
            raise ValueError(f"metadata tensors must be contiguous {dtype} on the CPU, got {tensor.dtype}.")
    call = AttentionCall(
        *(tensor.data_ptr() for tensor in (*int32, meta.positions)),
        num_queries, len(meta.host.tree_starts), ancestors.shape[1], meta.block_tables.shape[1],
        block_size, num_blocks, num_heads, num_kv_heads, head_dim,
        window or 0, scale, soft_cap or 0.0,
    )  # fmt: skip
    return _Prepared(_function(q.dtype), call, q.shape, k_cache.shape, q.dtype, ancestors)


@functools.cache
def _function(dtype: torch.dtype) -> Any:
    library = build.require_library()
    function = getattr(library, f"specdec_tree_attention_{str(dtype).removeprefix('torch.')}")
    pointer = ctypes.c_void_p
    function.argtypes = (ctypes.POINTER(AttentionCall), pointer, pointer, pointer, pointer, ctypes.c_int)
    function.restype = ctypes.c_int
    return function
