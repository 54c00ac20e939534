"""Warping against transformers' processors, and drawing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec.core import SamplingBatch, SamplingParams
from specdec.core.sampling import sample, warp

PARAMS = {
    "plain": SamplingParams(),
    "hot": SamplingParams(temperature=1.7),
    "cold": SamplingParams(temperature=0.2),
    "top-1": SamplingParams(top_k=1),
    "top-5": SamplingParams(top_k=5),
    "top-k-beyond": SamplingParams(top_k=10**6),
    "top-p": SamplingParams(top_p=0.7),
    "top-p-tiny": SamplingParams(top_p=1e-4),
    "top-p-high": SamplingParams(top_p=0.9999),
    "min-p": SamplingParams(min_p=0.2),
    "min-p-1": SamplingParams(min_p=1.0),
    "all": SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.05),
}


def noise(rows: int, vocab_size: int, spread: float = 3.0, seed: int = 0) -> Tensor:
    return spread * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def batch(*params: SamplingParams) -> SamplingBatch:
    return SamplingBatch(params, torch.device("cpu"))


def warp_rows(logits: Tensor, *params: SamplingParams) -> Tensor:
    """One request a row."""
    return warp(logits, batch(*params), torch.arange(len(params)))


def with_transformers(logits: Tensor, params: SamplingParams) -> Tensor:
    """The processors in the order `generate` builds them."""
    chain = LogitsProcessorList()
    if params.temperature != 1:
        chain.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        chain.append(MinPLogitsWarper(params.min_p))
    return chain(None, logits).softmax(-1)


@pytest.mark.parametrize("vocab_size", [7, 1000, 1500, 40_000])
@pytest.mark.parametrize("name", PARAMS)
def test_equals_transformers(name, vocab_size):
    logits = noise(4, vocab_size)
    expected = with_transformers(logits, PARAMS[name])
    actual = warp_rows(logits, *[PARAMS[name]] * 4)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    # Summing up from the other end may move the border of a nucleus by tokens of next to no mass.
    disputed = (actual > 0) != (expected > 0)
    assert float(torch.maximum(actual, expected)[disputed].sum()) < 1e-5


@pytest.mark.parametrize("vocab_size", [7, 5000])
def test_rows_of_a_batch_keep_their_own_parameters(vocab_size):
    params = list(PARAMS.values())
    # A flat row makes the nucleus larger than any shortcut.
    logits = torch.cat((noise(len(params) - 1, vocab_size), noise(1, vocab_size, spread=0.01)))
    together = warp_rows(logits, *params)
    for row, own in enumerate(params):
        assert torch.equal(together[row : row + 1], warp_rows(logits[row : row + 1], own))


def test_rows_may_share_a_request():
    params = [SamplingParams(temperature=0.5), SamplingParams(top_k=2)]
    logits, requests = noise(5, 11), torch.tensor([1, 0, 1, 1, 0])
    together = warp(logits, batch(*params), requests)
    for row, request in enumerate(requests.tolist()):
        assert torch.equal(together[row], warp_rows(logits[row : row + 1], params[request])[0])


def test_a_nucleus_with_ties_does_not_depend_on_the_batch():
    """Low-precision logits tie often; which of the tied tokens stay must not depend on a neighbour's row."""
    own = noise(1, 6000, spread=2.0, seed=3).bfloat16().float().round()
    flat = torch.zeros(1, 6000)
    for top_p in (0.3, 0.5, 0.8, 0.9):
        params = SamplingParams(top_p=top_p)
        alone = warp_rows(own, params)
        together = warp_rows(torch.cat((own, flat)), params, params)
        assert torch.equal(alone[0], together[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_rows_are_the_first_maximum(dtype):
    logits = torch.tensor([[1.0, 4.0, 4.0, 0.0], [3.0, 1.0, 3.0, 3.0]], dtype=dtype)
    greedy, warm = SamplingParams(temperature=0, top_k=3, top_p=0.5), SamplingParams()
    assert warp_rows(logits, greedy, greedy).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    mixed = warp_rows(logits, greedy, warm)
    assert mixed[0].tolist() == [0, 1, 0, 0]
    torch.testing.assert_close(mixed[1], logits[1].float().softmax(-1))


@pytest.mark.parametrize("temperature", [1e-3, 1.1e-5, 1e-10, 1e-44, 1e-300])
def test_tiny_temperatures_approach_greedy(temperature):
    logits = torch.tensor([[10.0, -5.0, 30.0, 29.0]])
    assert warp_rows(logits, SamplingParams(temperature=temperature)).tolist() == [[0, 0, 1, 0]]


def test_masked_tokens_stay_impossible():
    logits = torch.tensor([[0.0, float("-inf"), 1.0, float("-inf")]])
    for params in PARAMS.values():
        probs = warp_rows(logits, params)
        assert probs[0, [1, 3]].tolist() == [0, 0]
        assert float(probs.sum()) == pytest.approx(1)


def test_a_nucleus_keeps_at_least_its_mass_and_no_more_than_needed():
    probs = torch.tensor([[0.5, 0.25, 0.15, 0.1]])
    for top_p, kept in ((0.4, 1), (0.5, 1), (0.6, 2), (0.75, 2), (0.8, 3), (0.95, 4)):
        assert int((warp_rows(probs.log(), SamplingParams(top_p=top_p)) > 0).sum()) == kept, top_p


# Drawing

EDGES = [0.0, 2.0**-53, 0.5, 1 - 2.0**-53]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1e-30, 1e-7, 0.1, 0.3, 1.0, 7.0]), min_size=1, max_size=12).filter(any),
    st.one_of(st.sampled_from(EDGES), st.floats(0, 1, exclude_max=True)),
)
def test_a_draw_never_has_weight_zero(weights, coin):
    token = int(sample(torch.tensor([weights]), torch.tensor([coin], dtype=torch.float64)))
    assert weights[token] > 0


def test_draws_invert_the_cumulative_sum():
    weights = torch.tensor([[0.0, 2.0, 0.0, 1.0, 1.0, 0.0]]).expand(6, -1)
    coins = torch.tensor([0.0, 0.49, 0.5, 0.74, 0.75, 1 - 2.0**-53], dtype=torch.float64)
    assert sample(weights, coins).tolist() == [1, 1, 3, 3, 4, 4]


def test_draws_follow_the_weights():
    weights = torch.tensor([[0.1, 0.0, 0.6, 0.3]])
    coins = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    counts = sample(weights.expand(10_000, -1), coins).bincount(minlength=4)
    assert (counts - torch.tensor([1000, 0, 6000, 3000])).abs().max() <= 1


# Parameters


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("seed", -1),
        ("seed", 2**63),
        ("min_tokens", -1),
        ("min_tokens", 129),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", float("inf")),
        ("repetition_penalty", float("nan")),
        ("presence_penalty", 2.1),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", -2.1),
        ("logprobs", -1),
        ("allowed_token_ids", 5),
        ("banned_token_ids", "12"),
    ],
)
def test_refused_values_are_named(name, value):
    with pytest.raises(ValueError, match=f"^{name}={value!r}: expected {name} "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("bias", [101.0, -1e9, float("inf"), float("nan")])
def test_refused_bias_names_the_token(bias):
    with pytest.raises(ValueError, match=r"logit_bias\[7\]=.*in \[-100, 100\]; ban ids instead"):
        SamplingParams(logit_bias={3: 1.0, 7: bias})


@pytest.mark.parametrize(("allowed", "banned"), [((), ()), ((1, 2), (2, 1, 5))], ids=str)
def test_something_must_be_allowed(allowed, banned):
    with pytest.raises(ValueError, match="allowed_token_ids=.*: expected at least one id to be left"):
        SamplingParams(allowed_token_ids=allowed, banned_token_ids=banned)


def test_parameters_can_be_keys():
    params = SamplingParams(logit_bias={1: 2.0}, presence_penalty=1.0)
    assert {params: 1}[SamplingParams(logit_bias={1: 2.0}, presence_penalty=1.0)] == 1
    assert params != SamplingParams(logit_bias={1: 3.0}, presence_penalty=1.0)


def test_accepted_values():
    params = SamplingParams(max_tokens=None, temperature=0, top_k=0, top_p=1, min_p=1, seed=2**63 - 1)
    assert params.is_greedy
    with pytest.raises(TypeError):
        SamplingParams(10)
    with pytest.raises(AttributeError):
        params.temperature = 1.0
