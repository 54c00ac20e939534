"""A causal language model on paged K/V: what the engine runs, as the target or as a small draft model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from specdec.kernels.tree_attention.metadata import AttentionMetadata
from specdec.models import probe, support
from specdec.models.fusion import FusedDecoder, can_fuse, is_plain
from specdec.models.hook import (
    ATTENTION_NAME,
    AttentionCall,
    AttentionTrace,
    MissingContextError,
    PagedContext,
)
from specdec.models.quantisation import QuantisedLinear, Rounding


@dataclass(frozen=True, kw_only=True)
class KVSpec:
    """Shape of the K/V cache that a model needs."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def pool_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Shape of the tensor that `TargetModel.forward` takes as `kv`."""
        return (self.num_layers, 2, num_blocks, block_size, self.num_kv_heads, self.head_dim)


class ForwardOutput(NamedTuple):
    """Hidden states of N packed tokens."""

    hidden: Tensor
    """`[N, H]` after the final norm."""
    taps: tuple[Tensor, ...]
    """`[N, H]` each, before the final norm, in the order they were asked for."""


class TargetModel:
    """A loaded transformers causal LM whose attention runs on pages.

    The wrapped model can no longer be called directly: its attention expects the paged context.

    Args:
        model: decoder-only model in evaluation mode.
        name: for messages and reports.
        eos_token_ids: token ids that end a generation.
        fuse: run the Llama family through fused modules; other architectures keep their own modules.

    Raises:
        ValueError: the architecture cannot run on paged K/V; the message names the reason.
    """

    def __init__(
        self, model: PreTrainedModel, *, name: str, eos_token_ids: Sequence[int] = (), fuse: bool = True
    ) -> None:
        config: PreTrainedConfig = model.config
        support.check_config(config, name)
        support.check_class(type(model), config, name)
        self.name = name
        self.config = config
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.num_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        self.max_context = support.max_context(config, name)
        self.eos_token_ids = tuple(eos_token_ids)
        self._model = model
        self._decoder: nn.Module = model.get_decoder()
        self._layers_name = _layer_list_name(self._decoder, config, name)
        self._head: nn.Module = model.get_output_embeddings()
        self._logit_scale = _logit_scale(config)
        self._logit_cap: float | None = getattr(config, "final_logit_softcapping", None)
        self._install(fuse)

    @property
    def model(self) -> PreTrainedModel:
        """The wrapped transformers model."""
        return self._model

    @property
    def vocab_size(self) -> int:
        """Width of the logits; some models pad it beyond the tokenizer's ids."""
        return self._head.weight.shape[0]  # type: ignore[index,return-value]

    @property
    def embed_tokens(self) -> nn.Module:
        """Input embeddings, which draft heads share."""
        return self._model.get_input_embeddings()

    @property
    def lm_head(self) -> nn.Module:
        """Output projection, which draft heads share."""
        return self._head

    @property
    def fused(self) -> bool:
        """Whether the layers run through fused modules."""
        return self._fused is not None

    @torch.no_grad()
    def quantised(self, rounding: Rounding) -> TargetModel:
        """The same model with the matrices of its layers and its head rounded, as a second model.

        Embeddings and norms are shared, and this model stays as it is. What is gained: `models.quantisation`.

        Raises:
            ValueError: the layers do not run through fused modules, or the head is no ordinary linear layer.
        """
        head = self._head
        if self._fused is None:
            model = type(self._model).__name__
            raise self._not_quantisable(f"the layers of {model} do not run through fused modules")
        if type(head) is not nn.Linear or not is_plain(head):
            raise self._not_quantisable(
                f"its head is a {type(head).__name__} that is quantised, adapted or hooked"
            )
        rounded = copy(self)
        rounded.name = f"{self.name}-int{rounding.bits}"
        rounded._fused = self._fused.with_weights(rounding)
        rounded._head = QuantisedLinear(rounding(head.weight), head.bias)
        return rounded

    def _not_quantisable(self, reason: str) -> ValueError:
        return ValueError(
            f"model {self.name!r} (model_type {self.config.model_type!r}) cannot be quantised: {reason}; use a "
            "Llama, Mistral, Qwen2 or Qwen3 model with dense weights, loaded with fuse=True, or another drafter"
        )

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        kv: Tensor,
        meta: AttentionMetadata,
        *,
        num_layers: int | None = None,
        taps: Sequence[int] = (),
    ) -> ForwardOutput:
        """Runs N packed tokens and writes their K/V to `meta.slots`.

        Args:
            tokens: `[N]` int64.
            kv: `[layers, 2, blocks, block_size, kv_heads, head_dim]` in the model's dtype.
            meta: positions and visibility of the tokens.
            num_layers: run only the first layers, then the final norm (early exit).
            taps: indices of the hidden states to return: 0 is the embeddings, i the output of layer i - 1.

        Raises:
            ValueError: `num_layers` or a tap is out of range.
        """
        depth = self.num_layers if num_layers is None else num_layers
        if not 1 <= depth <= self.num_layers:
            raise ValueError(f"num_layers={depth}, expected 1 to {self.num_layers} for model {self.name!r}")
        if not all(0 <= tap <= depth for tap in taps):
            raise ValueError(f"taps={tuple(taps)}, expected indices 0 to {depth} for model {self.name!r}")
        if self._fused is not None:
            return ForwardOutput(*self._fused.forward(tokens, kv, meta, depth, taps))
        return self._forward_stock(tokens, PagedContext(kv=kv, meta=meta), depth, taps)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits.

        Args:
            hidden: `[n, H]` after the final norm.

        Returns:
            `[n, V]` in the model's dtype, with the architecture's scale and soft cap applied.
        """
        logits = self._head(hidden)
        if self._logit_scale != 1.0:
            logits = logits * self._logit_scale
        if self._logit_cap is not None:
            logits = torch.tanh(logits / self._logit_cap) * self._logit_cap
        return logits

    def _forward_stock(
        self, tokens: Tensor, context: PagedContext, depth: int, taps: Sequence[int]
    ) -> ForwardOutput:
        tapped: dict[int, Tensor] = {}
        layers: nn.ModuleList = getattr(self._decoder, self._layers_name)
        with ExitStack() as stack:
            for tap in taps:
                stack.enter_context(_tap(layers, tap, tapped))
            if depth < self.num_layers:
                stack.enter_context(_replaced(self._decoder, self._layers_name, layers[:depth]))
            outputs = self._decoder(
                input_ids=tokens.unsqueeze(0),
                position_ids=context.meta.positions.unsqueeze(0),
                use_cache=False,
                specdec=context,
            )
        return ForwardOutput(outputs.last_hidden_state.squeeze(0), tuple(tapped[tap] for tap in taps))

    def _install(self, fuse: bool) -> None:
        """Switches the attention over, and compares a probe with the model's own attention."""
        tokens = probe.tokens(self.vocab_size, self.device)
        with torch.inference_mode():
            plain = self._model(input_ids=tokens.unsqueeze(0), use_cache=False).logits.squeeze(0)  # [n, V]
            self._model.set_attn_implementation(ATTENTION_NAME)
        calls = self._trace(tokens)
        support.check_calls(calls, self.config, self.name)
        self.kv_spec = KVSpec(
            num_layers=self.num_layers,
            num_kv_heads=calls[0].num_kv_heads,
            head_dim=calls[0].key_dim,
            dtype=self.dtype,
        )
        self._fused = FusedDecoder(self._model) if fuse and can_fuse(self._model) else None
        support.check_logits(self._probe_logits(tokens), plain, self.config, self.name)

    @torch.inference_mode()
    def _trace(self, tokens: Tensor) -> list[AttentionCall]:
        """What the attention function receives in one forward."""
        trace = AttentionTrace()
        try:
            self._decoder(input_ids=tokens.unsqueeze(0), use_cache=False, specdec=trace)
        except MissingContextError as error:
            reason = "it does not pass keyword arguments on to its attention"
            raise support.unsupported(self.name, self.config, reason) from error
        return trace.calls

    def _probe_logits(self, tokens: Tensor) -> Tensor:
        """Logits of the probe tokens: `[n, V]`."""
        shape = self.kv_spec.pool_shape(probe.NUM_BLOCKS, probe.BLOCK_SIZE)
        kv = torch.zeros(shape, dtype=self.dtype, device=self.device)
        hidden = [
            self.forward(part, kv, probe.metadata(request, self.device)).hidden
            for part, request in zip(tokens.chunk(2), (probe.PROMPT, probe.CHAIN), strict=True)
        ]
        return self.logits(torch.cat(hidden))

    def __repr__(self) -> str:
        path = "fused" if self.fused else "stock"
        return f"TargetModel({self.name!r}, {self.config.model_type}, {self.dtype}, {self.device}, {path})"


def _layer_list_name(decoder: nn.Module, config: PreTrainedConfig, name: str) -> str:
    """Attribute of the decoder that holds its layers."""
    names = [
        child_name
        for child_name, child in decoder.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == config.num_hidden_layers
    ]
    if len(names) != 1:
        count = config.num_hidden_layers
        reason = f"{type(decoder).__name__} has {len(names)} lists of {count} layers, expected one"
        raise support.unsupported(name, config, reason)
    return names[0]


def _logit_scale(config: PreTrainedConfig) -> float:
    """Factor that Cohere (`logit_scale`) and Granite (`logits_scaling`, a divisor) put on their logits."""
    return (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)


@contextmanager
def _replaced(module: nn.Module, name: str, child: nn.Module) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, child)
    try:
        yield
    finally:
        setattr(module, name, original)


@contextmanager
def _tap(layers: nn.ModuleList, tap: int, tapped: dict[int, Tensor]) -> Iterator[None]:
    """Keeps the input of layer 0 (tap 0) or the output of layer `tap - 1`."""

    def keep_input(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tapped[tap] = (args[0] if args else kwargs["hidden_states"]).squeeze(0)

    def keep_output(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        tapped[tap] = (output[0] if isinstance(output, tuple) else output).squeeze(0)

    if tap == 0:
        handle = layers[0].register_forward_pre_hook(keep_input, with_kwargs=True)
    else:
        handle = layers[tap - 1].register_forward_hook(keep_output)
    try:
        yield
    finally:
        handle.remove()
