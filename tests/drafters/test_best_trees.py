"""Deterministic trees that search: each is the best tree by its own measure, against brute force."""

from __future__ import annotations

import math

import pytest
import torch
from specdec_tests.laws import node_paths
from specdec_tests.trees import TABLES, VOCAB, CountingModel, batch_of, best_paths

from specdec.drafters.base import DraftOutput
from specdec.drafters.trees.best_first import BestFirstProposer
from specdec.drafters.trees.ddtree import DDTreeProposer
from specdec.drafters.trees.eagle2 import Eagle2Proposer
from specdec.drafters.trees.opt_tree import OptTreeProposer

Paths = set[tuple[int, ...]]


def drafted(proposer, model: CountingModel, budget: int | None = None, max_depth: int = 9) -> Paths:
    """The paths of a tree; the same for two requests of a batch."""
    nodes = proposer.max_nodes if budget is None else budget
    tree = proposer.propose(model, batch_of(2, [max_depth] * 2), [nodes] * 2)
    first, second = (set(paths) - {()} for paths in node_paths(tree))
    assert first == second
    return first


# Best first


@pytest.mark.parametrize(
    ("num_nodes", "max_depth", "branching"), [(4, 4, 2), (10, 3, 6), (20, 4, 3), (6, 1, 6)]
)
@pytest.mark.parametrize("seed", range(6))
def test_best_first_is_the_best_tree_under_q(seed, num_nodes, max_depth, branching):
    model = CountingModel(seed)
    tree = drafted(BestFirstProposer(num_nodes, max_depth, branching), model)
    assert tree == set(best_paths(model.log_q, max_depth, branching)[:num_nodes])


@pytest.mark.parametrize("budget", [1, 3, 7])
def test_best_first_keeps_the_best_of_what_it_has_expanded(budget):
    """Expansions are bounded by the budget, so a small one may miss a deep node."""
    model = CountingModel(12)
    tree = BestFirstProposer(12, 4, 3).propose(model, batch_of(1), [budget])
    assert len(model.expanded) <= 1 + budget
    known = [
        (*path, int(token)) for _, path in model.expanded for token in model.conditional(path).topk(3).indices
    ]
    assert set(node_paths(tree)[0]) == {(), *sorted(known, key=lambda path: -model.log_q(path))[:budget]}


# OPT-Tree


def expected_acceptance(model: CountingModel, paths: list[tuple[int, ...]]) -> float:
    return math.fsum(math.exp(model.log_q(path)) for path in paths)


@pytest.mark.parametrize("table", ["peaked", "flat", "sparse"])
@pytest.mark.parametrize(("num_nodes", "max_depth"), [(1, 3), (5, 4), (12, 4), (30, 3)])
def test_opt_tree_without_a_price_is_the_best_tree(table, num_nodes, max_depth):
    model = CountingModel(TABLES[table])
    possible = [path for path in best_paths(model.log_q, max_depth, VOCAB) if model.log_q(path) > -math.inf]
    assert drafted(OptTreeProposer(num_nodes, max_depth, delta=0), model) == set(possible[:num_nodes])


@pytest.mark.parametrize("delta", [0.02, 0.1, 0.3, 0.6])
@pytest.mark.parametrize("seed", range(4))
def test_opt_tree_stops_where_a_level_adds_too_little(seed, delta):
    model = CountingModel(seed)
    levels, before = 0, 0.0
    while levels < 4:
        levels += 1
        value = expected_acceptance(model, best_paths(model.log_q, levels, VOCAB)[:8])
        if value - before <= delta:
            break
        before = value
    best = best_paths(model.log_q, levels, VOCAB)[:8]
    assert drafted(OptTreeProposer(num_nodes=8, max_depth=4, delta=delta), model) == set(best)
    assert max(len(path) for _, path in model.expanded) == levels - 1


def test_opt_tree_never_holds_more_slots_than_nodes():
    """It expands more nodes than the budget: those that dropped out have made room for others."""
    model = CountingModel(TABLES["peaked"])
    tree = OptTreeProposer(num_nodes=6, max_depth=4, delta=0).propose(model, batch_of(1), [6])
    assert len(model.expanded) > 7
    assert int(tree.draft_slots.max()) <= 6


# EAGLE-2


def rerank(model: CountingModel, num_nodes: int, depth: int, top_k: int) -> list[tuple[int, ...]]:
    """The paper's two phases, one path at a time: a beam, then the best of all that it looked at."""
    beam: list[tuple[int, ...]] = [()]
    seen: list[tuple[int, ...]] = []
    for _ in range(depth):
        level = []
        for path in beam:
            tokens = model.conditional(path).topk(min(top_k, VOCAB)).indices.tolist()
            level += [(*path, token) for token in tokens]
        seen += level
        beam = sorted(level, key=lambda path: -model.log_q(path))[:top_k]
    return sorted(seen, key=lambda path: -model.log_q(path))[:num_nodes]


@pytest.mark.parametrize(("num_nodes", "depth", "top_k"), [(1, 3, 3), (7, 3, 2), (12, 4, 3), (40, 3, 5)])
@pytest.mark.parametrize("seed", range(6))
def test_eagle2_is_a_beam_and_a_rerank(seed, num_nodes, depth, top_k):
    model = CountingModel(seed)
    tree = drafted(Eagle2Proposer(num_nodes, depth, top_k), model)
    assert tree == set(rerank(model, num_nodes, depth, top_k))


@pytest.mark.parametrize("budget", [1, 4, 11])
def test_eagle2_reranks_to_the_budget(budget):
    model = CountingModel(2)
    tree = drafted(Eagle2Proposer(num_nodes=20, depth=4, top_k=3), model, budget)
    assert tree == set(rerank(model, budget, 4, 3))


# DDTree


@pytest.mark.parametrize("table", ["peaked", "flat", "sparse"])
@pytest.mark.parametrize(("num_nodes", "max_depth"), [(1, 3), (5, 4), (12, 4), (30, 3), (300, 2)])
def test_ddtree_is_the_best_tree_under_the_marginals(table, num_nodes, max_depth):
    model = CountingModel(TABLES[table])

    def score(path: tuple[int, ...]) -> float:
        return model.log_q(path, DraftOutput.MARGINALS)

    possible = [path for path in best_paths(score, max_depth, VOCAB) if score(path) > -math.inf]
    assert drafted(DDTreeProposer(num_nodes, max_depth), model) == set(possible[:num_nodes])
    assert not model.expanded


def test_ddtree_settles_ties_by_depth_and_order():
    model = CountingModel(lambda path: torch.tensor([0.5, 0.5, 0, 0, 0, 0]))
    tree = DDTreeProposer(num_nodes=5, max_depth=9).propose(model, batch_of(1), [5])
    assert tree.parents.tolist() == [-1, 0, 0, 1, 1, 2]


# All of them


@pytest.mark.parametrize(
    "proposer",
    [
        BestFirstProposer(8, 4, 3),
        OptTreeProposer(8, 4, delta=0),
        Eagle2Proposer(8, 4, 3),
        DDTreeProposer(8, 4),
    ],
    ids=lambda proposer: type(proposer).__name__,
)
def test_a_certain_drafter_gets_a_chain(proposer):
    """All scores along its path are equal; the tree must stay connected."""
    tree = drafted(proposer, CountingModel(TABLES["certain"]))
    longest = max(tree, key=len)
    assert tree == {longest[:end] for end in range(1, len(longest) + 1)}
    assert len(longest) == 4


@pytest.mark.parametrize("cls", [BestFirstProposer, OptTreeProposer, Eagle2Proposer, DDTreeProposer])
def test_sizes_of_zero_are_refused(cls):
    for name in set(cls.__init__.__annotations__) - {"delta", "return"}:
        with pytest.raises(ValueError, match=f"{name}=0: expected {name} >= 1"):
            cls(**{name: 0})


@pytest.mark.parametrize("delta", [-0.1, math.nan, "low", True])
def test_opt_tree_refuses_a_price_that_is_none(delta):
    with pytest.raises(ValueError, match=f"delta={delta!r}: expected delta >= 0"):
        OptTreeProposer(delta=delta)
