"""The element-wise chains of a decoder layer in PyTorch, rounding where transformers' modules round."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.kernels.paged_kv import vectorised as paged_kv


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    """See `specdec.kernels.fused.op.rms_norm`."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (normed * (1 + weight.float())).to(x.dtype)
    return weight * normed.to(x.dtype)


def add_rms_norm(
    residual: Tensor, delta: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False
) -> Tensor:
    """See `specdec.kernels.fused.op.add_rms_norm`."""
    residual += delta
    return rms_norm(residual, weight, eps, unit_offset=unit_offset)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `specdec.kernels.fused.op.silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_mul(gate_up: Tensor) -> Tensor:
    """See `specdec.kernels.fused.op.gelu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def rope_write_kv(
    qkv: Tensor,  # [N, (Hq + 2 * Hkv) * D]
    cos: Tensor,  # [N, R]
    sin: Tensor,  # [N, R]
    k_cache: Tensor,  # [num_blocks, block_size, Hkv, D]
    v_cache: Tensor,  # [num_blocks, block_size, Hkv, D]
    slots: Tensor,  # [N]
    num_heads: int,
    num_kv_heads: int,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    unit_offset: bool = False,
) -> Tensor:
    """See `specdec.kernels.fused.op.rope_write_kv`."""
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, -1)
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps, unit_offset=unit_offset)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps, unit_offset=unit_offset)
    cos, sin = cos.to(qkv.dtype).unsqueeze(1), sin.to(qkv.dtype).unsqueeze(1)
    paged_kv.write_kv(_rotate(k, cos, sin), v, k_cache, v_cache, slots)
    return _rotate(q, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotary = cos.shape[-1]
    first, second = x[..., :rotary].chunk(2, dim=-1)
    rotated = x[..., :rotary] * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((rotated, x[..., rotary:]), dim=-1)
