"""Time the kernels as a decoder layer meets them: `python -m specdec.kernels.benchmark`.

Before every timed call a matrix product streams weights through the caches, as the layer's linears do, and
each call works on another layer's pages. The table shows, for each implementation, the 10th percentile and
the median in microseconds: on a machine that others use too, the first is the steadier number.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.kernels.backend import Backend, describe_backend, use_backend
from specdec.kernels.fused.op import add_rms_norm, rms_norm, rope_write_kv, silu_mul
from specdec.kernels.paged_kv.op import compact_kv, write_kv
from specdec.kernels.tree_attention.builder import Request, build_metadata, num_pages
from specdec.kernels.tree_attention.op import tree_attention

LAYERS = 30
HEADS, KV_HEADS, DIM, HIDDEN, INTERMEDIATE, BLOCK_SIZE = 9, 3, 64, 576, 1536, 16


class Case(NamedTuple):
    """One row of the table; `run` takes the layer index."""

    op: str
    shape: str
    run: Callable[[int], object]


def tree(num_nodes: int) -> list[int]:
    """Parents of a binary tree."""
    return [(node - 1) // 2 if node else -1 for node in range(num_nodes)]


def layer_caches(num_blocks: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of each layer, views of one pool."""
    pool = torch.randn(LAYERS, 2, num_blocks, BLOCK_SIZE, KV_HEADS, DIM).to(dtype)
    return [(layer[0], layer[1]) for layer in pool]


def attention_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Decode, trees, batches and a prefill chunk."""
    batches = {
        "decode, 300 tokens": [Request(299)],
        "tree of 8, 300 tokens": [Request(292, 0, tree(8))],
        "tree of 16, 300 tokens": [Request(284, 0, tree(16))],
        "tree of 64, 1000 tokens": [Request(936, 0, tree(64))],
        "8 x decode, 400 tokens": [Request(399)] * 8,
        "prefill of 256": [Request(0, 255)],
    }
    for name, requests in batches.items():
        meta = build_metadata(requests, BLOCK_SIZE)
        caches = layer_caches(num_pages(requests, BLOCK_SIZE), dtype)
        q = torch.randn(meta.host.query_offsets[-1], HEADS, DIM).to(dtype)
        yield Case(
            "tree_attention",
            name,
            lambda layer, q=q, caches=caches, meta=meta: tree_attention(  # type: ignore[misc]
                q, *caches[layer], meta, scale=DIM**-0.5
            ),
        )


def layer_cases(dtype: torch.dtype, rows: int) -> Iterator[Case]:
    """The ops between the linears."""
    caches = layer_caches(64, dtype)
    pool = torch.randn(LAYERS, 2, 64, BLOCK_SIZE, KV_HEADS, DIM).to(dtype)
    x, delta = torch.randn(rows, HIDDEN).to(dtype), torch.randn(rows, HIDDEN).to(dtype)
    weight = list(torch.rand(LAYERS, HIDDEN).to(dtype))
    gate_up = torch.randn(rows, 2 * INTERMEDIATE).to(dtype)
    qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * DIM).to(dtype)
    cos, sin = torch.rand(rows, DIM).to(dtype), torch.rand(rows, DIM).to(dtype)
    slots = torch.randperm(64 * BLOCK_SIZE)[:rows]
    kv = torch.randn(rows, KV_HEADS, DIM).to(dtype)
    name = f"{rows} row" + "s" * (rows > 1)
    yield Case("rms_norm", name, lambda layer: rms_norm(x, weight[layer], 1e-5))
    yield Case("add_rms_norm", name, lambda layer: add_rms_norm(x, delta, weight[layer], 1e-5))
    yield Case(
        "rope_write_kv",
        name,
        lambda layer: rope_write_kv(qkv, cos, sin, *caches[layer], slots, HEADS, KV_HEADS),
    )
    yield Case("silu_mul", name, lambda layer: silu_mul(gate_up))
    yield Case("write_kv", name, lambda layer: write_kv(kv, kv, *caches[layer], slots))
    if rows > 1:
        yield Case(
            "compact_kv", f"{name}, {LAYERS} layers", lambda layer: compact_kv(pool, slots, slots.flip(0))
        )


def microseconds(case: Case, weights: list[Tensor], seconds: float) -> tuple[float, float]:
    """10th percentile and median of one call, each call after a weight-streaming matrix product."""
    activation = weights[0].new_ones(1, weights[0].shape[1])
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < 4 * LAYERS or time.perf_counter() < deadline:
        layer = len(times) % LAYERS
        F.linear(activation, weights[layer % len(weights)])
        start = time.perf_counter_ns()
        case.run(layer)
        times.append((time.perf_counter_ns() - start) / 1e3)
    times = sorted(times[LAYERS:])
    return times[len(times) // 10], statistics.median(times)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seconds", type=float, default=0.5, help="measuring time of each cell")
    parser.add_argument("--ops", default="", help="only ops whose name contains this")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    weights = [torch.randn(6144, HIDDEN).to(dtype) for _ in range(15)]
    backend = describe_backend()
    backends: tuple[Backend, ...] = ("torch", "cpp") if backend.startswith("cpp") else ("torch",)
    print(f"{backend}, torch {torch.__version__}, {torch.get_num_threads()} threads, {arguments.dtype}")
    print(f"{'op':<16}{'shape':<26}" + "".join(f"{name + ' p10, median us':>24}" for name in backends))
    cases = [*attention_cases(dtype), *layer_cases(dtype, 1), *layer_cases(dtype, 16)]
    with torch.inference_mode():
        for case in cases:
            if arguments.ops not in case.op:
                continue
            row = f"{case.op:<16}{case.shape:<26}"
            for name in backends:
                with use_backend(name):
                    low, median = microseconds(case, weights, arguments.seconds)
                row += f"{low:>12.1f}{median:>12.1f}"
            print(row, flush=True)


if __name__ == "__main__":
    main()
