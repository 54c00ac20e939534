"""C21: tree slots are reserved before drafting and given back afterwards, whatever ends a request."""

from __future__ import annotations

import random

import pytest
from specdec_tests.models import tiny_lm
from specdec_tests.serving import complete, drain, make_engine, speculate

from specdec.core import SamplingParams

K = 5


@pytest.mark.parametrize("length", range(1, 10))
@pytest.mark.parametrize("drafter", ["ngram", "self", "early_exit"])
def test_pool_of_exactly_two_requests(length: int, drafter: str) -> None:
    lm, count = tiny_lm(), 20
    blocks = -(-(length + count - 1 + K) // 4)
    engine = make_engine(lm.target, speculate(drafter, tree_args={"num_tokens": K}), num_blocks=2 * blocks)
    prompts = [[(3 * i + shift) % 90 for i in range(length)] for shift in (1, 2, 3)]
    requests = complete(engine, prompts, SamplingParams(temperature=0, max_tokens=count))
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.output_token_ids == lm.greedy(prompt, count)
    assert engine.blocks.peak_used <= 2 * blocks


def test_rejected_tail_is_free_after_the_step() -> None:
    engine = make_engine(tiny_lm().target, speculate("ngram", tree_args={"num_tokens": K}))
    number = engine.add_request([1, 2, 1, 2, 1], SamplingParams(temperature=0, max_tokens=30))
    request = engine.request(number)
    while not request.is_finished:
        engine.step()
        if not request.is_finished:
            assert len(request.blocks) == -(-len(request.token_ids) // 4)


def test_two_hundred_requests_leave_the_pool_as_it_was() -> None:
    chance = random.Random(0)
    tokens = tiny_lm().greedy([1, 2, 3], 10)
    lm = tiny_lm(eos=(tokens[6],))
    engine = make_engine(lm.target, speculate("self", tree_args={"num_tokens": K}), num_blocks=24)
    waiting = [[chance.randrange(90) for _ in range(chance.randint(1, 9))] for _ in range(199)] + [[1, 2, 3]]
    running: set[int] = set()
    ends: set[str] = set()
    while waiting or engine.has_work:
        while waiting and len(running) < 4:
            params = SamplingParams(temperature=0, max_tokens=chance.randint(1, 12))
            running.add(engine.add_request(waiting.pop(), params))
        for output in engine.step():
            if output.finish_reason is not None:
                ends.add(output.finish_reason.value)
                running.discard(output.request_id)
        if running and chance.random() < 0.1:
            number = chance.choice(sorted(running))
            engine.abort(number)
            ends.add(engine.pop_finished(number).finish_reason.value)
            running.discard(number)
        engine.check_integrity()
    assert ends == {"stop", "length", "abort"}
    assert engine.blocks.num_free == engine.blocks.num_blocks
    drain(engine)
