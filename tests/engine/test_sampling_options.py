"""Penalties, bias, masks and min_tokens: the same semantics with and without speculation."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from specdec_tests.laws import decode_law
from specdec_tests.models import tiny_lm
from specdec_tests.options import OPTIONS, changed_row, decode_with_options
from specdec_tests.scripts import half_right
from specdec_tests.serving import complete, drain, make_engine, scripted, speculate, tokens_of
from specdec_tests.statistics import chi_square_p_value
from torch import Tensor

from specdec.core import SamplingBatch, SamplingParams, TokenHistory, TokenTree
from specdec.core.sampling import draw_law
from specdec.engine.config import SpeculativeConfig
from specdec.engine.engine import Engine
from specdec.engine.request import FinishReason

LM = tiny_lm(scale=2.0, eos=(17, 61))
DRAFT = tiny_lm(seed=1, scale=2.0)
VOCAB = LM.target.vocab_size
PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]
MIX = [
    SamplingParams(**{"max_tokens": 24, "seed": 7, "temperature": temperature, **options})
    for temperature in (0.0, 0.9)
    for options in ({}, *OPTIONS.values())
]
PROMPTS = [[*PROMPT, row] for row in range(len(MIX))]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """Each request alone, without speculation."""
    return [
        tokens_of(make_engine(LM.target), [prompt], one)[0] for prompt, one in zip(PROMPTS, MIX, strict=True)
    ]


def scripted_half_right(plain: list[list[int]], num_tokens: int, siblings: bool) -> SpeculativeConfig:
    script = half_right(PROMPTS, plain, num_tokens, vocab_size=VOCAB, siblings=siblings)
    return scripted(script, max_nodes=2 * num_tokens)


def test_plain_decoding_equals_the_reference(plain):
    for prompt, params, tokens in zip(PROMPTS, MIX, plain, strict=True):
        assert tokens == decode_with_options(LM, prompt, params, LM.target.eos_token_ids)
    assert len({tuple(tokens) for tokens in plain}) == len(plain)
    assert any(len(tokens) < 24 for tokens in plain), "no request ends by EOS: min_tokens is not seen"


@pytest.mark.parametrize("siblings", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("num_tokens", [2, 4, 8])
def test_speculation_and_batch_mates_change_nothing(plain, num_tokens, siblings):
    """All options in one batch, beside requests that have none."""
    engine = make_engine(
        LM.target, scripted_half_right(plain, num_tokens, siblings), num_blocks=512, max_num_seqs=32
    )
    requests = complete(engine, PROMPTS, MIX)
    assert [request.output_token_ids for request in requests] == plain
    accepted = sum(request.stats.num_accepted for request in requests)
    assert 0.3 < accepted / sum(request.stats.num_steps for request in requests) < 2


@pytest.mark.parametrize(
    "speculative",
    [
        speculate("ngram", "best_first"),
        speculate("early_exit", "static"),
        speculate(
            "small_lm", drafter_args={"model": DRAFT.target}, tree_args={"num_tokens": 4, "sample": True}
        ),
    ],
    ids=lambda config: f"{config.drafter}-{config.tree}",
)
def test_other_drafters(plain, speculative):
    assert tokens_of(make_engine(LM.target, speculative, num_blocks=512), PROMPTS, MIX) == plain


@pytest.mark.parametrize("verifier", ["greedy", "token"])
def test_other_verifiers_at_temperature_0(plain, verifier):
    script = half_right(PROMPTS, plain, 4, vocab_size=VOCAB, siblings=True)
    half = len(MIX) // 2
    engine = make_engine(LM.target, scripted(script, verifier), num_blocks=512)
    assert tokens_of(engine, PROMPTS[:half], MIX[:half]) == plain[:half]


# The history


def assert_histories_equal_a_rebuild(engine: Engine) -> int:
    checked = 0
    for request in engine.scheduler.running:
        rebuilt = rebuilt_history(request)
        assert (request.history is None) == (not request.params.uses_history)
        if request.history is not None:
            assert torch.equal(request.history.counts, rebuilt.counts)
            assert torch.equal(request.history.in_prompt, rebuilt.in_prompt)
            assert request.history.num_output == rebuilt.num_output == request.num_output_tokens
            assert request.history.end_ids == rebuilt.end_ids
            checked += 1
    return checked


def rebuilt_history(request: Any) -> TokenHistory:
    return TokenHistory(
        request.prompt_token_ids,
        request.output_token_ids,
        vocab_size=VOCAB,
        device=LM.target.device,
        end_ids=request.stop_ids,
    )


def test_histories_equal_a_rebuild_after_every_step(plain):
    """On a pool that preempts."""
    config = scripted_half_right(plain, 4, siblings=True)
    engine = make_engine(LM.target, config, num_blocks=36, max_num_seqs=8)
    numbers = [engine.add_request(prompt, one) for prompt, one in zip(PROMPTS, MIX, strict=True)]
    assert all(engine.request(number).history is None for number in numbers), "a waiting request holds memory"
    checked: list[int] = []
    drain(engine, after_step=lambda _: checked.append(assert_histories_equal_a_rebuild(engine)))
    assert sum(checked) > 100
    requests = [engine.pop_finished(number) for number in numbers]
    assert sum(request.num_preemptions for request in requests) > 0
    assert [request.output_token_ids for request in requests] == plain
    assert all(request.history is None for request in requests), "a finished request holds memory"


# Laws

SMALL = {"vocab_size": 5, "num_hidden_layers": 2, "hidden_size": 32}
TARGET, OTHER = tiny_lm(scale=2.5, **SMALL), tiny_lm(seed=4, scale=2.5, **SMALL)
PENALTIES = {
    "repetition_penalty": 1.4,
    "presence_penalty": 0.8,
    "frequency_penalty": 0.9,
    "logit_bias": {2: 0.5},
}
PENALISED = SamplingParams(max_tokens=4, **PENALTIES)
SHORT = [1, 3, 1]


def penalised_law() -> dict[tuple[int, ...], float]:
    sampling, zero = SamplingBatch([PENALISED], torch.device("cpu")), torch.zeros(1, dtype=torch.int64)

    def conditional(path: tuple[int, ...]) -> Tensor:
        row = changed_row(TARGET.logits([*SHORT, *path])[-1], PENALISED, SHORT, path, ())
        return draw_law(row.unsqueeze(0), sampling, zero)[0]

    return decode_law(conditional, 3)


def p_value(verifier: str, tree: str, **tree_args: Any) -> float:
    config = speculate("small_lm", tree, verifier, drafter_args={"model": OTHER.target}, tree_args=tree_args)
    engine = make_engine(TARGET.target, config, num_blocks=4096, max_num_seqs=256)
    requests = complete(engine, [SHORT] * 3000, PENALISED)
    assert any(request.stats.num_accepted for request in requests)
    return chi_square_p_value(Counter(tuple(r.output_token_ids[:3]) for r in requests), penalised_law())


@pytest.mark.parametrize(
    ("tree", "arguments"), [("chain", {"num_tokens": 3, "sample": True}), ("best_first", {"num_nodes": 5})]
)
def test_the_joint_law_of_penalised_tokens(tree, arguments):
    assert p_value("token", tree, **arguments) > 1e-4


def test_a_history_without_the_path_is_seen(monkeypatch):
    """Negative control."""
    paths = TokenTree.path_tokens.func
    monkeypatch.setattr(TokenTree, "path_tokens", property(lambda tree: torch.full_like(paths(tree), -1)))
    assert p_value("token", "chain", num_tokens=3, sample=True) < 1e-6


# Refusals and failures


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": {101: 1.0}}, "logit_bias holds 101: the target's ids are 0 to 100"),
        ({"allowed_token_ids": (5, -1)}, "allowed_token_ids holds -1"),
        ({"banned_token_ids": (5, 300)}, "banned_token_ids holds 300"),
        ({"stop_token_ids": (101,)}, "stop_token_ids holds 101"),
        ({"logprobs": 102}, "logprobs=102: the target has 101 ids"),
        ({"banned_token_ids": tuple(range(101))}, "holds the whole vocabulary: leave at least one"),
        (
            {"allowed_token_ids": (17, 61), "min_tokens": 1},
            "min_tokens=1: every id .* ends the request; allow",
        ),
        ({"allowed_token_ids": (5, 17), "stop_token_ids": (5,), "min_tokens": 1}, "min_tokens=1: every id"),
    ],
    ids=str,
)
def test_refused(options, message):
    engine = make_engine(LM.target)
    with pytest.raises(ValueError, match=message):
        engine.add_request(PROMPT, SamplingParams(**options))
    assert not engine.has_work


def test_ids_that_end_the_request_may_be_all_that_is_allowed():
    params = SamplingParams(temperature=0, allowed_token_ids=(17,))
    (request,) = complete(make_engine(LM.target), [PROMPT], params)
    assert (request.output_token_ids, request.finish_reason) == ([17], FinishReason.STOP)
    free = replace(params, ignore_eos=True, min_tokens=5, max_tokens=5)
    assert tokens_of(make_engine(LM.target), [PROMPT], free) == [[17] * 5]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("speculative", [None, speculate("ngram", verifier="token")], ids=["plain", "ngram"])
def test_a_request_without_a_possible_token_fails_alone(speculative, temperature):
    params = SamplingParams(
        temperature=temperature, seed=1, max_tokens=12, ignore_eos=True, presence_penalty=0.5
    )
    stuck = replace(params, allowed_token_ids=(40, 41))
    alone = spoiled(make_engine(LM.target, speculative))
    expected = tokens_of(alone, [PROMPT], params)
    first, failed, last = complete(
        spoiled(make_engine(LM.target, speculative)), [PROMPT] * 3, [params, stuck, params]
    )
    assert [first.output_token_ids, last.output_token_ids] == expected * 2
    assert failed.finish_reason is FinishReason.ERROR
    assert "nothing can be drawn" in failed.error
    assert failed.output_token_ids == []


def spoiled(engine: Engine) -> Engine:
    """The target gives two ids no probability."""
    node_logits = engine.target.node_logits

    def without(batch: Any, **options: Any) -> Tensor:
        logits = node_logits(batch, **options)
        logits[:, 40:42] = float("-inf")
        return logits

    engine.target.node_logits = without
    return engine
