"""Identical, tie, bug, different, failed: each can be reached."""

from dataclasses import replace

import pytest
import torch
from specdec_tests.models import tiny_lm
from specdec_tests.options import changed_row
from specdec_tests.serving import drain, make_engine, tokens_of

from specdec.core import SamplingParams
from specdec.data import TokenizedPrompt
from specdec.engine.request import FinishReason
from specdec.evaluation.equality import Verdict, compare, judge, next_logits, rounding
from specdec.evaluation.variant import RequestRecord

PROMPT = [5, 17, 60, 4]


def record(tokens, reason=FinishReason.LENGTH):
    prompt = TokenizedPrompt(id="p", token_ids=PROMPT, text="")
    return RequestRecord(prompt=prompt, token_ids=list(tokens), finish_reason=reason)


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


@pytest.fixture
def engine(lm):
    return make_engine(lm.target)


def test_identical(engine):
    assert compare(record([1, 2]), record([1, 2]), engine).verdict is Verdict.IDENTICAL


def test_an_unlikely_token_is_a_bug(lm, engine):
    right = lm.greedy(PROMPT, 4)
    worst = int(lm.logits([*PROMPT, *right[:2]])[-1].argmin())
    found = compare(record(right), record([*right[:2], worst, 0]), engine)
    assert (found.verdict, found.position) == (Verdict.BUG, 2)
    assert found.gap > found.tolerance


def test_two_equal_logits_are_a_tie():
    lm = tiny_lm(seed=3)
    right = lm.greedy(PROMPT, 2)
    twin = (right[1] + 1) % lm.target.vocab_size
    head = lm.target.lm_head.weight.data
    before = head[twin].clone()
    head[twin] = head[right[1]]
    try:
        found = compare(record(right), record([right[0], twin]), make_engine(lm.target))
    finally:
        head[twin] = before
    assert (found.verdict, found.position, found.gap) == (Verdict.TIE, 1, 0.0)


def test_differences_are_judged_after_bias_and_penalties(lm):
    """With the bias two tokens are equal; the target's own logits are far apart."""
    params = SamplingParams(temperature=0, max_tokens=3, presence_penalty=1.5, min_tokens=2)
    engine = make_engine(lm.target)
    (first, second, third) = tokens_of(engine, [PROMPT], params)[0]
    row = changed_row(lm.logits([*PROMPT, first, second])[-1], params, PROMPT, [first, second], ())
    other = int(row.argsort(descending=True)[1])
    tied = replace(params, logit_bias={other: float(row[third] - row[other])})
    records = record([first, second, third]), record([first, second, other])
    found = compare(*records, engine, tied)
    assert (found.verdict, found.position) == (Verdict.TIE, 2)
    assert compare(*records, engine, params).verdict is Verdict.BUG


def test_an_output_that_ends_early_is_a_bug(engine):
    found = compare(record([1, 2, 3]), record([1, 2]), engine)
    assert (found.verdict, found.position) == (Verdict.BUG, 2)


def test_without_a_judge_a_difference_is_only_a_difference():
    assert compare(record([1, 2]), record([1, 3]), None).verdict is Verdict.DIFFERENT


def test_failures_are_not_compared(engine):
    failed = record([], FinishReason.ERROR)
    assert compare(failed, failed, engine).verdict is Verdict.FAILED


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gap_counts_from_the_largest_logit(dtype):
    logits = torch.tensor([20.0, 19.875, 12.0], dtype=dtype)
    close = judge(logits, 0, 1, 0)
    assert close.gap == pytest.approx(0.125)
    assert close.verdict is (Verdict.TIE if dtype is torch.bfloat16 else Verdict.BUG)
    # Two tokens near each other, but both far from the best: no rounding explains that.
    assert judge(torch.tensor([20.0, 12.0, 12.0], dtype=dtype), 1, 2, 0).verdict is Verdict.BUG


def test_rounding_grows_with_the_magnitude():
    assert rounding(20.0, torch.bfloat16) == 4 * 0.125
    assert rounding(-20.0, torch.bfloat16) == 4 * 0.125
    assert rounding(0.75, torch.float16) == 4 * 2**-11
    assert rounding(20.0, torch.float32) == 1e-4


def test_next_logits_are_the_models_and_leave_no_trace(lm, engine):
    seen = []
    engine.observers.append(lambda result, kept: seen.append(kept))
    torch.testing.assert_close(next_logits(engine, PROMPT), lm.logits(PROMPT)[-1], atol=1e-5, rtol=1e-5)
    assert not seen
    assert len(engine.observers) == 1
    drain(engine)
