"""Which architectures the paged attention hook can serve, and the errors for those it cannot.

`check_config` rejects by configuration, before any weight is read. `check_calls` and `check_logits` judge a
probe: a few tokens through the loaded model, once with its own attention and once on pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from specdec.models.hook import AttentionCall

_KNOWN_TENSORS = frozenset({"position_ids", "cu_seq_lens_q", "cu_seq_lens_k"})
_SERVED_LAYERS = frozenset({"full_attention", "sliding_attention"})
_OTHER_MODEL = (
    "use a decoder whose layers all attend over their own keys and values (Llama, Qwen2, Qwen3, Mistral, "
    "Mixtral, Gemma, OLMo, Phi, Granite and the like)"
)


def unsupported(name: str, config: PreTrainedConfig, reason: str, remedy: str = _OTHER_MODEL) -> ValueError:
    """The error for a model that the hook cannot serve."""
    return ValueError(
        f"model {name!r} (model_type {config.model_type!r}) cannot be a target: {reason}; {remedy}"
    )


def check_config(config: PreTrainedConfig, name: str) -> None:
    """Rejects what can be known from the configuration alone.

    Raises:
        ValueError: the architecture has an encoder, several modalities, a latent or recurrent cache, layers
            that share K/V, or attention code that bypasses the attention interface.
    """
    if config.is_encoder_decoder:
        raise unsupported(name, config, "it is an encoder-decoder", "use a decoder-only model")
    if config.get_text_config(decoder=True) is not config:
        raise unsupported(
            name,
            config,
            "it wraps a text model in a multimodal one",
            "use the text-only checkpoint of the family",
        )
    if getattr(config, "kv_lora_rank", None):
        raise unsupported(name, config, "it caches latent vectors (MLA), not keys and values")
    if getattr(config, "num_kv_shared_layers", 0):
        raise unsupported(name, config, "some of its layers reuse the keys and values of others")
    others = set(getattr(config, "layer_types", None) or ()) - _SERVED_LAYERS
    if others:
        raise unsupported(name, config, f"it has layers of type {', '.join(sorted(map(repr, others)))}")
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        check_class(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config, name)


def check_class(model_class: type[PreTrainedModel], config: PreTrainedConfig, name: str) -> None:
    """Rejects modelling code that does not call its attention through the attention interface.

    Raises:
        ValueError: it has its own attention code (ALiBi, recurrent state, relative biases).
    """
    if not model_class._supports_attention_backend:
        raise unsupported(
            name, config, f"{model_class.__name__} does not use transformers' AttentionInterface"
        )


def max_context(config: PreTrainedConfig, name: str) -> int:
    """Longest sequence the positions allow.

    LongRoPE changes its frequencies once a sequence outgrows the original length, which would contradict the
    keys that are already cached, so it is limited to that length.

    Raises:
        ValueError: the configuration does not say.
    """
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:
        raise unsupported(name, config, "its configuration has no max_position_embeddings")
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") == "longrope":
            limit = min(limit, parameters.get("original_max_position_embeddings", limit))
    return limit


def check_calls(calls: Sequence[AttentionCall], config: PreTrainedConfig, name: str) -> None:
    """Judges what the attention function received in one forward.

    Raises:
        ValueError: a layer skipped or repeated the function, layers differ in their heads, the window differs
            from the configuration's, or an argument arrived that the kernels do not know.
    """
    if [call.layer for call in calls] != list(range(config.num_hidden_layers)):
        layers = [call.layer for call in calls]
        reason = (
            f"attention ran for the layers {layers}, expected {config.num_hidden_layers} in order, once each"
        )
        raise unsupported(name, config, reason)
    shapes = {(call.num_kv_heads, call.key_dim, call.value_dim) for call in calls}
    if len(shapes) > 1 or any(key_dim != value_dim for _, key_dim, value_dim in shapes):
        reason = (
            f"its (KV heads, key size, value size) are {sorted(shapes)}, expected one shape in all layers"
        )
        raise unsupported(name, config, reason)
    for call in calls:
        expected = _configured_window(config, call.layer)
        if call.window != expected:
            reason = (
                f"layer {call.layer} asked for window {call.window}, but its configuration says {expected}"
            )
            raise unsupported(name, config, reason)
        unknown = call.extras - _KNOWN_TENSORS
        if unknown:
            reason = f"its attention takes {', '.join(sorted(unknown))}, which the kernels do not implement"
            raise unsupported(name, config, reason)
        if not call.causal:
            raise unsupported(name, config, "its attention is not causal")


def _configured_window(config: PreTrainedConfig, layer: int) -> int | None:
    types = getattr(config, "layer_types", None)
    if (types is not None and types[layer] != "sliding_attention") or not getattr(
        config, "use_sliding_window", True
    ):
        return None
    return getattr(config, "sliding_window", None)


def check_logits(paged: Tensor, plain: Tensor, config: PreTrainedConfig, name: str) -> None:
    """Compares the probe's logits on pages with those of the model's own attention.

    Args:
        paged: `[n, V]`.
        plain: `[n, V]`.

    Raises:
        ValueError: they differ by more than rounding, so the model does something the hook does not see.
    """
    tolerance = 1e-3 if plain.dtype in (torch.float32, torch.float64) else 0.1
    plain = plain.float()
    error = ((paged.float() - plain).norm() / plain.norm().clamp_min(1e-30)).item()
    if not error <= tolerance:  # also when NaN
        reason = (
            f"its logits on paged K/V are off by {error:.2g} (relative) from its own attention, "
            f"expected at most {tolerance:g}"
        )
        raise unsupported(name, config, reason)
