"""The fused element-wise ops against the float64 reference and against transformers' own modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from specdec.kernels.backend import Backend, use_backend
from specdec.kernels.fused.op import add_rms_norm, gelu_mul, rms_norm, rope_write_kv, silu_mul

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
SHAPES = pytest.mark.parametrize(
    ("rows", "width"), [(0, 8), (1, 5), (3, 16), (2, 100), (17, 576), (130, 576)]
)


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-6) -> None:
    # bfloat16: the last bit twice, where a factor is rounded before the product.
    tolerance = tolerance if actual.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@DTYPES
@SHAPES
@pytest.mark.parametrize("unit_offset", [False, True])
def test_rms_norm(
    implementation: Backend, rows: int, width: int, dtype: torch.dtype, unit_offset: bool
) -> None:
    x, weight = randn(rows, width, dtype=dtype) * 3, randn(width, dtype=dtype, seed=1)
    residual, delta = x.clone(), randn(rows, width, dtype=dtype, seed=2)
    normed = rms_norm(x, weight, 1e-5, unit_offset=unit_offset)
    added = add_rms_norm(residual, delta, weight, 1e-5, unit_offset=unit_offset)
    with use_backend("reference"):
        close(normed, rms_norm(x, weight, 1e-5, unit_offset=unit_offset))
        close(added, rms_norm(x + delta, weight, 1e-5, unit_offset=unit_offset))
    assert torch.equal(residual, x + delta)


@DTYPES
def test_rms_norm_equals_transformers(implementation: Backend, dtype: torch.dtype) -> None:
    x, weight = randn(5, 576, dtype=dtype), randn(576, dtype=dtype, seed=1)
    llama, gemma = LlamaRMSNorm(576, eps=1e-5).to(dtype), GemmaRMSNorm(576, eps=1e-5).to(dtype)
    llama.weight.data, gemma.weight.data = weight, weight
    close(rms_norm(x, weight, 1e-5), llama(x))
    close(rms_norm(x, weight, 1e-5, unit_offset=True), gemma(x))


@DTYPES
@SHAPES
def test_gated_activations(implementation: Backend, rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = randn(rows, 2 * width, dtype=dtype) * 4
    silu, gelu = silu_mul(gate_up), gelu_mul(gate_up)
    with use_backend("reference"):
        close(silu, silu_mul(gate_up))
        # PyTorch's float32 tanh loses more in the tail.
        close(gelu, gelu_mul(gate_up), tolerance=3e-6)


def test_activations_of_extreme_values(implementation: Backend) -> None:
    gate = torch.tensor([[0.0, -1e4, 1e4, -90.0, 90.0, 1e-30]])
    gate_up = torch.cat((gate, torch.ones_like(gate)), dim=-1)
    close(silu_mul(gate_up), F.silu(gate))
    close(gelu_mul(gate_up), F.gelu(gate, approximate="tanh"))


def rope_inputs(
    rows: int, dim: int, rotary: int, dtype: torch.dtype, heads: int = 6, kv_heads: int = 2
) -> Any:
    qkv = randn(rows, (heads + 2 * kv_heads) * dim, dtype=dtype)
    angles = randn(rows, rotary // 2, dtype=torch.float32, seed=1).repeat(1, 2)
    slots = torch.randperm(24, generator=torch.Generator().manual_seed(2))[:rows]
    k_cache, v_cache = torch.zeros(2, 6, 4, kv_heads, dim, dtype=dtype)
    return qkv, angles.cos(), angles.sin(), k_cache, v_cache, slots, heads, kv_heads


@DTYPES
@pytest.mark.parametrize(("dim", "rotary"), [(8, 8), (64, 64), (80, 80), (64, 32), (48, 6)])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("wide_angles", [False, True])
def test_rope_write_kv(
    implementation: Backend, dim: int, rotary: int, dtype: torch.dtype, norms: bool, wide_angles: bool
) -> None:
    qkv, cos, sin, *rest = rope_inputs(5, dim, rotary, dtype)
    cos, sin = (cos, sin) if wide_angles else (cos.to(dtype), sin.to(dtype))
    options: dict[str, Any] = {}
    if norms:
        options = {"q_norm": randn(dim, dtype=dtype, seed=3), "k_norm": randn(dim, dtype=dtype, seed=4)}
    q = rope_write_kv(qkv, cos, sin, *rest, **options)
    expected_rest = rope_inputs(5, dim, rotary, dtype)[3:]
    with use_backend("reference"):
        expected = rope_write_kv(qkv, cos, sin, *expected_rest, **options)
    # bfloat16: PyTorch rounds the angles, the products and the sum; values reach about 4.
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    for got, want in ((q, expected), (rest[0], expected_rest[0]), (rest[1], expected_rest[1])):
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


def test_rope_equals_transformers(implementation: Backend) -> None:
    qkv, cos, sin, k_cache, v_cache, slots, heads, kv_heads = rope_inputs(7, 64, 64, torch.float32)
    q = rope_write_kv(qkv, cos, sin, k_cache, v_cache, slots, heads, kv_heads)
    split = qkv.view(1, 7, heads + 2 * kv_heads, 64).transpose(1, 2).split((heads, kv_heads, kv_heads), dim=1)
    expected_q, expected_k = apply_rotary_pos_emb(split[0], split[1], cos[None], sin[None])
    close(q, expected_q[0].transpose(0, 1))
    close(k_cache.flatten(0, 1)[slots], expected_k[0].transpose(0, 1))
    assert torch.equal(v_cache.flatten(0, 1)[slots], split[2][0].transpose(0, 1))


def test_misfits_are_refused() -> None:
    x, weight = torch.randn(3, 8), torch.ones(8)
    qkv, cos, sin, k_cache, v_cache, slots, heads, kv_heads = rope_inputs(3, 8, 8, torch.float32)
    with use_backend("cpp"):
        with pytest.raises(ValueError, match="weight"):
            rms_norm(x, weight.bfloat16(), 1e-5)
        with pytest.raises(ValueError, match="contiguous"):
            rms_norm(x.t(), torch.ones(3), 1e-5)
        with pytest.raises(ValueError, match="delta"):
            add_rms_norm(x, x[:2], weight, 1e-5)
        with pytest.raises(ValueError, match="gate_up"):
            silu_mul(torch.zeros(2, 3))
        with pytest.raises(ValueError, match="qkv"):
            rope_write_kv(qkv[:, :-8].contiguous(), cos, sin, k_cache, v_cache, slots, heads, kv_heads)
        with pytest.raises(ValueError, match="num_kv_heads"):
            rope_write_kv(qkv, cos, sin, k_cache, v_cache, slots, heads, 1)
        with pytest.raises(IndexError, match="99"):
            rope_write_kv(qkv, cos, sin, k_cache, v_cache, torch.tensor([0, 99, 1]), heads, kv_heads)
