"""C20: self-draft is accepted to the last token, through full acceptance and after spoiled steps."""

from __future__ import annotations

import pytest
from specdec_tests.models import tiny_lm
from specdec_tests.serving import complete, drain, make_engine, speculate

from specdec.core import SamplingParams

PROMPTS = [[1, 2, 3], [9] * 17, [5], [8, 7, 6, 5, 4, 3, 2, 1]]
GREEDY = SamplingParams(temperature=0, max_tokens=60)


def self_drafts() -> dict[str, dict]:
    return {
        "self": {},
        "early_exit": {"num_layers": 3},
        "small_lm": {"model": tiny_lm().target},
    }


@pytest.mark.parametrize("drafter", ["self", "early_exit", "small_lm"])
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 7])
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_everything_is_accepted(drafter: str, num_tokens: int, batch: int) -> None:
    config = speculate(drafter, drafter_args=self_drafts()[drafter], tree_args={"num_tokens": num_tokens})
    engine = make_engine(tiny_lm().target, config)
    for request in complete(engine, PROMPTS[:batch], GREEDY):
        assert request.stats.acceptance_rate == 1.0
        # Every step but the last, which the budget may cut short, gains K + 1 tokens.
        assert request.stats.num_steps == -(-59 // (num_tokens + 1))


@pytest.mark.parametrize("every", [2, 3])
def test_recovers_after_spoiled_steps(every: int) -> None:
    lm = tiny_lm()
    engine = make_engine(lm.target, speculate("self", tree_args={"num_tokens": 4}))
    drafter = engine.speculation.drafter
    steps: list[tuple[bool, int, int]] = []
    propose = drafter.propose

    def spoiling(batch, budget):
        tree = propose(batch, budget)
        spoiled = len(steps) % every == every - 1
        if spoiled and len(tree.tokens) > 2:
            # The second drafted token is wrong; what was cached for it and behind it must go.
            tree.tokens[2] = (tree.tokens[2] + 1) % lm.target.vocab_size
        return tree

    drafter.propose = spoiling
    engine.observers.append(
        lambda result, kept: (
            steps.append((len(steps) % every == every - 1, len(result.paths[0]), result.tree.num_drafted[0]))
            if result.requests[0].num_output_tokens > 1
            else None
        )
    )
    engine.add_request(PROMPTS[0], GREEDY)
    drain(engine)
    assert len(steps) > 8
    for spoiled, accepted, drafted in steps[:-1]:
        assert accepted == (1 if spoiled else drafted)


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 7])
def test_cache_length_is_documented(num_tokens: int) -> None:
    """After `extend` the draft cache holds all committed tokens; after a step it may lack the last accepted."""
    engine = make_engine(tiny_lm().target, speculate("self", tree_args={"num_tokens": num_tokens}))
    number = engine.add_request(PROMPTS[0], GREEDY)
    request, model = engine.request(number), engine.speculation.drafter.model
    extend = model.extend

    def checked(batch):
        extend(batch)
        assert model.num_cached(number) == len(request.token_ids)

    model.extend = checked
    engine.step()
    while True:
        engine.step()
        if request.is_finished:
            break
        # Full acceptance: the last accepted node was a leaf and never expanded.
        assert model.num_cached(number) == len(request.token_ids) - 2
