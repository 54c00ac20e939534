"""Architectures that the hook cannot serve are refused with the reason."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from specdec.models import TargetModel, support
from specdec.models.hook import AttentionCall

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("t5", "encoder-decoder"),
        ("gemma3", "multimodal"),
        ("mamba", "'linear_attention'"),
        ("jamba", "'linear_attention'"),
        ("qwen3_next", "'linear_attention'"),
        ("llama4_text", "'chunked_attention'"),
        ("deepseek_v3", "latent vectors"),
        ("gemma3n_text", "reuse the keys and values"),
        ("bloom", "does not use transformers' AttentionInterface"),
        ("falcon", "does not use transformers' AttentionInterface"),
    ],
)
def test_refused_by_configuration(model_type, reason):
    config = AutoConfig.for_model(model_type)
    with pytest.raises(ValueError, match=reason) as error:
        support.check_config(config, "some/model")
    assert str(error.value).startswith(f"model 'some/model' (model_type '{config.model_type}') cannot be a")


@pytest.mark.parametrize(
    ("model_type", "overrides", "reason"),
    [
        ("gpt_oss", {"head_dim": 16, "num_local_experts": 4}, "s_aux"),
        ("nemotron", {"head_dim": 16}, "does not pass keyword arguments on"),
        ("diffllama", {}, "attention ran for the layers \\[0, 0, 1, 1"),
        ("gemma4_text", {"head_dim": 16}, "KV heads, key size, value size"),
        ("bert", {"is_decoder": True}, "lists of 4 layers"),
    ],
)
def test_refused_by_the_probe(model_type, overrides, reason):
    config = AutoConfig.for_model(model_type, **{**SMALL, **overrides})
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match=reason) as error:
        TargetModel(model, name="some/model")
    assert "model 'some/model'" in str(error.value)


class ScaledLlama(LlamaForCausalLM):
    """Does something to its logits that no configuration tells."""

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits * 1.5
        return outputs


def test_refused_by_the_numbers():
    model = ScaledLlama(AutoConfig.for_model("llama", **SMALL)).eval()
    with pytest.raises(ValueError, match="off by 0.33 \\(relative\\) from its own attention"):
        TargetModel(model, name="scaled")


def test_not_a_number_is_refused(tiny):
    config = tiny("llama").config
    broken = torch.full((2, 3), float("nan"))
    with pytest.raises(ValueError, match="off by nan"):
        support.check_logits(broken, torch.ones(2, 3), config, "broken")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"window": 8}, "layer 2 asked for window 8, but its configuration says None"),
        ({"causal": False}, "not causal"),
        ({"extras": frozenset({"position_bias"})}, "its attention takes position_bias"),
        ({"value_dim": 8}, "expected one shape in all layers"),
        ({"layer": 1}, "attention ran for the layers \\[0, 1, 1, 3\\]"),
    ],
)
def test_calls(tiny, changes, reason):
    config = tiny("llama").config
    calls = [AttentionCall(layer, 2, 16, 16, None, True, frozenset()) for layer in range(4)]
    support.check_calls(calls, config, "fine")
    calls[2] = calls[2]._replace(**changes)
    with pytest.raises(ValueError, match=reason):
        support.check_calls(calls, config, "odd")


def test_a_window_that_only_the_mask_knows_is_refused(tiny):
    config = tiny("mistral-window").config
    calls = [AttentionCall(layer, 2, 16, 16, None, True, frozenset()) for layer in range(4)]
    with pytest.raises(ValueError, match="asked for window None, but its configuration says 6"):
        support.check_calls(calls, config, "masked")
