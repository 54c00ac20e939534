"""Fixtures of the kernel tests: packed batches whose unused cache slots are poisoned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from specdec.kernels import build
from specdec.kernels.backend import Backend, use_backend
from specdec.kernels.tree_attention.builder import Request, build_metadata, num_pages
from specdec.kernels.tree_attention.metadata import AttentionMetadata


class PackedCase(NamedTuple):
    """Inputs of `tree_attention`."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    meta: AttentionMetadata


MakeCase = Callable[..., PackedCase]


@pytest.fixture(params=["torch", "cpp"])
def implementation(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Each implementation that is compared with the reference, pinned for the test."""
    if request.param == "cpp" and build.find_compiler() is None:
        pytest.skip("no C++ compiler")
    with use_backend(request.param):
        yield request.param


@pytest.fixture
def make_case() -> MakeCase:
    """Builds a batch whose pages are permuted and whose unwritten slots hold NaN."""

    def make(
        requests: Sequence[Request],
        *,
        heads: int = 6,
        kv_heads: int = 2,
        dim: int = 16,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> PackedCase:
        generator = torch.Generator().manual_seed(seed)
        meta = build_metadata(requests, block_size, seed=seed)
        pool = torch.full((2, num_pages(requests, block_size) * block_size, kv_heads, dim), torch.nan)
        for table, length in zip(meta.block_tables, meta.host.kv_lens, strict=True):
            logical = torch.arange(length)
            slots = table[logical // block_size].long() * block_size + logical % block_size
            pool[:, slots] = torch.randn(2, length, kv_heads, dim, generator=generator)
        q = torch.randn(meta.host.query_offsets[-1], heads, dim, generator=generator)
        k_cache, v_cache = pool.view(2, -1, block_size, kv_heads, dim).to(dtype)
        return PackedCase(q.to(dtype), k_cache, v_cache, meta)

    return make
