"""One copy of the weights, ranges of arguments, and what a target says about itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from specdec.kernels.tree_attention.builder import Request
from specdec.models import KVSpec, TargetModel
from specdec.models.fusion import can_fuse


def test_kv_spec_counts_bytes():
    spec = KVSpec(num_layers=30, num_kv_heads=3, head_dim=64, dtype=torch.bfloat16)
    assert spec.bytes_per_token == 2 * 30 * 3 * 64 * 2
    assert spec.pool_shape(5, 16) == (30, 2, 5, 16, 3, 64)


def test_attributes(tiny):
    target = TargetModel(tiny("gemma2"), name="mine", eos_token_ids=(2, 7))
    assert target.kv_spec == KVSpec(num_layers=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    assert (target.name, target.eos_token_ids, target.max_context) == ("mine", (2, 7), 128)
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (4, 32, 97)
    assert (target.dtype, target.device, target.fused) == (torch.float32, torch.device("cpu"), False)
    assert target.embed_tokens.weight.shape == target.lm_head.weight.shape == (97, 32)
    assert "gemma2" in repr(target)


@pytest.mark.parametrize("family", ["llama-biased", "qwen2", "qwen3"])
def test_fusion_keeps_one_copy_of_the_weights(tiny, family):
    model = tiny(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    TargetModel(model, name=family)
    assert model.state_dict().keys() == before.keys()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)
    for layer in model.model.layers:
        for joined in (
            (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
            (layer.mlp.gate_proj, layer.mlp.up_proj),
        ):
            for kind in ("weight", "bias"):
                parameters = [getattr(projection, kind) for projection in joined]
                if parameters[0] is not None:
                    _assert_adjacent(parameters)


def _assert_adjacent(parameters: list[nn.Parameter]) -> None:
    storage = parameters[0].untyped_storage()
    assert storage.nbytes() == sum(parameter.nbytes for parameter in parameters)
    address = storage.data_ptr()
    for parameter in parameters:
        assert parameter.data_ptr() == address
        address += parameter.nbytes


def test_the_fused_path_reads_the_shared_weights(tiny, make_pool):
    target = TargetModel(tiny("llama"), name="llama")
    pool = make_pool(target, [4], block_size=4)
    before = pool.logits([3, 1, 4, 1], [Request(0, 3)])
    target.model.model.layers[2].self_attn.k_proj.weight.data *= 2
    assert (pool.logits([3, 1, 4, 1], [Request(0, 3)]) - before).abs().max() > 1e-3


def test_tied_embeddings_stay_tied(tiny):
    target = TargetModel(tiny("llama-biased"), name="llama")
    assert target.fused
    assert target.embed_tokens.weight is target.lm_head.weight


def test_fusion_leaves_other_architectures_and_changed_modules_alone(tiny):
    for family in ("gemma2", "gemma3_text", "mixtral", "cohere", "gpt2"):
        assert not can_fuse(tiny(family))
    assert can_fuse(tiny("llama"))
    assert not can_fuse(tiny("llama", hidden_act="gelu"))
    hooked = tiny("llama")
    hooked.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    assert not can_fuse(hooked)
    adapted = tiny("llama")
    adapted.model.layers[1].self_attn.q_proj = type("Adapted", (nn.Linear,), {})(32, 64, bias=False)
    assert not can_fuse(adapted)
    assert not TargetModel(hooked, name="hooked").fused


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_layers": 0}, "num_layers=0, expected 1 to 4"),
        ({"num_layers": 5}, "num_layers=5, expected 1 to 4"),
        ({"taps": (-1,)}, "expected indices 0 to 4"),
        ({"taps": (5,)}, "expected indices 0 to 4"),
        ({"taps": (3,), "num_layers": 2}, "expected indices 0 to 2"),
    ],
)
def test_ranges(tiny, make_pool, fuse, options, message):
    target = TargetModel(tiny("llama"), name="llama", fuse=fuse)
    pool = make_pool(target, [4], block_size=4)
    with pytest.raises(ValueError, match=message):
        pool.forward([1], [Request(0)], **options)


def test_a_failed_forward_leaves_no_hook_and_all_layers(tiny, make_pool):
    target = TargetModel(tiny("llama"), name="llama", fuse=False)
    pool = make_pool(target, [4], block_size=4)
    with pytest.raises(IndexError):
        pool.forward([97], [Request(0)], num_layers=2, taps=(0, 1))
    layers = target.model.model.layers
    assert len(layers) == 4
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)


def test_the_wrapped_model_refuses_direct_calls(tiny):
    target = TargetModel(tiny("qwen3"), name="qwen3")
    with pytest.raises(ValueError, match="run this model through TargetModel.forward"):
        target.model(input_ids=torch.tensor([[1, 2]]), use_cache=False)
