"""C19: an accepted path that is not contiguous in the tree ends up contiguous in the cache."""

from __future__ import annotations

import pytest
import torch
from specdec_tests.models import tiny_lm
from specdec_tests.serving import cached_rows, complete, make_engine, scripted, speculate

from specdec.core import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 6, 15, 16])
def test_second_branch_is_accepted(block_size: int, length: int) -> None:
    """Tree root -> {a, b}, b -> {c}, c -> {d}: nodes 2, 3, 4 are accepted while node 1 is wrong."""
    lm = tiny_lm()
    prompt = [(5 * i + 3) % 90 for i in range(length)]
    expected = lm.greedy(prompt, 24)

    def script(request_id: int, committed: list[int]) -> list[tuple[int, int]]:
        done = len(committed) - length
        b, c, d = [*expected[done : done + 3], 0, 0, 0][:3]
        return [((b + 1) % 90, 0), (b, 0), (c, 2), (d, 3)]

    engine = make_engine(lm.target, scripted(script), block_size=block_size)
    number = engine.add_request(prompt, GREEDY)
    request = engine.request(number)
    while not request.is_finished:
        engine.step()
        if request.is_finished:
            break
        count = request.num_cached
        held = cached_rows(engine.target.kv, request.blocks, block_size, count)
        torch.testing.assert_close(held, lm.keys_and_values(request.token_ids[:count]), atol=1e-5, rtol=1e-4)
    assert request.output_token_ids == expected
    assert request.stats.num_accepted >= 3 * (request.stats.num_steps - 2)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("tree", ["static", "best_first", "chain"])
def test_draft_cache_too(block_size: int, tree: str) -> None:
    lm, draft = tiny_lm(), tiny_lm(seed=1)
    config = speculate("small_lm", tree, drafter_args={"model": draft.target})
    engine = make_engine(lm.target, config, block_size=block_size)
    prompt = [1, 2, 3, 4, 5, 6, 7]
    number = engine.add_request(prompt, GREEDY)
    request = engine.request(number)
    model = engine.speculation.drafter.model
    model.runner.kv.fill_(float("nan"))
    while True:
        engine.step()
        if request.is_finished:
            break
        count = model.num_cached(number)
        assert count <= len(request.token_ids) - 1
        held = cached_rows(model.runner.kv, request.blocks, block_size, count)
        if count:
            plain = draft.keys_and_values(request.token_ids[:count])
            torch.testing.assert_close(held, plain, atol=1e-5, rtol=1e-4)
    assert request.output_token_ids == lm.greedy(prompt, 24)


def test_chain_shaped_tree_is_the_chain() -> None:
    lm = tiny_lm()
    chain, tree = ([7, 8, 9], [(7, 0), (8, 1), (9, 2)])
    first, second = (
        complete(make_engine(lm.target, scripted(lambda number, committed, s=s: s)), [[1, 2]], GREEDY)[0]
        for s in (chain, tree)
    )
    assert first.output_token_ids == second.output_token_ids
    assert first.stats == second.stats
