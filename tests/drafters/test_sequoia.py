"""Sequoia's shapes against its dynamic programme, the paper's oracle, and the choice of a size."""

from __future__ import annotations

import math
import random
import re
from functools import cache

import pytest
from specdec_tests.laws import node_paths
from specdec_tests.trees import CountingModel, batch_of

from specdec.drafters.trees.sequoia import SequoiaProposer, best_paths, cheapest_shape


def dynamic_programme(acceptance: tuple[float, ...], num_nodes: int, max_depth: int) -> float:
    """The most that a tree of so many nodes and levels, the root not counted, can be worth."""

    @cache
    def value(size: int, depth: int, branches: int) -> float:
        """Of trees with `size` nodes, root included, whose root has exactly so many children."""
        if branches == 0:
            return 1.0 if size == 1 else -math.inf
        if depth == 0:
            return -math.inf
        return max(
            (
                value(rest, depth, branches - 1) + acceptance[branches - 1] * best(size - rest, depth - 1)
                for rest in range(1, size)
            ),
            default=-math.inf,
        )

    @cache
    def best(size: int, depth: int) -> float:
        return max(value(size, depth, branches) for branches in range(len(acceptance) + 1))

    return best(num_nodes + 1, max_depth)


def worth(acceptance, num_nodes: int, max_depth: int) -> float:
    return 1 + math.fsum(value for _, value in best_paths(acceptance, num_nodes, max_depth))


@pytest.mark.parametrize(
    ("acceptance", "max_depth", "expected"),
    [
        ((0.6, 0.2, 0.1), 99, {1: 1, 2: 1.6, 4: 2.176, 8: 2.7456, 16: 3.306}),
        ((0.6, 0.2, 0.1), 2, {4: 2.16, 8: 2.56}),
        ((0.8, 0.1, 0.05), 99, {1: 1, 2: 1.8, 4: 2.952, 8: 4.1611, 16: 4.9851}),
    ],
)
def test_known_values(acceptance, max_depth, expected):
    """Sizes count the root."""
    for size, value in expected.items():
        assert worth(acceptance, size - 1, max_depth) == pytest.approx(value, abs=1e-4)


@pytest.mark.parametrize("seed", range(12))
def test_the_heap_is_the_dynamic_programme(seed):
    chooser = random.Random(seed)
    shares = sorted((chooser.random() for _ in range(chooser.randrange(1, 5))), reverse=True)
    total = sum(shares) / chooser.random()
    acceptance = tuple(share / max(1, total) for share in shares)
    for max_depth in (1, 2, 3, 5):
        for num_nodes in (1, 2, 5, 9, 14):
            paths = best_paths(acceptance, num_nodes, max_depth)
            if len(paths) == num_nodes:
                oracle = dynamic_programme(acceptance, num_nodes, max_depth)
                assert worth(acceptance, num_nodes, max_depth) == pytest.approx(oracle, abs=1e-12)
            else:
                # As many as there are.
                assert len(paths) == sum(len(acceptance) ** depth for depth in range(1, max_depth + 1))


def test_the_heap_is_not_the_dynamic_programme_where_the_vector_rises():
    """Which is why such a vector is refused."""
    rising = (0.4, 0.1, 0.45)
    assert worth(rising, 3, 2) == pytest.approx(1.66)
    assert dynamic_programme(rising, 3, 2) == pytest.approx(1.95)


def test_paths_come_best_first_and_closed():
    paths = best_paths((0.5, 0.3, 0.0), 40, 4)
    assert [value for _, value in paths] == sorted((value for _, value in paths), reverse=True)
    seen = {()}
    for path, value in paths:
        assert value == pytest.approx(math.prod((0.5, 0.3)[rank] for rank in path))
        assert path[:-1] in seen
        assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in seen
        seen.add(path)
    assert len(paths) == 2 + 4 + 8 + 16, "rank 2 is never accepted"


@pytest.mark.parametrize("budget", [1, 3, 6, 9])
def test_a_smaller_budget_gets_the_best_shape_of_its_size(budget):
    proposer = SequoiaProposer([0.5, 0.3, 0.1], num_nodes=9, max_depth=3)
    tree = proposer.propose(CountingModel(1), batch_of(1, [2]), [budget])
    ranks: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
    counts: dict[tuple[int, ...], int] = {}
    for path in node_paths(tree)[0][1:]:
        rank = counts.setdefault(path[:-1], 0)
        counts[path[:-1]] += 1
        ranks[path] = (*ranks[path[:-1]], rank)
    expected = [path for path in proposer.paths if len(path) <= 2][:budget]
    assert set(ranks.values()) == {(), *expected}


# Size


def brute_force(acceptance, max_depth, draft_time, verify_time):
    """The cheapest (depth, nodes) by trying all."""
    costs = {
        (depth, size): (depth * draft_time + verify_time(size)) / dynamic_programme(acceptance, size, depth)
        for depth in range(1, max_depth + 1)
        for size in range(1, 13)
        if dynamic_programme(acceptance, size, depth) > 0
    }
    return min(costs.values())


@pytest.mark.parametrize("draft_time", [0.0, 0.5, 2.0, 6.0])
@pytest.mark.parametrize("acceptance", [(0.6, 0.2, 0.1), (0.8, 0.1, 0.05), (0.3, 0.2, 0.2, 0.1)])
def test_the_size_makes_a_token_cheapest(acceptance, draft_time):
    times = {0: 20.0, 1: 21.0, 4: 24.0, 12: 40.0}

    def verify_time(size: int) -> float:
        if size <= 1:
            return 20.0 + size
        return 21 + (size - 1) if size <= 4 else 24 + 2 * (size - 4)

    paths = cheapest_shape(acceptance, 5, draft_time, times)
    depth = max(map(len, paths))
    value = 1 + math.fsum(math.prod(acceptance[rank] for rank in path) for path in paths)
    cost = (depth * draft_time + verify_time(len(paths))) / value
    assert cost == pytest.approx(brute_force(acceptance, 5, draft_time, verify_time))
    proposer = SequoiaProposer(acceptance, None, 5, draft_time, times)
    assert proposer.paths == paths
    assert proposer.max_nodes == len(paths)


def test_drafts_that_cost_too_much_are_refused():
    with pytest.raises(ValueError, match="no tree decodes faster than plain steps"):
        SequoiaProposer([0.3], None, draft_time=10.0, verify_times={0: 20, 8: 25})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"acceptance": []}, "acceptance=[]: expected acceptance to list probabilities"),
        ({"acceptance": 0.5}, "acceptance=0.5: expected"),
        ({"acceptance": [0.0, 0.0]}, "expected acceptance to list probabilities"),
        ({"acceptance": [0.5, -0.1]}, "expected acceptance to list probabilities"),
        ({"acceptance": [0.7, 0.6]}, "expected acceptance to sum to at most 1"),
        ({"acceptance": [0.3, 0.1, 0.2]}, "acceptance[2]=0.2 exceeds acceptance[1]=0.1"),
        ({"num_nodes": 0}, "num_nodes=0"),
        ({"max_depth": 0}, "max_depth=0"),
        ({"draft_time": 1.0}, "times choose the size; leave them out or set num_nodes=null"),
        ({"num_nodes": None}, "the size follows from draft_time and verify_times; give both"),
        (
            {"num_nodes": None, "draft_time": 1, "verify_times": {1: 2.0}},
            "to hold 0, the time of a plain step",
        ),
        ({"num_nodes": None, "draft_time": 1, "verify_times": {0: 2.0}}, "to hold a size above 0"),
        ({"num_nodes": None, "draft_time": 1, "verify_times": {0: 2, 4: 0}}, "to times above 0"),
        ({"num_nodes": None, "draft_time": -1, "verify_times": {0: 2, 4: 3}}, "draft_time=-1"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        SequoiaProposer(**arguments)
