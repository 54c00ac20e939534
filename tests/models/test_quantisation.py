"""Rounded weights: how far they are from the original, what the kernels make of them, whole models."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from specdec_tests.quantised import rounded_twin
from torch import Tensor

from specdec.kernels.tree_attention.builder import Request
from specdec.models import TargetModel
from specdec.models.quantisation import PackedWeight, RoundedWeight, Rounding, linear

ROUNDINGS = [Rounding(8), Rounding(4), Rounding(4, 64), Rounding(4, 128)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# The last two have a short group at every group size, the last one also rows that fill no tile.
SHAPES = [(64, 128), (96, 1536), (48, 33), (101, 160)]
PROMPT = [5, 17, 3, 88, 42, 9, 61, 23, 70, 11, 34, 56]
WHOLE = [Request(cached=0, prefill=len(PROMPT) - 1)]
FAMILIES = ["llama", "llama-biased", "qwen2-window", "qwen3", "mistral-window"]


def random_weight(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    scales = 0.1 * torch.rand(shape[0], 1, generator=generator)
    # No mean of zero: a zero-point that was lost would show.
    return (scales * (torch.randn(shape, generator=generator) + 0.5)).to(dtype)


def values_of(rounded: RoundedWeight) -> Tensor:
    """`[N, K]` float64, element by element as the definition says."""
    group = torch.arange(rounded.codes.shape[1]) // rounded.group_size
    return rounded.codes.double() * rounded.scale.double()[:, group] + rounded.zero.double()[:, group]


# Rounding


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
def test_no_value_moves_by_more_than_half_a_scale(rounding, shape, dtype):
    weight = random_weight(shape, dtype)
    rounded = rounding.round(weight)
    group = torch.arange(shape[1]) // rounded.group_size
    scale, zero = rounded.scale.double()[:, group], rounded.zero.double()[:, group]
    assert rounded.scale.shape == (shape[0], -(-shape[1] // rounded.group_size))
    # At 4 bits the ends of a group lie beyond the last code by what scale and zero lost to their dtype.
    lost = torch.finfo(dtype).eps * (zero.abs() + 8 * scale) if rounding.bits == 4 else 0.0
    error = (values_of(rounded) - weight.double()).abs()
    assert bool((error <= scale * (0.5 + 1e-5) + lost).all())
    assert rounded.codes.abs().max() <= (127 if rounding.bits == 8 else 8)
    torch.testing.assert_close(rounded.dequantise().double(), values_of(rounded).to(dtype).double())


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
def test_smaller_groups_and_more_bits_are_closer(rounding):
    weight = random_weight((64, 1536))
    error = (rounding.round(weight).dequantise() - weight).norm() / weight.norm()
    low, high = {8: (0.005, 0.012), 32: (0.05, 0.09), 64: (0.06, 0.10), 128: (0.07, 0.12)}[
        8 if rounding.bits == 8 else rounding.group_size or 32
    ]
    assert low < error < high


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
def test_values_on_the_grid_are_kept(rounding):
    generator = torch.Generator().manual_seed(0)
    low, high = (-127, 127) if rounding.bits == 8 else (-8, 7)
    codes = torch.randint(low, high + 1, (16, 256), generator=generator).float()
    size = 256 if rounding.bits == 8 else rounding.group_size or 32
    # Every group reaches both ends, so that its scale is the power of two it was made with.
    codes[:, ::size], codes[:, 1::size] = low, high
    weight = codes * 2.0**-6 + (0 if rounding.bits == 8 else 3 * 2.0**-6)
    assert torch.equal(rounding.round(weight).dequantise(), weight)


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
@pytest.mark.parametrize("value", [0.0, 0.25])
def test_constant_weights_are_kept(rounding, value):
    weight = torch.full((32, 100), value)
    assert torch.equal(rounding.round(weight).dequantise(), weight)
    torch.testing.assert_close(linear(torch.ones(1, 100), rounding(weight)), torch.full((1, 32), 100 * value))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5,), "bits=5, expected 4 or 8"),
        (("4",), "bits='4', expected 4 or 8"),
        ((4, 48), r"group_size=48, expected 32, 64, 128 or null \(32\)"),
        ((8, 32), "group_size=32 with bits=8: 8 bits are rounded by whole rows; leave group_size out"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        Rounding(*arguments)


# Products


# 8 bits take another way above 24 rows.
@pytest.mark.parametrize("rows", [0, 1, 5, 24, 25, 70])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
def test_packed_products_equal_products_of_the_rounded_values(rounding, shape, dtype, rows):
    weight = random_weight(shape, dtype)
    x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    bias = torch.randn(shape[0], generator=torch.Generator().manual_seed(2)).to(dtype)
    packed = rounding(weight)
    assert isinstance(packed, PackedWeight)
    assert packed.shape == weight.shape
    exact = x.double() @ values_of(rounding.round(weight)).T
    for product, expected in ((linear(x, packed), exact), (linear(x, packed, bias), exact + bias.double())):
        assert product.dtype == dtype
        assert product.shape == (rows, shape[0])
        assert product.is_contiguous()
        size = expected.abs().max().item() if rows else 1.0
        tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
        torch.testing.assert_close(product.double(), expected, rtol=0, atol=tolerance * size)


@pytest.mark.parametrize("rounding", [Rounding(8), Rounding(4)], ids=str)
def test_strided_rows_are_read_as_they_are(rounding):
    packed = rounding(random_weight((64, 128)))
    x = torch.randn(128, 6).T
    torch.testing.assert_close(linear(x, packed), linear(x.contiguous(), packed))


def test_other_devices_and_dtypes_keep_the_rounded_values():
    for rounding in ROUNDINGS:
        weight = random_weight((32, 64), torch.float64)
        kept = rounding(weight)
        assert isinstance(kept, Tensor)
        torch.testing.assert_close(kept, values_of(rounding.round(weight)))


# Models


@torch.inference_mode()
def plain_logits(model, tokens: Sequence[int]) -> Tensor:
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize("rounding", [Rounding(8), Rounding(4), Rounding(4, 64)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantised_model_is_the_model_with_rounded_weights(tiny, make_pool, family, rounding):
    target = TargetModel(tiny(family), name=family)
    pool = make_pool(target.quantised(rounding), [len(PROMPT)], block_size=4)
    logits = pool.logits(PROMPT, WHOLE)
    expected = plain_logits(rounded_twin(tiny(family), rounding), PROMPT)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert (logits - plain_logits(tiny(family), PROMPT)).abs().max() > 1e-3, "nothing was rounded"


def test_without_kernels_the_model_is_the_same(tiny, make_pool, monkeypatch):
    packed = TargetModel(tiny("qwen2"), name="qwen2").quantised(Rounding(4))
    monkeypatch.setattr("specdec.models.quantisation.has_kernels", lambda device, dtype: False)
    kept = TargetModel(tiny("qwen2"), name="qwen2").quantised(Rounding(4))
    assert isinstance(kept.lm_head.weight, Tensor)
    assert not isinstance(packed.lm_head.weight, Tensor)
    first, second = (
        make_pool(model, [len(PROMPT)], block_size=4).logits(PROMPT, WHOLE) for model in (packed, kept)
    )
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)


def test_the_target_stays_as_it_is(tiny, make_pool):
    target = TargetModel(tiny("llama-biased"), name="llama")
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    logits = make_pool(target, [len(PROMPT)], block_size=4).logits(PROMPT, WHOLE)
    quantised = target.quantised(Rounding(4))
    assert (quantised.name, target.name) == ("llama-int4", "llama")
    assert quantised.vocab_size == target.vocab_size
    assert quantised.kv_spec == target.kv_spec
    assert quantised.embed_tokens is target.embed_tokens
    assert torch.equal(make_pool(target, [len(PROMPT)], block_size=4).logits(PROMPT, WHOLE), logits)
    for name, tensor in target.model.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize(("rounding", "most"), [(Rounding(8), 1.03), (Rounding(4), 0.63)], ids=str)
def test_packed_weights_are_all_that_is_added(tiny, rounding, most):
    """Bytes a weight: the codes, and 2 bytes for each scale and zero; no second copy in bfloat16."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 192}
    target = TargetModel(tiny("llama", **sizes).bfloat16(), name="llama")
    quantised = target.quantised(rounding)
    weights: list[PackedWeight] = [
        quantised.lm_head.weight,
        *(
            getattr(layer, name)
            for layer in quantised._fused._layers
            for name in ("qkv", "o", "gate_up", "down")
        ),
    ]
    assert len(weights) == 1 + 4 * target.num_layers
    held = sum(
        value.untyped_storage().nbytes()
        for weight in weights
        for value in vars(weight).values()
        if isinstance(value, Tensor)
    )
    assert 0.5 < held / sum(weight.shape.numel() for weight in weights) < most


def test_models_that_cannot_be_quantised(tiny):
    hooked = TargetModel(tiny("llama"), name="mine")
    hooked.lm_head.register_forward_hook(lambda *_: None)
    cases = [
        (
            TargetModel(tiny("gemma2"), name="mine"),
            "the layers of Gemma2ForCausalLM do not run through fused",
        ),
        (
            TargetModel(tiny("llama"), name="mine", fuse=False),
            "LlamaForCausalLM do not run through fused modules",
        ),
        (TargetModel(tiny("llama"), name="mine").quantised(Rounding(4)), "its head is a QuantisedLinear"),
        (hooked, "its head is a Linear that is quantised, adapted or hooked"),
    ]
    for target, reason in cases:
        with pytest.raises(
            ValueError, match=rf"model 'mine(-int4)?' .*cannot be quantised: .*{reason}.*; use a Llama"
        ):
            target.quantised(Rounding(8))
