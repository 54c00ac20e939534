"""Page pool updates through the compiled kernels in `cpu.cpp`."""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any

import torch
from torch import Tensor

from specdec.kernels import build


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """See `specdec.kernels.paged_kv.op.write_kv`."""
    num_blocks, block_size, num_kv_heads, dim = k_cache.shape
    if k.shape[1:] != (num_kv_heads, dim) or k.shape != v.shape or k_cache.shape != v_cache.shape:
        raise ValueError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)} must be [N, {num_kv_heads}, {dim}] for k_cache "
            f"{tuple(k_cache.shape)} and v_cache {tuple(v_cache.shape)}."
        )
    if not k.dtype == v.dtype == k_cache.dtype == v_cache.dtype:
        raise ValueError(
            f"k is {k.dtype} and v is {v.dtype}, the caches {k_cache.dtype} and {v_cache.dtype}; cast first."
        )
    check_writable(k_cache, v_cache)
    check_indices("slots", slots, k.shape[0])
    k, v = k.contiguous(), v.contiguous()
    failed = _functions()[0](
        k.data_ptr(), v.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), slots.data_ptr(),
        k.shape[0], num_blocks * block_size, num_kv_heads * dim * k.element_size(),
    )  # fmt: skip
    if failed:
        raise_outside("slots", slots, num_blocks * block_size)


def compact_kv(pool: Tensor, source_slots: Tensor, target_slots: Tensor) -> None:
    """See `specdec.kernels.paged_kv.op.compact_kv`."""
    _move_rows(pool, source_slots, target_slots, pool.shape[2] * pool.shape[3], "slots")


def copy_blocks(pool: Tensor, source_blocks: Tensor, target_blocks: Tensor) -> None:
    """See `specdec.kernels.paged_kv.op.copy_blocks`."""
    _move_rows(pool, source_blocks, target_blocks, pool.shape[2], "blocks")


def _move_rows(pool: Tensor, sources: Tensor, targets: Tensor, num_rows: int, name: str) -> None:
    check_writable(pool)
    check_indices(f"source_{name}", sources, targets.shape[0])
    check_indices(f"target_{name}", targets, sources.shape[0])
    row_bytes = math.prod(pool.shape[2:]) // num_rows * pool.element_size()
    failed = _functions()[1](
        pool.data_ptr(), sources.data_ptr(), targets.data_ptr(), sources.shape[0],
        pool.shape[0] * pool.shape[1], num_rows, row_bytes, torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise_outside(f"source_{name}", sources, num_rows)
        raise_outside(f"target_{name}", targets, num_rows)


def check_writable(*tensors: Tensor) -> None:
    """Raise ValueError unless all tensors are contiguous."""
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(
                f"a cache of shape {tuple(tensor.shape)} must be contiguous, strides {tensor.stride()}."
            )


def check_indices(name: str, indices: Tensor, count: int) -> None:
    """Raise ValueError unless `indices` is a contiguous `[count]` int64 CPU tensor."""
    if (
        indices.dtype != torch.int64
        or indices.shape != (count,)
        or not (indices.is_cpu and indices.is_contiguous())
    ):
        raise ValueError(
            f"{name} must be a contiguous [{count}] int64 CPU tensor, got {indices.dtype} "
            f"{tuple(indices.shape)} on {indices.device}."
        )


def raise_outside(name: str, indices: Tensor, size: int) -> None:
    """Raise IndexError if an index lies outside `0 .. size - 1`."""
    outside = indices[(indices < 0) | (indices >= size)]
    if len(outside):
        raise IndexError(f"{name} holds {int(outside[0])}, outside the pool of {size}; nothing was written.")


@functools.cache
def _functions() -> tuple[Any, Any]:
    library = build.require_library()
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    library.specdec_write_kv.argtypes = (*[pointer] * 5, *[integer] * 3)
    library.specdec_move_rows.argtypes = (*[pointer] * 3, *[integer] * 4, ctypes.c_int)
    return library.specdec_write_kv, library.specdec_move_rows
