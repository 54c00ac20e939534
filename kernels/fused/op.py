"""The element-wise chains between the matrix products of a decoder layer, one call each. Inference only."""

from __future__ import annotations

from torch import Tensor

from specdec.kernels.backend import backend_for
from specdec.kernels.fused import native, reference, vectorised

_MODULES = {"reference": reference, "torch": vectorised, "cpp": native}


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    """`weight * x / sqrt(mean(x ** 2) + eps)`, computed in float32.

    Args:
        x: `[N, H]` contiguous.
        weight: `[H]`, dtype of `x`.
        eps: added to the mean square.
        unit_offset: multiply by `1 + weight` before rounding (Gemma) instead of by `weight` after it (Llama).

    Returns:
        `[N, H]`, dtype of `x`.

    Raises:
        ValueError: shapes, dtypes or layouts that do not fit together.
    """
    return _MODULES[backend_for(x)].rms_norm(x, weight, eps, unit_offset=unit_offset)


def add_rms_norm(
    residual: Tensor, delta: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False
) -> Tensor:
    """`residual += delta`, then `rms_norm(residual, weight, eps)`.

    Args:
        residual: `[N, H]` contiguous, updated in place.
        delta: `[N, H]` contiguous, dtype of `residual`.
        weight: `[H]`, dtype of `residual`.
        eps: added to the mean square.
        unit_offset: as in `rms_norm`.

    Returns:
        `[N, H]` normalised residual, dtype of `residual`.

    Raises:
        ValueError: shapes, dtypes or layouts that do not fit together.
    """
    return _MODULES[backend_for(residual)].add_rms_norm(residual, delta, weight, eps, unit_offset=unit_offset)


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` for `gate_up = [gate, up]`.

    Args:
        gate_up: `[N, 2 * I]` contiguous.

    Returns:
        `[N, I]`, dtype of `gate_up`.

    Raises:
        ValueError: an odd width or a layout that is not contiguous.
    """
    return _MODULES[backend_for(gate_up)].silu_mul(gate_up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """`gelu(gate) * up` with the tanh approximation; otherwise as `silu_mul`."""
    return _MODULES[backend_for(gate_up)].gelu_mul(gate_up)


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
    """Rotate queries and keys (rotate-half convention), store keys and values in their slots.

    Args:
        qkv: `[N, (Hq + 2 * Hkv) * D]` contiguous output of the fused projection: queries, keys, values.
        cos: `[N, R]` contiguous cosines in transformers' layout (both halves), float32 or dtype of `qkv`;
            R is `D`, or less for partial rotary embeddings, which leave the last `D - R` elements alone.
        sin: `[N, R]` sines, as `cos`.
        k_cache: `[num_blocks, block_size, Hkv, D]`, dtype of `qkv`, updated in place.
        v_cache: `[num_blocks, block_size, Hkv, D]`, updated in place.
        slots: `[N]` int64 physical slots, all different.
        num_heads: Hq.
        num_kv_heads: Hkv.
        q_norm: `[D]` weight of a per-head `rms_norm` before the rotation (Qwen3), or None.
        k_norm: the same for keys.
        eps: of those norms.
        unit_offset: of those norms.

    Returns:
        `[N, Hq, D]` rotated queries, dtype of `qkv`.

    Raises:
        ValueError: shapes, dtypes or layouts that do not fit together.
        IndexError: a slot outside the cache.
    """
    return _MODULES[backend_for(qkv)].rope_write_kv(
        qkv,
        cos,
        sin,
        k_cache,
        v_cache,
        slots,
        num_heads,
        num_kv_heads,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
        unit_offset=unit_offset,
    )
