"""The element-wise chains of a decoder layer through the compiled kernels in `cpu.cpp`.

At a few microseconds a call, Python is most of the cost: the checks below are the ones that guard memory.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from specdec.kernels import build
from specdec.kernels.paged_kv.native import raise_outside


class RopeCall(ctypes.Structure):
    """Mirrors `RopeCall` in cpu.cpp: everything that does not change between the tokens of a layer."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q_norm", "k_norm")),
        *(
            (name, ctypes.c_int64)
            for name in ("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "num_slots")
        ),
        ("eps", ctypes.c_float),
        ("unit_offset", ctypes.c_int32),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    """See `specdec.kernels.fused.op.rms_norm`."""
    return _rms_norm(x, None, weight, eps, unit_offset)


def add_rms_norm(
    residual: Tensor, delta: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False
) -> Tensor:
    """See `specdec.kernels.fused.op.add_rms_norm`."""
    if delta.shape != residual.shape or delta.dtype != residual.dtype or not delta.is_contiguous():
        raise ValueError(
            f"delta must be contiguous {residual.dtype} {tuple(residual.shape)} like the residual, got "
            f"{delta.dtype} {tuple(delta.shape)}."
        )
    return _rms_norm(residual, delta.data_ptr(), weight, eps, unit_offset)


def _rms_norm(x: Tensor, delta: int | None, weight: Tensor, eps: float, unit_offset: bool) -> Tensor:
    rows, width = x.shape
    dtype = x.dtype
    if weight.numel() != width or weight.dtype != dtype or not (x.is_contiguous() and weight.is_contiguous()):
        raise ValueError(
            f"x must be contiguous and weight [{width}] {dtype}, got x {tuple(x.shape)} with strides "
            f"{x.stride()} and weight {tuple(weight.shape)} {weight.dtype}."
        )
    out = torch.empty_like(x)
    _function("rms_norm", dtype)(
        x.data_ptr(),
        delta,
        weight.data_ptr(),
        out.data_ptr(),
        rows,
        width,
        eps,
        unit_offset,
        torch.get_num_threads(),
    )
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `specdec.kernels.fused.op.silu_mul`."""
    return _gated("silu_mul", gate_up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """See `specdec.kernels.fused.op.gelu_mul`."""
    return _gated("gelu_mul", gate_up)


def _gated(name: str, gate_up: Tensor) -> Tensor:
    rows, double_width = gate_up.shape
    if double_width % 2 or not gate_up.is_contiguous():
        raise ValueError(
            f"gate_up must be contiguous [N, 2 * I], got {tuple(gate_up.shape)}, strides {gate_up.stride()}."
        )
    width = double_width // 2
    out = gate_up.new_empty((rows, width))
    _function(name, gate_up.dtype)(gate_up.data_ptr(), out.data_ptr(), rows, width, torch.get_num_threads())
    return out


def rope_write_kv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    num_heads: int,
    num_kv_heads: int,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    unit_offset: bool = False,
) -> Tensor:
    """See `specdec.kernels.fused.op.rope_write_kv`."""
    dtype, cache_shape, cos_shape = qkv.dtype, k_cache.shape, cos.shape
    rows, rotary_dim = cos_shape
    function, template, width, head_dim, num_slots = _rope_template(
        dtype, rotary_dim, cache_shape, num_heads, num_kv_heads, eps, unit_offset
    )
    if not (
        qkv.shape == (rows, width)
        and sin.shape == cos_shape
        and slots.shape == (rows,)
        and v_cache.shape == cache_shape
        and k_cache.dtype == dtype == v_cache.dtype
        and (cos.dtype == dtype or cos.dtype == torch.float32)
        and sin.dtype == cos.dtype
        and slots.dtype == torch.int64
        and all(map(Tensor.is_contiguous, (qkv, cos, sin, k_cache, v_cache, slots)))
    ):
        _refuse_rope(width, qkv=qkv, cos=cos, sin=sin, k_cache=k_cache, v_cache=v_cache, slots=slots)
    call = template
    if q_norm is not None or k_norm is not None:
        call = RopeCall.from_buffer_copy(template)
        call.q_norm, call.k_norm = (
            _norm_pointer(q_norm, head_dim, dtype),
            _norm_pointer(k_norm, head_dim, dtype),
        )
    out = qkv.new_empty((rows, num_heads, head_dim))
    threads = torch.get_num_threads()
    failed = function(
        call, qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), cos.dtype == torch.float32,
        k_cache.data_ptr(), v_cache.data_ptr(), slots.data_ptr(), out.data_ptr(), rows, threads,
    )  # fmt: skip
    if failed:
        raise_outside("slots", slots, num_slots)
    return out


@functools.lru_cache(maxsize=256)
def _rope_template(
    dtype: torch.dtype,
    rotary_dim: int,
    cache_shape: torch.Size,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    unit_offset: bool,
) -> tuple[Any, RopeCall, int, int, int]:
    """The kernel, its argument block without norms, the width of qkv, the head size, the number of slots."""
    num_blocks, block_size, cache_heads, head_dim = cache_shape
    if cache_heads != num_kv_heads:
        raise ValueError(
            f"k_cache {tuple(cache_shape)} holds {cache_heads} heads, num_kv_heads is {num_kv_heads}."
        )
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(f"cos is {rotary_dim} wide, expected an even number up to the head size {head_dim}.")
    num_slots, width = num_blocks * block_size, (num_heads + 2 * num_kv_heads) * head_dim
    call = RopeCall(None, None, num_heads, num_kv_heads, head_dim, rotary_dim, num_slots, eps, unit_offset)
    return _function("rope_write_kv", dtype), call, width, head_dim, num_slots


def _refuse_rope(width: int, **tensors: Tensor) -> None:
    got = ", ".join(f"{name} {x.dtype} {tuple(x.shape)} strides {x.stride()}" for name, x in tensors.items())
    raise ValueError(
        f"expected contiguous qkv [N, {width}], cos and sin [N, R] (float32 or dtype of qkv), slots [N] "
        f"int64 and two caches of one shape with the dtype of qkv, got {got}."
    )


def _norm_pointer(weight: Tensor | None, head_dim: int, dtype: torch.dtype) -> int | None:
    if weight is None:
        return None
    if weight.shape != (head_dim,) or weight.dtype != dtype or not weight.is_contiguous():
        raise ValueError(
            f"q_norm and k_norm must be [{head_dim}] {dtype}, got {tuple(weight.shape)} {weight.dtype}."
        )
    return weight.data_ptr()


@functools.cache
def _function(name: str, dtype: torch.dtype) -> Any:
    library = build.require_library()
    function = getattr(library, f"specdec_{name}_{str(dtype).removeprefix('torch.')}")
    pointer, int32, int64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    gated = (pointer, pointer, int64, int64, int32)
    function.argtypes = {
        "rms_norm": (*[pointer] * 4, int64, int64, ctypes.c_float, int32, int32),
        "silu_mul": gated,
        "gelu_mul": gated,
        "rope_write_kv": (ctypes.POINTER(RopeCall), *[pointer] * 3, int32, *[pointer] * 4, int64, int32),
    }[name]
    return function
