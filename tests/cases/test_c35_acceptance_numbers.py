"""C35: acceptance numbers, by hand."""

from __future__ import annotations

import pytest
from specdec_tests.models import tiny_lm
from specdec_tests.serving import complete, make_engine, scripted, speculate

from specdec.core import SamplingParams
from specdec.engine.metrics import SpeculationStats


def two_steps() -> SpeculationStats:
    """K = 3, match masks [1, 0, 1] and [1, 1, 1]."""
    stats = SpeculationStats()
    stats.record_step(num_drafted=3, tree_depth=3, num_accepted=1, num_emitted=2, at_leaf=False)
    stats.record_step(num_drafted=3, tree_depth=3, num_accepted=3, num_emitted=4, at_leaf=True)
    return stats


def test_two_steps() -> None:
    stats = two_steps()
    assert (stats.num_drafted, stats.num_accepted, stats.num_emitted) == (6, 4, 6)
    assert stats.acceptance_rate == pytest.approx(2 / 3)
    assert stats.acceptance_length == 3.0
    assert stats.survival() == [1.0, 0.5, 0.5]
    assert stats.conditional() == [1.0, 0.5, 1.0]


def test_eos_cuts_an_accepted_run() -> None:
    stats = SpeculationStats()
    stats.record_step(num_drafted=5, tree_depth=5, num_accepted=5, num_emitted=3, at_leaf=True)
    assert (stats.num_drafted, stats.num_accepted, stats.num_emitted) == (5, 3, 3)
    # The two drafts behind the EOS were neither accepted nor rejected.
    assert stats.conditional() == [1.0, 1.0, 1.0, None, None]


def test_a_step_without_drafts_counts_as_a_step_only() -> None:
    stats = two_steps()
    stats.record_step(num_drafted=0, tree_depth=0, num_accepted=0, num_emitted=1, at_leaf=True)
    assert (stats.num_steps, stats.num_drafted, stats.num_accepted) == (3, 6, 4)
    assert stats.acceptance_length == pytest.approx(7 / 3)
    assert stats.survival() == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    assert stats.conditional() == [1.0, 0.5, 1.0]


def test_nothing_is_not_zero() -> None:
    stats = SpeculationStats()
    assert stats.acceptance_rate is None
    assert stats.acceptance_length is None
    assert stats.survival() == []


def test_merge_adds_counts() -> None:
    merged = SpeculationStats.merge([two_steps(), two_steps()])
    assert (merged.num_steps, merged.num_emitted, merged.acceptance_length) == (4, 12, 3.0)
    assert SpeculationStats.merge([]).acceptance_length is None


@pytest.mark.parametrize("num_blocks", [128, 12], ids=["roomy", "preempting"])
@pytest.mark.parametrize("drafter", [None, "ngram", "self", "early_exit"])
def test_emitted_plus_prefill_is_the_completion(drafter: str | None, num_blocks: int) -> None:
    lm = tiny_lm()
    engine = make_engine(lm.target, speculate(drafter) if drafter else None, num_blocks=num_blocks)
    prompts = [[1, 2, 3], [4] * 9, [5]]
    requests = complete(engine, prompts, SamplingParams(temperature=0, max_tokens=22))
    if num_blocks == 12:
        assert sum(request.num_preemptions for request in requests) > 0
    for request in requests:
        stats = request.stats
        assert stats.num_prefill_tokens == 1
        assert stats.num_emitted + 1 == request.num_output_tokens == 22
        assert sum(stats.accepted_counts.values()) == stats.num_steps


def test_tree_nodes_are_drafted_tokens() -> None:
    engine = make_engine(tiny_lm().target, scripted(lambda number, committed: [(1, 0), (2, 0), (3, 1)]))
    (request,) = complete(engine, [[5]], SamplingParams(temperature=0, max_tokens=8))
    assert request.stats.num_drafted <= 3 * request.stats.num_steps
    assert request.stats.max_depth == 2


def test_acceptance_by_sibling_rank() -> None:
    stats = SpeculationStats()
    # The second of three children, then its only child; a leaf.
    stats.record_step(
        num_drafted=4,
        tree_depth=2,
        num_accepted=2,
        num_emitted=3,
        at_leaf=True,
        ranks=[1, 0],
        num_children=[3, 1, 0],
    )
    # None of two.
    stats.record_step(
        num_drafted=2, tree_depth=1, num_accepted=0, num_emitted=1, at_leaf=False, ranks=[], num_children=[2]
    )
    assert stats.by_rank() == [1 / 3, 1 / 2, 0.0]
    # The first of two, cut off behind it: what its children would have decided is unknown.
    stats.record_step(
        num_drafted=4,
        tree_depth=2,
        num_accepted=2,
        num_emitted=1,
        at_leaf=True,
        ranks=[0, 1],
        num_children=[2, 2, 0],
    )
    assert SpeculationStats.merge([stats, SpeculationStats()]).by_rank() == [2 / 4, 1 / 3, 0.0]
    assert SpeculationStats().by_rank() == []


def test_an_engine_counts_ranks() -> None:
    """The right token is always the second child."""
    lm = tiny_lm()
    prompt = [5, 3, 8]
    truth = lm.greedy(prompt, 12)

    def second(request_id: int, committed: list[int]) -> list[tuple[int, int]]:
        rest = truth[len(committed) - len(prompt) :][:2]
        entries: list[tuple[int, int]] = []
        for depth, token in enumerate(rest):
            parent = 2 * depth
            entries += [((token + 1) % 101, parent), (token, parent)]
        return entries

    (request,) = complete(
        make_engine(lm.target, scripted(second)), [prompt], SamplingParams(temperature=0, max_tokens=12)
    )
    assert request.output_token_ids == truth
    assert request.stats.by_rank() == [0.0, 1.0]
