"""Page pool updates in PyTorch operations, for any device and dtype."""

from __future__ import annotations

from torch import Tensor


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """See `specdec.kernels.paged_kv.op.write_kv`."""
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slots, k)
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slots, v)


def compact_kv(pool: Tensor, source_slots: Tensor, target_slots: Tensor) -> None:
    """See `specdec.kernels.paged_kv.op.compact_kv`."""
    rows = pool.view(*pool.shape[:2], -1, *pool.shape[4:])  # [layers, 2, slots, Hkv, D]
    rows.index_copy_(2, target_slots, rows.index_select(2, source_slots))


def copy_blocks(pool: Tensor, source_blocks: Tensor, target_blocks: Tensor) -> None:
    """See `specdec.kernels.paged_kv.op.copy_blocks`."""
    pool.index_copy_(2, target_blocks, pool.index_select(2, source_blocks))
