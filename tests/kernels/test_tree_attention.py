"""Every implementation of tree attention against the reference, and what a verifier relies on."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.kernels.backend import Backend, use_backend
from specdec.kernels.tree_attention.builder import Request
from specdec.kernels.tree_attention.op import tree_attention

SIZES = (1, 2, 3, 5, 31, 32, 33, 63, 64, 65, 100)
MIXED = [
    Request(0, 0, [-1]),
    Request(17, 0, [-1, 0, 0, 1, 1, 2]),
    Request(1, 5, [-1, 0, 1]),
    Request(300, 0, [-1]),
    Request(3, 40, []),
]


def chain(n: int) -> list[int]:
    return list(range(-1, n - 1))


def star(n: int) -> list[int]:
    return [-1] + [0] * (n - 1)


def random_tree(n: int) -> list[int]:
    rng = random.Random(n)
    return [-1] + [rng.randrange(node) for node in range(1, n)]


def attend(case: Any, **options: Any) -> Tensor:
    return tree_attention(*case, **{"scale": case.q.shape[-1] ** -0.5, **options})


def check(case: Any, **options: Any) -> None:
    """The pinned implementation must match the reference in float64 arithmetic."""
    actual = attend(case, **options)
    with use_backend("reference"):
        expected = attend(case, **options)
    # One rounding to the dtype, plus for bfloat16 what PyTorch's own kernel loses by rounding the weights.
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 2e-2}[case.q.dtype]
    assert torch.isfinite(expected).all()
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shape", [chain, star, random_tree])
@pytest.mark.parametrize("n", SIZES)
def test_trees_of_any_size(
    implementation: Backend, make_case: Any, n: int, shape: Callable[[int], list[int]]
) -> None:
    neighbour = SIZES[(SIZES.index(n) + 4) % len(SIZES)]
    check(make_case([Request(0, 0, shape(n)), Request(1, 0, shape(neighbour)), Request(17, 0, shape(3))]))


@pytest.mark.parametrize("dim", [16, 48, 64, 80, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (9, 3), (8, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_shapes(
    implementation: Backend, make_case: Any, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    check(make_case(MIXED, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, block_size=16))


@pytest.mark.parametrize("dim", [1, 3, 18, 40, 66])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_odd_head_sizes(implementation: Backend, make_case: Any, dim: int, dtype: torch.dtype) -> None:
    check(make_case(MIXED[:3], dim=dim, dtype=dtype))


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("window", [None, 1, 3, 40, 1000])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_windows_and_soft_caps(
    implementation: Backend, make_case: Any, block_size: int, window: int | None, soft_cap: float | None
) -> None:
    requests = [*MIXED, Request(200, 70, chain(9)), Request(290, 0, random_tree(40))]
    check(make_case(requests, block_size=block_size), window=window, soft_cap=soft_cap)


@pytest.mark.parametrize("window", [2, 7, 130])
def test_window_smaller_than_tree_depth(implementation: Backend, make_case: Any, window: int) -> None:
    check(make_case([Request(140, 0, chain(65)), Request(3, 0, random_tree(65))]), window=window)


@pytest.mark.parametrize("lengths", [(0, 32), (0, 33), (5, 129), (127, 64), (128, 140)])
def test_prefill_chunks(implementation: Backend, make_case: Any, lengths: tuple[int, int]) -> None:
    cached, prefill = lengths
    check(
        make_case(
            [Request(cached, prefill, []), Request(9), Request(2, prefill, chain(3))], heads=9, kv_heads=3
        )
    )


def test_chain_equals_causal_attention(implementation: Backend, make_case: Any) -> None:
    as_tree = make_case([Request(20, 0, chain(65))])
    as_prefill = make_case([Request(20, 64, [-1])])
    torch.testing.assert_close(attend(as_tree), attend(as_prefill), atol=1e-5, rtol=1e-5)


def test_nodes_equal_a_plain_decode_of_their_path(implementation: Backend, make_case: Any) -> None:
    parents = random_tree(33)
    case = make_case([Request(7, 0, parents)], block_size=1)
    whole = attend(case)
    for node in (0, 5, 31, 32):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        alone = make_case([Request(7, 0, chain(len(path)))], block_size=1)
        source = case.meta.block_tables[0].long()[[*range(7), *(7 + i for i in path)]]
        target = alone.meta.block_tables[0].long()
        k, v = torch.empty_like(alone.k_cache), torch.empty_like(alone.v_cache)
        k[target], v[target] = case.k_cache[source], case.v_cache[source]
        result = attend(alone._replace(q=case.q[path], k_cache=k, v_cache=v))
        torch.testing.assert_close(result[-1], whole[node], atol=1e-5, rtol=1e-5)


def test_unwritten_tree_slots_are_not_read(implementation: Backend, make_case: Any) -> None:
    """A node outside the batch leaves a hole among the tree slots, which may hold anything."""
    case = make_case([Request(5, 0, [-1, 0, 0, 2])], block_size=4)
    page, offset = case.meta.block_tables[0, (5 + 1) // 4], (5 + 1) % 4
    rows = torch.tensor([0, 2, 3])
    before = attend(case)
    case.k_cache[page, offset] = torch.nan
    case.v_cache[page, offset] = torch.nan
    meta = replace(
        case.meta,
        query_offsets=torch.tensor([0, 3], dtype=torch.int32),
        causal_limits=case.meta.causal_limits[rows],
        ancestors=case.meta.ancestors[rows],
        positions=case.meta.positions[rows],
        depths=case.meta.depths[rows],
        host=replace(case.meta.host, query_offsets=[0, 3]),
    )
    torch.testing.assert_close(attend(case._replace(q=case.q[rows], meta=meta)), before[rows])


def test_padding_rows_are_zero(implementation: Backend, make_case: Any) -> None:
    case = make_case([Request(5, 0, chain(3))])
    out = attend(case._replace(q=torch.cat((case.q, torch.full_like(case.q, torch.nan)))))
    assert torch.equal(out[3:], torch.zeros_like(case.q))
    torch.testing.assert_close(out[:3], attend(case))


def test_views_of_a_pool_and_strided_queries(implementation: Backend, make_case: Any) -> None:
    case = make_case(MIXED)
    pool = torch.full((3, 2, *case.k_cache.shape), torch.nan)
    pool[1, 0], pool[1, 1] = case.k_cache, case.v_cache
    strided = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    result = attend(case._replace(q=strided, k_cache=pool[1, 0], v_cache=pool[1, 1]))
    torch.testing.assert_close(result, attend(case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_do_not_depend_on_the_batch(make_case: Any, dtype: torch.dtype) -> None:
    """The compiled kernel is bitwise invariant to batch mates, threads and the number of drafted tokens."""
    threads = torch.get_num_threads()
    requests = [Request(300, 0, chain(7)), *[Request(40 + 11 * i, 0, random_tree(5 + i)) for i in range(12)]]
    with use_backend("cpp"):
        case = make_case(requests, heads=9, kv_heads=3, dim=64, dtype=dtype, block_size=16)
        together = attend(case)[:7]
        for rows in (7, 3, 1):
            alone = _first_queries(case, rows)
            for count in (1, 2):
                torch.set_num_threads(count)
                assert torch.equal(attend(alone), together[:rows])
            torch.set_num_threads(threads)


def _first_queries(case: Any, rows: int) -> Any:
    """The first request of a batch alone, with only its first queries."""
    meta, host = case.meta, case.meta.host
    kv_len = host.tree_starts[0] + rows
    meta = replace(
        meta,
        query_offsets=torch.tensor([0, rows], dtype=torch.int32),
        tree_starts=meta.tree_starts[:1],
        kv_lens=torch.tensor([kv_len], dtype=torch.int32),
        slot_depths=meta.slot_depths[:1],
        block_tables=meta.block_tables[:1],
        host=replace(
            host,
            query_offsets=[0, rows],
            tree_starts=host.tree_starts[:1],
            kv_lens=[kv_len],
            num_prefill=[0],
        ),
    )
    return case._replace(q=case.q[:rows], meta=meta)


def test_one_metadata_serves_layers_of_different_kinds(implementation: Backend, make_case: Any) -> None:
    case = make_case(MIXED)
    options: Sequence[dict[str, Any]] = [{}, {"window": 3}, {"soft_cap": 2.0}, {"scale": 0.5}, {}]
    for option in options:
        check(case, **option)
    check(case._replace(q=case.q[:, :2].contiguous()))


def test_misfits_are_refused(make_case: Any) -> None:
    case = make_case(MIXED)
    with use_backend("cpp"):
        with pytest.raises(ValueError, match="multiple of key heads"):
            attend(case._replace(q=case.q[:, :5].contiguous()))
        with pytest.raises(ValueError, match="rows"):
            attend(case._replace(q=case.q[:3]))
        with pytest.raises(ValueError, match="contiguous"):
            attend(case._replace(v_cache=case.v_cache.transpose(1, 2).contiguous().transpose(1, 2)))
        with pytest.raises(ValueError, match="page outside"):
            attend(case._replace(k_cache=case.k_cache[:9], v_cache=case.v_cache[:9]))
