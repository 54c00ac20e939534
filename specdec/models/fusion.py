"""The plain pre-norm Llama decoder, run with few and fused operations.

Llama, Mistral, Qwen2 and Qwen3 share one layer: RMS norm, attention on rotated queries and keys, RMS norm,
gated SiLU. At batch one on small models, module calls and small operations cost as much as reading the
weights, so this path calls the kernels directly and multiplies with q/k/v, and gate/up, as one matrix each.

There is one copy of the weights: the parameters of the original projections become views of the joint ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer, MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm

from specdec.kernels.fused.op import add_rms_norm, rms_norm, rope_write_kv, silu_mul
from specdec.kernels.tree_attention.metadata import AttentionMetadata
from specdec.kernels.tree_attention.op import tree_attention
from specdec.models.quantisation import Weight, linear

_FUSIBLE_LAYERS = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
_FUSIBLE_MODULES = (nn.Embedding, nn.Linear, LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm)


class _Layer(NamedTuple):
    """Weights of one layer. H hidden, I intermediate, D head size."""

    input_norm: Tensor  # [H]
    qkv: Weight  # [(Hq + 2 Hkv) D, H]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    o: Weight  # [H, Hq D]
    o_bias: Tensor | None
    post_norm: Tensor  # [H]
    gate_up: Weight  # [2 I, H]
    gate_up_bias: Tensor | None
    down: Weight  # [H, I]
    down_bias: Tensor | None
    window: int | None


def can_fuse(model: PreTrainedModel) -> bool:
    """Whether every layer is the plain Llama layer with ordinary dense weights."""
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    return (
        layers is not None
        and all(type(layer) in _FUSIBLE_LAYERS for layer in layers)
        and model.config.hidden_act in ("silu", "swish")
        and all(is_plain(module) for module in decoder.modules())
    )


def is_plain(module: nn.Module) -> bool:
    """False for modules that are quantised, adapted, sharded or hooked: they must run as they are."""
    if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook"):
        return False
    own = list(module.parameters(recurse=False))
    return not own or (
        type(module) in _FUSIBLE_MODULES and all(type(parameter.data) is Tensor for parameter in own)
    )


class FusedDecoder:
    """Runs the decoder of a model for which `can_fuse` is true."""

    def __init__(self, model: PreTrainedModel) -> None:
        decoder = model.get_decoder()
        first = decoder.layers[0]
        self._embedding: Tensor = decoder.embed_tokens.weight
        self._rotary: nn.Module = decoder.rotary_emb
        self._final_norm: Tensor = decoder.norm.weight
        self._eps: float = model.config.rms_norm_eps
        self._scale: float = first.self_attn.scaling
        head_dim: int = first.self_attn.head_dim
        self._num_heads: int = first.self_attn.q_proj.out_features // head_dim
        self._num_kv_heads: int = first.self_attn.k_proj.out_features // head_dim
        self._layers = [_fuse_layer(layer) for layer in decoder.layers]

    def with_weights(self, change: Callable[[Weight], Weight]) -> FusedDecoder:
        """The same decoder with changed matrices; embedding, norms and biases are shared."""
        changed = copy(self)
        changed._layers = [
            layer._replace(
                qkv=change(layer.qkv),
                o=change(layer.o),
                gate_up=change(layer.gate_up),
                down=change(layer.down),
            )
            for layer in self._layers
        ]
        return changed

    def forward(
        self, tokens: Tensor, kv: Tensor, meta: AttentionMetadata, depth: int, taps: Sequence[int]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Runs the first `depth` layers; the same contract as `TargetModel.forward`."""
        eps, num_heads, num_kv_heads, scale = self._eps, self._num_heads, self._num_kv_heads, self._scale
        slots = meta.slots
        pages = kv.flatten(0, 1).unbind(0)
        residual = embedding(tokens, self._embedding)  # [N, H]
        cos, sin = self._rotary(residual, meta.positions.unsqueeze(0))
        cos, sin = cos.squeeze(0), sin.squeeze(0)  # [N, D]
        layers = self._layers[:depth]
        next_norms = [layer.input_norm for layer in layers[1:]] + [self._final_norm]
        tapped = {0: residual.clone()} if 0 in taps else {}

        hidden = rms_norm(residual, layers[0].input_norm, eps)
        for index, layer in enumerate(layers):
            k_cache, v_cache = pages[2 * index], pages[2 * index + 1]
            query = rope_write_kv(
                linear(hidden, layer.qkv, layer.qkv_bias),
                cos,
                sin,
                k_cache,
                v_cache,
                slots,
                num_heads,
                num_kv_heads,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                eps=eps,
            )
            attended = tree_attention(
                query, k_cache, v_cache, meta, scale=scale, window=layer.window
            )  # [N, Hq, D]
            delta = linear(attended.flatten(1), layer.o, layer.o_bias)  # [N, H]
            hidden = add_rms_norm(residual, delta, layer.post_norm, eps)
            gated = silu_mul(linear(hidden, layer.gate_up, layer.gate_up_bias))  # [N, I]
            delta = linear(gated, layer.down, layer.down_bias)
            hidden = add_rms_norm(residual, delta, next_norms[index], eps)
            if index + 1 in taps:
                tapped[index + 1] = residual.clone()
        return hidden, tuple(tapped[tap] for tap in taps)


def _fuse_layer(layer: LlamaDecoderLayer) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    qkv, qkv_bias = _join(attention.q_proj, attention.k_proj, attention.v_proj)
    gate_up, gate_up_bias = _join(mlp.gate_proj, mlp.up_proj)
    return _Layer(
        input_norm=layer.input_layernorm.weight,
        qkv=qkv,
        qkv_bias=qkv_bias,
        q_norm=None if q_norm is None else q_norm.weight,
        k_norm=None if k_norm is None else k_norm.weight,
        o=attention.o_proj.weight,
        o_bias=attention.o_proj.bias,
        post_norm=layer.post_attention_layernorm.weight,
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=mlp.down_proj.weight,
        down_bias=mlp.down_proj.bias,
        window=_window(layer),
    )


def _window(layer: LlamaDecoderLayer) -> int | None:
    if isinstance(layer, LlamaDecoderLayer):
        return None
    if isinstance(layer, MistralDecoderLayer):
        return layer.self_attn.config.sliding_window
    return layer.self_attn.sliding_window


@torch.no_grad()
def _join(*projections: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Stacks the projections' weights and biases, which become views of the results."""
    weight = _stack(*(projection.weight for projection in projections))
    if projections[0].bias is None:
        return weight, None
    return weight, _stack(*(projection.bias for projection in projections))


def _stack(*parameters: Tensor) -> Tensor:
    joint = torch.cat([parameter.data for parameter in parameters])
    views = joint.split([len(parameter) for parameter in parameters])
    for parameter, view in zip(parameters, views, strict=True):
        parameter.data = view
    return joint
