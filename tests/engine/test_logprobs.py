"""Log probabilities: the target's own, one entry a kept token, whatever speculates beside whom."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from specdec_tests.models import tiny_lm
from specdec_tests.options import OPTIONS
from specdec_tests.scripts import half_right
from specdec_tests.serving import complete, drain, make_engine, scripted, speculate, tokens_of
from specdec_tests.tokenizers import ByteTokenizer

from specdec import LLM
from specdec.core import SamplingParams
from specdec.engine.engine import Engine
from specdec.engine.logprobs import TokenLogprobs, token_logprobs
from specdec.engine.request import Request

LM = tiny_lm(scale=2.0)
VOCAB = LM.target.vocab_size
PROMPTS = [[1, 2, 3, 1, 2], [4], [5, 6] * 4, [9, 8, 7], [3, 3]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=20, logprobs=3),
    SamplingParams(seed=1, max_tokens=20, logprobs=0),
    SamplingParams(seed=2, max_tokens=20),
    SamplingParams(seed=3, max_tokens=13, logprobs=101, **OPTIONS["all"]),
    SamplingParams(seed=4, max_tokens=20, temperature=0.5, top_k=4, logprobs=5),
]
SPECULATIONS = {
    "plain": None,
    "token-sampled": speculate(
        "small_lm",
        verifier="token",
        drafter_args={"model": tiny_lm(seed=1, scale=2.0).target},
        tree_args={"num_tokens": 4, "sample": True},
    ),
    "early_exit": speculate("early_exit", "best_first", "token"),
    "ngram": speculate("ngram", "best_first"),
}


def check_entries(entries: Sequence[TokenLogprobs], prompt: list[int], tokens: list[int], count: int) -> None:
    """Against one teacher-forced forward."""
    assert len(entries) == len(tokens)
    rows = LM.logits([*prompt, *tokens])[len(prompt) - 1 : -1].log_softmax(-1)
    for entry, token, row in zip(entries, tokens, rows, strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-5)
        # Tokens nearer than rounding may change places.
        assert int((row > row[token] + 1e-5).sum()) < entry.rank <= int((row > row[token] - 1e-5).sum()) + 1
        assert len(entry.top) == count
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True)
        torch.testing.assert_close(
            torch.tensor(values), row.sort(descending=True).values[:count], atol=1e-5, rtol=0
        )
        for other, value in entry.top:
            assert value == pytest.approx(float(row[other]), abs=1e-5)
        if entry.rank <= count:
            assert entry.top[entry.rank - 1][1] == entry.logprob


def check_requests(requests: Sequence[Request], params: Sequence[SamplingParams] = PARAMS) -> None:
    for prompt, own, request in zip(PROMPTS, params, requests, strict=True):
        if own.logprobs is None:
            assert request.logprobs is None
        else:
            check_entries(request.logprobs, prompt, request.output_token_ids, own.logprobs)


@pytest.mark.parametrize("name", SPECULATIONS)
def test_every_token_has_its_row_s(name):
    requests = complete(make_engine(LM.target, SPECULATIONS[name]), PROMPTS, PARAMS)
    check_requests(requests)
    if name != "plain":
        assert sum(request.stats.num_accepted for request in requests) > 5


@pytest.mark.parametrize("siblings", [False, True], ids=["chain", "tree"])
def test_accepted_corrected_and_bonus_tokens(siblings):
    plain = tokens_of(make_engine(LM.target), PROMPTS, PARAMS)
    script = half_right(PROMPTS, plain, 4, vocab_size=VOCAB, siblings=siblings)
    engine = make_engine(LM.target, scripted(script))
    numbers = [engine.add_request(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    outputs = drain(engine)
    requests = [engine.pop_finished(number) for number in numbers]
    assert [request.output_token_ids for request in requests] == plain
    check_requests(requests)
    origins = {origin.value for output in outputs for origin in output.origins}
    assert origins == {"prefill", "accepted", "correction", "bonus"}
    # A step hands over the entries of its own tokens.
    for number, request in zip(numbers, requests, strict=True):
        own = [output for output in outputs if output.request_id == number]
        if request.logprobs is None:
            assert {output.logprobs is None for output in own} == {True}
        else:
            assert [entry for output in own for entry in output.logprobs] == request.logprobs
            assert all(len(output.logprobs) == len(output.token_ids) for output in own)


@pytest.mark.parametrize("index", [1, 2, 3, 5])
def test_cut_with_the_tokens(index):
    oracle = LM.greedy(PROMPTS[0], 12)
    stop = oracle[index]
    index = oracle.index(stop)
    config = scripted(lambda _, committed: list(LM.greedy(committed, 6)))
    for params in (
        SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(stop,), logprobs=2),
        SamplingParams(temperature=0, max_tokens=index + 1, logprobs=2),
    ):
        (request,) = complete(make_engine(LM.target, config), PROMPTS[:1], params)
        assert request.output_token_ids == oracle[: index + 1]
        check_entries(request.logprobs, PROMPTS[0], request.output_token_ids, 2)


def test_preemption_repeats_nothing():
    params = [SamplingParams(seed=row, max_tokens=30, logprobs=1) for row in range(5)]
    engine = make_engine(LM.target, SPECULATIONS["ngram"], num_blocks=18)
    requests = complete(engine, PROMPTS, params)
    assert sum(request.num_preemptions for request in requests) > 0
    check_requests(requests, params)


def test_only_the_rows_of_those_who_ask(monkeypatch):
    seen: list[int] = []

    def counting(logits, tokens, counts):
        seen.append(len(logits))
        assert len(logits) == len(tokens) == len(counts)
        return token_logprobs(logits, tokens, counts)

    monkeypatch.setattr("specdec.engine.step.token_logprobs", counting)
    quiet = SamplingParams(temperature=0, max_tokens=9)
    engine = make_engine(LM.target, SPECULATIONS["early_exit"])
    complete(engine, PROMPTS, quiet)
    assert seen == []
    (asking, *_) = complete(engine, PROMPTS, [PARAMS[0], *[quiet] * 4])
    assert len(asking.logprobs) == 20 <= sum(seen) <= 20 + 8


def test_a_failed_request_keeps_what_it_had():
    engine: Engine = make_engine(LM.target)
    number = engine.add_request(PROMPTS[0], PARAMS[0])
    engine.step()
    node_logits = engine.target.node_logits
    engine.target.node_logits = lambda batch, **options: node_logits(batch, **options) * float("nan")
    (output,) = engine.step()
    assert (output.token_ids, output.logprobs) == ([], [])
    request = engine.pop_finished(number)
    assert len(request.logprobs) == len(request.output_token_ids) == 1


def test_the_llm_reports_them():
    lm = tiny_lm(vocab_size=257)
    llm = LLM(lm.target, tokenizer=ByteTokenizer())
    asking, quiet = llm.generate(
        ["ab"] * 2, [SamplingParams(seed=1, max_tokens=5, logprobs=2), SamplingParams()]
    )
    assert [entry.token_id for entry in asking.logprobs] == asking.token_ids
    assert asking.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in asking.logprobs))
    assert quiet.logprobs is quiet.cumulative_logprob is None
    steps = [output for _, output in llm.stream("ab", SamplingParams(seed=1, max_tokens=5, logprobs=2))]
    streamed = [entry for output in steps for entry in output.logprobs]
    # Alone, the forward is summed up in another order than in a batch of two.
    assert [entry.token_id for entry in streamed] == asking.token_ids
    assert [entry.logprob for entry in streamed] == pytest.approx(
        [entry.logprob for entry in asking.logprobs]
    )


# The function


def test_ties_go_to_the_lower_id_however_many_are_asked_for():
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0, -2.0], [5.0] * 6])
    for count in range(7):
        first, second = token_logprobs(logits, [4, 5], [count, count])
        assert [token for token, _ in first.top] == [1, 2, 4, 0, 3, 5][:count]
        assert [token for token, _ in second.top] == list(range(count))
        assert (first.rank, second.rank) == (1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_order_is_that_of_a_stable_sort(dtype):
    logits = (4 * torch.randn(5, 300, generator=torch.Generator().manual_seed(0))).to(dtype)
    logits[0, :9] = float("-inf")
    rows = logits.float().log_softmax(-1)
    entries = token_logprobs(logits, [0, 1, 2, 3, 4], [300, 0, 1, 7, 299])
    for row, (entry, count) in enumerate(zip(entries, [300, 0, 1, 7, 299], strict=True)):
        values, ids = rows[row].sort(descending=True, stable=True)
        assert list(entry.top) == list(zip(ids[:count].tolist(), values[:count].tolist(), strict=True))
        assert entry.rank == int((rows[row] > rows[row, row]).sum()) + 1
    assert entries[0].logprob == float("-inf")


def test_a_row_alone_has_the_same_bits():
    logits = 4 * torch.randn(6, 1000, generator=torch.Generator().manual_seed(1))
    together = token_logprobs(logits, list(range(6)), [3, 0, 900, 1, 5, 2])
    for row, count in enumerate([3, 0, 900, 1, 5, 2]):
        assert token_logprobs(logits[row : row + 1], [row], [count]) == [together[row]]
