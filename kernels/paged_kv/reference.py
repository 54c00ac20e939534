"""Page pool updates, one row at a time."""

from __future__ import annotations

from torch import Tensor


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """See `specdec.kernels.paged_kv.op.write_kv`."""
    block_size = k_cache.shape[1]
    for n, slot in enumerate(slots.tolist()):
        k_cache[slot // block_size, slot % block_size] = k[n]
        v_cache[slot // block_size, slot % block_size] = v[n]


def compact_kv(pool: Tensor, source_slots: Tensor, target_slots: Tensor) -> None:
    """See `specdec.kernels.paged_kv.op.compact_kv`."""
    block_size = pool.shape[3]
    rows = [pool[:, :, slot // block_size, slot % block_size].clone() for slot in source_slots.tolist()]
    for slot, row in zip(target_slots.tolist(), rows, strict=True):
        pool[:, :, slot // block_size, slot % block_size] = row


def copy_blocks(pool: Tensor, source_blocks: Tensor, target_blocks: Tensor) -> None:
    """See `specdec.kernels.paged_kv.op.copy_blocks`."""
    blocks = [pool[:, :, block].clone() for block in source_blocks.tolist()]
    for target, block in zip(target_blocks.tolist(), blocks, strict=True):
        pool[:, :, target] = block
