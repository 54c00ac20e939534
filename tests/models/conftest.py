"""Tiny random models, and how to run a packed batch on one and its plain twin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, set_seed

from specdec.kernels.tree_attention.builder import Request, build_metadata
from specdec.models import ForwardOutput, TargetModel

WINDOW = 6
VOCAB = 97
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Large enough for attention to matter: with the usual 0.02 a broken mask would pass unnoticed.
    "initializer_range": 0.2,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "experts_implementation": "eager"}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biased": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "qwen2": {},
    "qwen2-window": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen3": {},
    "mistral-window": {"sliding_window": WINDOW},
    "mixtral": {"num_local_experts": 4, **_EXPERTS},
    "qwen3_moe": {"num_experts": 4, **_EXPERTS},
    "gemma2": {"sliding_window": WINDOW, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {"sliding_window": WINDOW, "sliding_window_pattern": 2},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "gpt2": {},
}
FUSED = ("llama", "llama-biased", "qwen2", "qwen2-window", "qwen3", "mistral-window")


def make_model(family: str, **overrides: Any) -> PreTrainedModel:
    """A random model of the family; the same weights each time."""
    set_seed(0)
    config = AutoConfig.for_model(family.split("-")[0], **{**_SHAPE, **FAMILIES[family], **overrides})
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        # Biases start at zero and norms at one; a path that ignored them would pass unnoticed.
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape)
        assert parameter.isfinite().all(), name
    return model


class Pool:
    """Pages of a target, and forwards that fill them from the requests' logical slots."""

    def __init__(self, target: TargetModel, capacity: Sequence[int], block_size: int) -> None:
        self.target = target
        self.block_size = block_size
        pages = [-(-count // block_size) for count in capacity]
        self.tables = torch.zeros(len(pages), max(pages), dtype=torch.int32)
        shuffled = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(1)).int()
        for row, own in enumerate(shuffled.split(pages)):
            self.tables[row, : len(own)] = own
        self.kv = torch.full(target.kv_spec.pool_shape(sum(pages), block_size), 1e4, dtype=target.dtype)

    def forward(self, tokens: Sequence[int], requests: Sequence[Request], **options: Any) -> ForwardOutput:
        meta = build_metadata(requests, self.block_size)
        counts = meta.query_offsets.diff().long()
        owner = torch.arange(len(requests)).repeat_interleave(counts)
        first = torch.tensor([request.cached for request in requests])
        logical = torch.arange(len(tokens)) - meta.query_offsets[:-1].long()[owner] + first[owner]
        pages = self.tables[owner, logical // self.block_size].long()
        slots = pages * self.block_size + logical % self.block_size
        meta = replace(meta, slots=slots, block_tables=self.tables[: len(requests)])
        return self.target.forward(torch.tensor(tokens), self.kv, meta, **options)

    def logits(self, tokens: Sequence[int], requests: Sequence[Request]) -> Tensor:
        """`[N, V]`."""
        return self.target.logits(self.forward(tokens, requests).hidden)


@pytest.fixture
def tiny() -> Callable[..., PreTrainedModel]:
    return make_model


@pytest.fixture
def make_pool() -> type[Pool]:
    return Pool


@pytest.fixture(params=[*((name, False) for name in FAMILIES), *((name, True) for name in FUSED)], ids=str)
def pair(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, TargetModel]:
    """A model, and a target with the same weights."""
    family, fuse = request.param
    target = TargetModel(make_model(family), name=family, fuse=fuse)
    assert target.fused == fuse
    return make_model(family), target
