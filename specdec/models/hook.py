"""The attention function that unmodified transformers modules call to run on paged K/V.

transformers looks the function up by name (`AttentionInterface`) and skips building masks for names that
`AttentionMaskInterface` does not know, which is what we want: `AttentionMetadata` says who sees whom.
The pages and the metadata of a forward travel as the keyword argument `specdec` of the decoder's `forward`,
which supported architectures pass on to every attention call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import AttentionInterface

from specdec.kernels.paged_kv.op import write_kv
from specdec.kernels.tree_attention.metadata import AttentionMetadata
from specdec.kernels.tree_attention.op import tree_attention

ATTENTION_NAME = "specdec"


class AttentionCall(NamedTuple):
    """What one call of the attention function received."""

    layer: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    causal: bool
    extras: frozenset[str]
    """Names of further keyword arguments that carry tensors."""


class MissingContextError(ValueError):
    """A call of the attention function without the paged context."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedContext:
    """What one forward attends through."""

    kv: Tensor
    """`[layers, 2, blocks, block_size, kv_heads, head_dim]`."""
    meta: AttentionMetadata


@dataclass(frozen=True, slots=True)
class AttentionTrace:
    """Stands in for `PagedContext` to record the calls of one forward; attention then returns zeros."""

    calls: list[AttentionCall] = field(default_factory=list)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    specdec: PagedContext | AttentionTrace | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """Writes the K/V of N packed tokens to their pages and attends through the block tables.

    Args:
        module: the attention module; its `layer_idx` picks the pages.
        query: `[1, Hq, N, D]`, rotated.
        key: `[1, Hkv, N, D]`, rotated.
        value: `[1, Hkv, N, D]`.
        attention_mask: ignored, the metadata decides.
        scaling: factor on the scores, `D ** -0.5` if None.
        dropout: ignored, this is inference.
        sliding_window: number of visible positions including the query's own.
        softcap: scores become `softcap * tanh(scores / softcap)`.
        specdec: pages and metadata.
        extras: ignored; loading a model checks that none of them matters.

    Returns:
        `[1, N, Hq, D]` and None in place of the attention weights.

    Raises:
        MissingContextError: the model was called directly, or does not pass keyword arguments on.
    """
    if isinstance(specdec, PagedContext):
        query, key, value = (states[0].transpose(0, 1).contiguous() for states in (query, key, value))
        k_cache, v_cache = specdec.kv[module.layer_idx].unbind(0)  # type: ignore[index]
        write_kv(key, value, k_cache, v_cache, specdec.meta.slots)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        attended = tree_attention(
            query, k_cache, v_cache, specdec.meta, scale=scale, window=sliding_window, soft_cap=softcap
        )
        return attended.unsqueeze(0), None
    if isinstance(specdec, AttentionTrace):
        specdec.calls.append(_describe(module, key, value, sliding_window, extras))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None
    raise MissingContextError(
        f"specdec={specdec!r} reached the attention of {type(module).__name__}, expected the paged context: "
        "run this model through TargetModel.forward, or load it again for other uses"
    )


def _describe(
    module: nn.Module, key: Tensor, value: Tensor, window: int | None, extras: dict[str, Any]
) -> AttentionCall:
    return AttentionCall(
        layer=getattr(module, "layer_idx", -1),
        num_kv_heads=key.shape[1],
        key_dim=key.shape[-1],
        value_dim=value.shape[-1],
        window=window,
        causal=extras.get("is_causal", True) is not False and getattr(module, "is_causal", True),
        extras=frozenset(name for name, extra in extras.items() if isinstance(extra, Tensor)),
    )


AttentionInterface.register(ATTENTION_NAME, paged_attention)
