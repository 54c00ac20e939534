"""Tiny random models, built in code: a target, and a drafter that is like it but not the same."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.models.target import TargetModel

NAME = "tiny"
"""As `target=` of the check."""
VOCAB_SIZE = 24
PROMPTS = ((3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 1, 4), (7, 7, 2, 11, 7, 7, 2, 11, 7, 7), (20, 0, 13, 20, 0, 8))
"""They repeat themselves, so that retrieval finds something."""
# Random weights of the usual size make a model that hardly looks at its input.
_SCALE = 4.0
_NOISE = 0.25


def tiny_target() -> TargetModel:
    """A Llama of two layers with random weights in float32."""
    return TargetModel(_model(), name=NAME)


def tiny_draft() -> TargetModel:
    """The target with noise on its weights: its distribution overlaps the target's, and differs."""
    model = _model()
    noise = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += _NOISE * parameter.data.std() * torch.randn(parameter.shape, generator=noise)
    return TargetModel(model, name="tiny-draft")


def _model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
    )
    # The caller's random state stays as it is.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(_SCALE)
    return model
