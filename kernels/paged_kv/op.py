"""Writes and moves of K/V rows in the page pool. A physical slot is `page * block_size + offset`."""

from __future__ import annotations

from torch import Tensor

from specdec.kernels.backend import backend_for
from specdec.kernels.paged_kv import native, reference, vectorised

_WRITE_KV = {"reference": reference.write_kv, "torch": vectorised.write_kv, "cpp": native.write_kv}
_COMPACT_KV = {"reference": reference.compact_kv, "torch": vectorised.compact_kv, "cpp": native.compact_kv}
_COPY_BLOCKS = {
    "reference": reference.copy_blocks,
    "torch": vectorised.copy_blocks,
    "cpp": native.copy_blocks,
}


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Store the K/V rows of N tokens in one layer's cache.

    Args:
        k: `[N, Hkv, D]` keys, dtype of the cache.
        v: `[N, Hkv, D]` values.
        k_cache: `[num_blocks, block_size, Hkv, D]`, updated in place.
        v_cache: `[num_blocks, block_size, Hkv, D]`, updated in place.
        slots: `[N]` int64 physical slots, all different.

    Raises:
        ValueError: shapes or layouts that do not fit together.
        IndexError: a slot outside the cache.
    """
    _WRITE_KV[backend_for(k_cache)](k, v, k_cache, v_cache, slots)


def compact_kv(pool: Tensor, source_slots: Tensor, target_slots: Tensor) -> None:
    """Move M rows of every layer, as if all were read before the first is written.

    This is how accepted tree nodes, rarely contiguous, become the contiguous rows of committed tokens.

    Args:
        pool: `[layers, 2, num_blocks, block_size, Hkv, D]`, updated in place.
        source_slots: `[M]` int64 physical slots to read.
        target_slots: `[M]` int64 physical slots to write, all different; they may overlap the sources.

    Raises:
        ValueError: shapes or layouts that do not fit together.
        IndexError: a slot outside the pool.
    """
    _COMPACT_KV[backend_for(pool)](pool, source_slots, target_slots)


def copy_blocks(pool: Tensor, source_blocks: Tensor, target_blocks: Tensor) -> None:
    """Copy whole pages of every layer, as if all were read before the first is written.

    Args:
        pool: `[layers, 2, num_blocks, block_size, Hkv, D]`, updated in place.
        source_blocks: `[M]` int64 pages to read.
        target_blocks: `[M]` int64 pages to write, all different.

    Raises:
        ValueError: shapes or layouts that do not fit together.
        IndexError: a page outside the pool.
    """
    _COPY_BLOCKS[backend_for(pool)](pool, source_blocks, target_blocks)
