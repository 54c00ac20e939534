"""Tiny random models: a paged target and its untouched transformers twin, the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, set_seed

from specdec.core import SamplingBatch, SamplingParams
from specdec.core.sampling import warp
from specdec.models.target import TargetModel

_SHAPE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
GREEDY = SamplingParams(temperature=0, max_tokens=40)


class TinyLM:
    """A random model twice: on pages, and as transformers runs it."""

    def __init__(
        self, family: str, seed: int, eos: tuple[int, ...], scale: float, shape: dict[str, Any]
    ) -> None:
        self._build = (family, seed, scale, shape)
        self.target = TargetModel(self._make(), name=f"tiny-{family}-{seed}", eos_token_ids=eos)
        self._greedy: dict[tuple[int, ...], list[int]] = {}

    @cached_property
    def plain(self) -> PreTrainedModel:
        return self._make()

    def _make(self) -> PreTrainedModel:
        family, seed, scale, shape = self._build
        set_seed(seed)
        shape = {**_SHAPE, **shape}
        if family == "gpt2":
            shape = {_GPT2_NAMES.get(name, name): value for name, value in shape.items()}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape)).eval()
        for parameter in model.parameters():
            # Small weights make a model that repeats one token, whatever it has seen.
            parameter.data.mul_(scale)
        return model

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """`[n, V]`, the logits after each token in a plain forward."""
        return self.plain(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The first `count` tokens of plain greedy decoding."""
        known = self._greedy.setdefault(tuple(prompt), [])
        while len(known) < count:
            known.append(int(self.logits([*prompt, *known])[-1].argmax()))
        return known[:count]

    def probs(self, tokens: Sequence[int], params: SamplingParams) -> Tensor:
        """`[V]`, the warped distribution after the tokens."""
        sampling = SamplingBatch([params], torch.device("cpu"))
        return warp(self.logits(tokens)[-1:], sampling, torch.zeros(1, dtype=torch.int64))[0]

    @torch.inference_mode()
    def keys_and_values(self, tokens: Sequence[int]) -> Tensor:
        """`[layers, 2, n, kv_heads, head_dim]`, the cache of a plain forward."""
        cache = self.plain(input_ids=torch.tensor([list(tokens)]), use_cache=True).past_key_values
        layers = [torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers]
        return torch.stack(layers).transpose(2, 3)


@cache
def tiny_lm(
    family: str = "llama", seed: int = 0, eos: tuple[int, ...] = (), scale: float = 3.0, **shape: Any
) -> TinyLM:
    """A tiny model; the same arguments give the same one."""
    return TinyLM(family, seed, eos, scale, shape)
