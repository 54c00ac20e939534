"""Writes and moves of K/V rows against the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specdec.kernels.backend import Backend, use_backend
from specdec.kernels.paged_kv.op import compact_kv, copy_blocks, write_kv


def make_pool(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(3, 2, 7, 4, 2, 5, generator=torch.Generator().manual_seed(0)).to(dtype)


def expect(update: Callable[[Tensor], None], dtype: torch.dtype = torch.float32) -> None:
    """The pinned implementation must leave the same pool as the reference."""
    actual, expected = make_pool(dtype), make_pool(dtype)
    update(actual)
    with use_backend("reference"):
        update(expected)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", [[], [0], [27, 3, 4, 12]])
def test_write_kv(implementation: Backend, slots: list[int], dtype: torch.dtype) -> None:
    k, v = torch.randn(2, len(slots), 2, 5).to(dtype)
    index = torch.tensor(slots, dtype=torch.int64)
    expect(lambda pool: write_kv(k, v, pool[1, 0], pool[1, 1], index), dtype)


@pytest.mark.parametrize(
    ("sources", "targets"),
    [
        ([], []),
        ([9], [2]),
        ([5, 6, 7, 8], [6, 7, 8, 9]),
        ([6, 7, 8], [5, 6, 7]),
        ([3, 20], [20, 3]),
        ([4, 4], [8, 9]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compact_kv(
    implementation: Backend, sources: list[int], targets: list[int], dtype: torch.dtype
) -> None:
    source, target = torch.tensor(sources, dtype=torch.int64), torch.tensor(targets, dtype=torch.int64)
    expect(lambda pool: compact_kv(pool, source, target), dtype)


def test_copy_blocks(implementation: Backend) -> None:
    expect(lambda pool: copy_blocks(pool, torch.tensor([0, 1, 5]), torch.tensor([1, 2, 0])))


def test_large_moves_use_all_threads(implementation: Backend) -> None:
    pool = torch.randn(8, 2, 40, 16, 2, 16)
    expected = pool[:, :, :20].clone()
    copy_blocks(pool, torch.arange(20), torch.arange(20, 40))
    assert torch.equal(pool[:, :, 20:], expected)


@pytest.mark.parametrize("slot", [-1, 28])
def test_slots_outside_the_pool_are_refused(slot: int) -> None:
    pool, before = make_pool(), make_pool()
    bad, good = torch.tensor([1, slot]), torch.tensor([2, 3])
    rows = torch.zeros(2, 2, 5)
    with use_backend("cpp"):
        with pytest.raises(IndexError, match=str(slot)):
            write_kv(rows, rows, pool[0, 0], pool[0, 1], bad)
        with pytest.raises(IndexError, match=str(slot)):
            compact_kv(pool, good, bad)
        with pytest.raises(IndexError, match=str(slot)):
            compact_kv(pool, bad, good)
    assert torch.equal(pool, before)


def test_misfits_are_refused() -> None:
    pool, rows, slots = make_pool(), torch.zeros(2, 2, 5), torch.tensor([0, 1])
    with use_backend("cpp"):
        with pytest.raises(ValueError, match="must be"):
            write_kv(rows[:, :1], rows[:, :1], pool[0, 0], pool[0, 1], slots)
        with pytest.raises(ValueError, match="cast first"):
            write_kv(rows.bfloat16(), rows, pool[0, 0], pool[0, 1], slots)
        with pytest.raises(ValueError, match="int64"):
            write_kv(rows, rows, pool[0, 0], pool[0, 1], slots.int())
        with pytest.raises(ValueError, match="contiguous"):
            compact_kv(pool.transpose(0, 1), slots, slots)
