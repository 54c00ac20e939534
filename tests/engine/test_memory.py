"""Pages: reserved for whole trees, given back whatever happens, and holding what a plain forward holds."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from specdec_tests.models import GREEDY, tiny_lm
from specdec_tests.scripts import mixed_tree, second_branch, truth
from specdec_tests.serving import cached_rows, complete, draft_runner, drain, make_engine, scripted, speculate

from specdec.core import SamplingParams
from specdec.engine.block_manager import BlockManager
from specdec.engine.engine import Engine
from specdec.engine.request import FinishReason

LM = tiny_lm()
DRAFT = tiny_lm(seed=1)
SPECULATIONS = {
    "plain": None,
    "tree": scripted(mixed_tree(LM, 10), max_nodes=10),
    "chain": speculate("self", tree_args={"num_tokens": 4}),
    "small_lm": speculate("small_lm", "best_first", "token", drafter_args={"model": DRAFT.target}),
    "early_exit": speculate("early_exit", "static"),
    "ngram": speculate("ngram"),
}


@pytest.fixture(params=SPECULATIONS)
def speculation(request) -> Any:
    return SPECULATIONS[request.param]


# The block manager


def test_blocks_are_handed_out_and_taken_back():
    blocks = BlockManager(num_blocks=5, block_size=4)
    assert [blocks.blocks_for(count) for count in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]
    first, second = blocks.allocate(2), blocks.allocate(3)
    assert sorted(first + second) == list(range(5))
    assert not blocks.can_allocate(1)
    blocks.check_integrity([first, second])
    blocks.free(first)
    assert blocks.num_free == 2
    assert blocks.peak_used == 5
    assert sorted(blocks.allocate(2)) == sorted(first)


def test_misuse_of_blocks_is_caught():
    blocks = BlockManager(num_blocks=3, block_size=4)
    taken = blocks.allocate(2)
    with pytest.raises(AssertionError, match="2 blocks asked, 1 free"):
        blocks.allocate(2)
    with pytest.raises(AssertionError, match="differ"):
        blocks.check_integrity([taken[:1]])
    with pytest.raises(AssertionError, match="differ"):
        blocks.check_integrity([taken, taken])
    blocks.free(taken)
    with pytest.raises(AssertionError, match="freed twice"):
        blocks.free(taken[:1])
    blocks.check_integrity([])


# What the pages hold


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_cache_equals_a_plain_forward_after_each_step(speculation, block_size):
    engine = make_engine(LM.target, speculation, block_size=block_size, num_blocks=512 // block_size)
    numbers = [engine.add_request(prompt, GREEDY) for prompt in ([1, 2, 3], [7], [5] * 17)]
    drafts = draft_runner(engine)
    while engine.has_work:
        engine.step()
        for request in (engine.request(number) for number in numbers):
            if request.is_finished:
                continue
            assert request.num_cached == len(request.token_ids) - 1
            assert_cached(engine, engine.target.kv, LM, request, request.num_cached)
            if drafts is not None:
                count = engine.speculation.drafter.model.num_cached(request.request_id)
                assert count <= request.num_cached
                lm = LM if drafts.model is LM.target else DRAFT
                assert_cached(engine, drafts.kv, lm, request, count)


def assert_cached(engine: Engine, kv: torch.Tensor, lm, request, count: int) -> None:
    if count:
        rows = cached_rows(kv, request.blocks, engine.config.block_size, count)
        plain = lm.keys_and_values(request.token_ids[:count])
        torch.testing.assert_close(rows, plain, atol=1e-4, rtol=1e-4)


def test_pages_beyond_the_committed_tokens_are_free_after_each_step(speculation):
    engine = make_engine(LM.target, speculation)
    numbers = [engine.add_request(prompt, GREEDY) for prompt in ([1, 2, 3], [7], [5] * 17)]

    def check(_: object) -> None:
        alive = [engine.request(number) for number in numbers if not engine.request(number).is_finished]
        for request in alive:
            least, most = (
                engine.blocks.blocks_for(count) for count in (request.num_cached, request.root_position + 1)
            )
            assert least <= len(request.blocks) <= most

    drain(engine, after_step=check)


# Preemption


def preempting(speculation: Any, **sizes: Any) -> Engine:
    nodes = make_engine(LM.target, speculation).max_nodes
    return make_engine(LM.target, speculation, num_blocks=-(-(9 + 40 + nodes) // 4) + 2, **sizes)


def test_preemption_changes_no_greedy_token(speculation):
    engine = preempting(speculation)
    prompts = [[row, 1, row, 2] for row in range(5)]
    requests = complete(engine, prompts, GREEDY)
    assert sum(request.num_preemptions for request in requests) > 0
    assert requests[0].num_preemptions == 0, "the oldest request is never preempted"
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.output_token_ids == LM.greedy(prompt, 40)


@pytest.mark.parametrize("length", [4, 8, 16])
@pytest.mark.parametrize("num_blocks", range(14, 20))
def test_nobody_is_admitted_only_to_be_preempted(num_blocks, length):
    """Admission counts the first tree: else the younger request is prefilled again and again."""
    config = speculate("ngram", tree_args={"num_tokens": 5}, drafter_args={"min_n": 6})
    engine = make_engine(LM.target, config, num_blocks=num_blocks)
    params = [SamplingParams(temperature=0, max_tokens=count) for count in (30, 20)]
    older, younger = complete(engine, [[3] * 24, [9] * length], params)
    assert older.num_preemptions == 0
    assert younger.num_preemptions <= 1


@pytest.mark.parametrize("name", ["plain", "small_lm", "ngram", "sampled", "sampled-token"])
def test_preemption_changes_no_sampled_token(name):
    sampled = {"num_tokens": 4, "sample": True}
    speculation = {
        **SPECULATIONS,
        "sampled": speculate("small_lm", drafter_args={"model": DRAFT.target}, tree_args=sampled),
        "sampled-token": speculate(
            "small_lm", verifier="token", drafter_args={"model": DRAFT.target}, tree_args=sampled
        ),
    }[name]
    prompts = [[row, 1, row, 2] for row in range(5)]
    params = [SamplingParams(temperature=1.5, top_p=0.95, max_tokens=40, seed=row) for row in range(5)]
    calm = complete(make_engine(LM.target, speculation), prompts, params)
    pressed = complete(preempting(speculation), prompts, params)
    assert sum(request.num_preemptions for request in pressed) > 0
    for one, other in zip(calm, pressed, strict=True):
        assert one.num_preemptions == 0
        assert one.output_token_ids == other.output_token_ids
        assert one.stats == other.stats


# Aborts


@pytest.mark.parametrize("seed", range(4))
def test_aborts_at_any_moment(speculation, seed):
    chooser = random.Random(seed)
    engine = make_engine(LM.target, speculation, num_blocks=40, max_num_seqs=3)
    prompts = [[row, 3, row] * chooser.randrange(1, 4) for row in range(8)]
    numbers = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    aborted: set[int] = set()

    def abort(_: object) -> None:
        if chooser.random() < 0.2:
            number = chooser.choice(numbers)
            if not engine.request(number).is_finished:
                engine.abort(number)
                aborted.add(number)

    abort(None)
    drain(engine, after_step=abort)
    for prompt, number in zip(prompts, numbers, strict=True):
        request = engine.pop_finished(number)
        expected = LM.greedy(prompt, 40)
        if number in aborted:
            assert request.finish_reason is FinishReason.ABORT
            assert request.output_token_ids == expected[: request.num_output_tokens]
        else:
            assert request.output_token_ids == expected
    model = getattr(engine.speculation and engine.speculation.drafter, "model", None)
    for state in ("_num_cached", "_indices"):
        assert not getattr(model, state, None), "the drafter remembers requests that are gone"


@pytest.mark.parametrize("moment", ["observer", "draft", "forward"])
def test_aborts_inside_a_step(monkeypatch, moment):
    """From an observer, or from another thread while the drafter or the target runs."""
    engine = make_engine(LM.target, scripted(second_branch(LM)), num_blocks=40)
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    numbers = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    steps = 0

    def abort_second() -> None:
        nonlocal steps
        steps += 1
        if steps == 4:
            engine.abort(numbers[1])

    if moment == "observer":
        engine.observers.append(lambda result, kept: abort_second())
    else:
        owner, name = {
            "draft": (engine.speculation.drafter, "propose"),
            "forward": (engine.target, "node_logits"),
        }[moment]
        original = getattr(owner, name)

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            abort_second()
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, interrupted)
    drain(engine)
    for prompt, number in zip(prompts, numbers, strict=True):
        request = engine.pop_finished(number)
        expected = LM.greedy(prompt, 40)
        if number == numbers[1]:
            assert request.finish_reason is FinishReason.ABORT
            assert request.output_token_ids == expected[: request.num_output_tokens]
        else:
            assert request.output_token_ids == expected


def test_unknown_and_finished_requests_can_be_aborted():
    engine = make_engine(LM.target)
    (number,) = [engine.add_request([1, 2], SamplingParams(temperature=0, max_tokens=3))]
    drain(engine)
    engine.abort(number)
    engine.abort(12345)
    assert engine.pop_finished(number).finish_reason is FinishReason.LENGTH


# Scheduling


def test_first_come_first_served():
    engine = make_engine(LM.target, speculate("ngram"), max_num_seqs=2)
    numbers = [engine.add_request([row, 3], SamplingParams(temperature=0, max_tokens=8)) for row in range(6)]
    first_seen: list[int] = []
    for output in drain(engine):
        if output.request_id not in first_seen:
            first_seen.append(output.request_id)
    assert first_seen == numbers


def test_no_more_run_together_than_allowed():
    engine = make_engine(LM.target, max_num_seqs=3, max_num_batched_tokens=20)
    for row in range(8):
        engine.add_request([row + 1] * 9, SamplingParams(temperature=0, max_tokens=4))
    sizes: list[int] = []
    packed: list[int] = []
    run = engine.target.node_logits

    def counting(batch: Any, **options: Any) -> torch.Tensor:
        packed.append(len(batch.tokens))
        return run(batch, **options)

    engine.target.node_logits = counting
    drain(engine, after_step=lambda outputs: sizes.append(len(outputs)))
    assert max(sizes) == 3
    assert max(packed) <= 20


def test_a_prompt_longer_than_the_token_budget_runs_alone():
    engine = make_engine(LM.target, max_num_batched_tokens=8)
    prompts = [[1, 2, 3], [4] * 30, [5, 6]]
    requests = complete(engine, prompts, SamplingParams(temperature=0, max_tokens=6))
    assert [request.output_token_ids for request in requests] == [LM.greedy(prompt, 6) for prompt in prompts]


def test_a_request_that_joins_later_is_served_at_once():
    engine = make_engine(LM.target, scripted(truth(LM, 3)))
    engine.add_request([1, 2, 3], GREEDY)
    engine.step()
    late = engine.add_request([4, 5], GREEDY)
    assert {output.request_id for output in engine.step()} == {0, late}
    drain(engine)
    assert engine.pop_finished(late).output_token_ids == LM.greedy([4, 5], 40)


def test_an_idle_engine_steps_to_nothing():
    engine = make_engine(LM.target)
    assert engine.step() == []
    assert not engine.has_work
