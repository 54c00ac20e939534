"""Tree proposers on draft models given as tables: topology, budgets, and honest q."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from specdec_tests.laws import TableModel, draft_batch, node_paths, random_table
from specdec_tests.statistics import chi_square_p_value

from specdec.core import CounterRng, ProposalLaw, SamplingParams, TokenTree
from specdec.drafters.base import DraftModel, TreeProposer
from specdec.drafters.trees.best_first import BestFirstProposer
from specdec.drafters.trees.builder import Frontier, TreeBuilder
from specdec.drafters.trees.chain import ChainProposer
from specdec.drafters.trees.static import DEFAULT_PATHS, StaticProposer

VOCAB = 6
PROPOSERS = {
    "chain": ChainProposer(5),
    "sampled": ChainProposer(5, sample=True),
    "static": StaticProposer(),
    "best-first": BestFirstProposer(num_nodes=10, max_depth=4, branching=3),
}


class CountingModel(TableModel):
    """Notes the path of every node it expands."""

    def __init__(self, seed: int) -> None:
        super().__init__(random_table(seed, VOCAB, sharpness=2.0))
        self.expanded: list[tuple[int, tuple[int, ...]]] = []

    def expand(self, frontier: Frontier) -> torch.Tensor:
        assert frontier.rows == sorted(frontier.rows), "nodes of one request are adjacent"
        self.expanded += [
            (row, tuple(path)) for row, path in zip(frontier.rows, frontier.paths(), strict=True)
        ]
        return super().expand(frontier)


class Speechless(DraftModel):
    """Knows no continuation of some paths."""

    def __init__(self, model: DraftModel, longest: int) -> None:
        self.model = model
        self.longest = longest

    def expand(self, frontier: Frontier) -> torch.Tensor:
        return self.model.expand(frontier)

    def top_k(self, frontier: Frontier, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, log_q = self.model.top_k(frontier, k)
        knows = torch.tensor([len(path) < self.longest for path in frontier.paths()])
        return tokens, log_q.masked_fill(~knows.unsqueeze(1), float("-inf"))


def batch_of(count: int, max_depths: Sequence[int] | None = None, params: SamplingParams | None = None):
    rng = CounterRng(torch.arange(count))
    batch = draft_batch([params or SamplingParams()] * count, rng)
    return replace(batch, max_depths=list(max_depths)) if max_depths else batch


def log_q(model: TableModel, path: tuple[int, ...]) -> float:
    """Log probability of a path under a table."""
    return sum(float(model.conditional(path[:i])[path[i]].log()) for i in range(len(path)))


@pytest.mark.parametrize("name", PROPOSERS)
def test_trees_are_sound_within_budget_and_depth(name):
    proposer: TreeProposer = PROPOSERS[name]
    for seed in range(25):
        chooser = random.Random(seed)
        count = chooser.randrange(1, 5)
        budgets = [chooser.randrange(proposer.max_nodes + 3) for _ in range(count)]
        budgets[0] = max(budgets[0], 1)
        depths = [chooser.randrange(1, 6) for _ in range(count)]
        model = CountingModel(seed)
        tree = proposer.propose(model, batch_of(count, depths), budgets)
        tree.validate()
        for row, paths in enumerate(node_paths(tree)):
            assert tree.num_drafted[row] <= min(budgets[row], proposer.max_nodes)
            assert tree.host_depths[row] <= depths[row]
            assert tree.num_drafted[row] > 0 or budgets[row] == 0
            assert len(set(paths)) == len(paths), "siblings repeat"
            start = tree.host_offsets[row]
            for node, path in enumerate(paths):
                assert float(tree.score[start + node]) == pytest.approx(log_q(model, path), abs=1e-4)
                slot = int(tree.draft_slots[start + node])
                assert (slot >= 0) == ((row, path) in model.expanded)
            slots = tree.draft_slots[start : start + len(paths)]
            assert len(set(slots[slots >= 0].tolist())) == int((slots >= 0).sum()), "two nodes share a slot"
            assert int(slots.max()) <= budgets[row], "a slot lies outside the reserved pages"
        assert len(set(model.expanded)) == len(model.expanded), "a node was expanded twice"
        assert tree.laws == [proposer.law] * count


@pytest.mark.parametrize("name", PROPOSERS)
def test_requests_do_not_affect_each_other(name):
    proposer = PROPOSERS[name]
    batch, budgets = batch_of(4, [5, 2, 1, 4]), [3, 0, 10, 2]
    together = proposer.propose(CountingModel(3), batch, budgets)
    for row in range(4):
        own = replace(
            batch_of(1, [batch.max_depths[row]]), rng=CounterRng(torch.tensor([row])), request_ids=[row]
        )
        alone = proposer.propose(CountingModel(3), own, [budgets[row]])
        start, end = together.host_offsets[row], together.host_offsets[row + 1]
        assert together.tokens[start:end].tolist() == alone.tokens.tolist()
        assert together.parents[start:end].tolist() == alone.parents.tolist()


@pytest.mark.parametrize("name", ["chain", "static", "best-first"])
@pytest.mark.parametrize("longest", [0, 1, 2])
def test_nothing_is_drafted_where_the_model_knows_nothing(name, longest):
    tree = PROPOSERS[name].propose(Speechless(CountingModel(4), longest), batch_of(2), [9, 9])
    tree.validate()
    assert tree.max_depth == longest


@pytest.mark.parametrize("name", ["static", "best-first"])
def test_more_branches_than_the_vocabulary_has_tokens(name):
    proposer = {"static": StaticProposer([(0,), (9,)]), "best-first": BestFirstProposer(branching=9)}[name]
    tree = proposer.propose(CountingModel(5), batch_of(1), [9])
    tree.validate()
    assert int(tree.tokens.max()) < VOCAB


# Chain


def test_argmax_chain_follows_the_likeliest_token():
    model = CountingModel(6)
    tree = ChainProposer(4).propose(model, batch_of(1), [4])
    path: tuple[int, ...] = ()
    for token in tree.tokens.tolist()[1:]:
        assert token == int(model.conditional(path).argmax())
        path += (token,)
    assert tree.laws == [ProposalLaw.DETERMINISTIC]
    assert tree.q is None


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.5, top_k=3), SamplingParams(top_p=0.6)], ids=str
)
def test_sampled_chains_report_the_q_they_draw_from(params):
    """The draws follow the recorded q: a chi-square per node, and no token of q = 0."""
    count = 3000
    model = TableModel(random_table(7, VOCAB))
    tree = ChainProposer(2, sample=True).propose(model, batch_of(count, params=params), [2] * count)
    tree.validate()
    tokens = tree.tokens.view(count, 3)
    rows = tree.q[tree.q_row.view(count, 3)[:, :2]]  # [n, 2, V]
    assert torch.equal(tree.q_row.view(count, 3)[:, 2], torch.full((count,), -1))
    torch.testing.assert_close(rows.sum(-1), torch.ones(count, 2))
    by_prefix: dict[tuple[int, ...], list[int]] = {(): tokens[:, 1].tolist()}
    for first, second in tokens[:, 1:].tolist():
        by_prefix.setdefault((first,), []).append(second)
    for prefix, drawn in by_prefix.items():
        line = 0 if not prefix else next(i for i in range(count) if int(tokens[i, 1]) == prefix[0])
        q = dict(enumerate(rows[line, len(prefix)].tolist()))
        assert chi_square_p_value(Counter(drawn), q) > 1e-5, prefix


def test_chain_refuses_no_tokens():
    with pytest.raises(ValueError, match="num_tokens=0: a chain needs at least 1; for plain decoding"):
        ChainProposer(0)


# Static


def test_static_tree_has_the_ranks_it_was_given():
    model = CountingModel(8)
    paths = [(0,), (2,), (0, 1), (2, 0), (0, 1, 0)]
    tree = StaticProposer(paths).propose(model, batch_of(1), [9])
    drafted = set()
    for path in paths:
        tokens: tuple[int, ...] = ()
        for rank in path:
            tokens += (int(model.conditional(tokens).argsort(descending=True)[rank]),)
        drafted.add(tokens)
    assert set(node_paths(tree)[0]) == {(), *drafted}


@pytest.mark.parametrize("budget", range(1, len(DEFAULT_PATHS) + 1))
def test_smaller_budgets_take_a_closed_part(budget):
    tree = StaticProposer().propose(CountingModel(9), batch_of(1), [budget])
    tree.validate()
    assert tree.num_drafted == [budget]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "expected at least one path"),
        ([()], "none of them empty"),
        ([(0,), (-1,)], "[-1] holds a negative sibling rank"),
        ([(0,), (1, 0)], "[1, 0] has no parent; add [1]"),
        ([(0, 0, 0), (0,)], "[0, 0, 0] has no parent; add [0, 0]"),
    ],
)
def test_static_refuses_what_is_no_tree(paths, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        StaticProposer(paths)


# Best first


def brute_force(model: TableModel, num_nodes: int, max_depth: int, branching: int) -> set[tuple[int, ...]]:
    """The best nodes among all paths of top-`branching` children."""
    level: list[tuple[int, ...]] = [()]
    scores: dict[tuple[int, ...], float] = {}
    for _ in range(max_depth):
        level = [
            (*path, int(token)) for path in level for token in model.conditional(path).topk(branching).indices
        ]
        scores.update((path, log_q(model, path)) for path in level)
    return set(sorted(scores, key=lambda path: -scores[path])[:num_nodes])


@pytest.mark.parametrize(
    ("num_nodes", "max_depth", "branching"), [(4, 4, 2), (10, 3, 6), (20, 4, 3), (6, 1, 6)]
)
@pytest.mark.parametrize("seed", range(6))
def test_best_first_is_the_best_tree_under_q(seed, num_nodes, max_depth, branching):
    model = CountingModel(seed)
    tree = BestFirstProposer(num_nodes, max_depth, branching).propose(model, batch_of(2), [num_nodes] * 2)
    best = brute_force(model, num_nodes, max_depth, branching)
    for paths in node_paths(tree):
        assert set(paths) == {(), *best}


@pytest.mark.parametrize("budget", [1, 3, 7])
def test_best_first_keeps_the_best_of_what_it_has_expanded(budget):
    """Expansions are bounded by the slots of the budget, so a small budget may miss a deep node."""
    model = CountingModel(12)
    tree = BestFirstProposer(12, 4, 3).propose(model, batch_of(1), [budget])
    assert len(model.expanded) <= 1 + budget
    known = [
        (*path, int(token)) for _, path in model.expanded for token in model.conditional(path).topk(3).indices
    ]
    best = sorted(known, key=lambda path: -log_q(model, path))[:budget]
    assert set(node_paths(tree)[0]) == {(), *best}


@pytest.mark.parametrize("name", ["num_nodes", "max_depth", "branching"])
def test_best_first_refuses_zero(name):
    with pytest.raises(ValueError, match=f"{name}=0: expected {name} >= 1"):
        BestFirstProposer(**{name: 0})


# Builder


def test_builder_claims_slots_and_keeps_paths():
    builder = TreeBuilder(batch_of(2), capacity=4)
    roots = builder.frontier([0, 1], [0, 0])
    assert roots.only_roots
    assert (roots.slots, roots.depths, roots.ancestor_slots) == ([0, 0], [0, 0], [1, 1])
    nodes = builder.add([0, 0, 1], [0, 0, 0], torch.tensor([3, 4, 5]), torch.tensor([-1.0, -2.0, -3.0]))
    assert nodes == [1, 2, 1]
    frontier = builder.frontier([0, 1], [2, 1])
    assert not frontier.only_roots
    assert (frontier.slots, frontier.depths, frontier.ancestor_slots) == ([1, 1], [1, 1], [0b11, 0b11])
    assert frontier.paths() == [[4], [5]]
    builder.add([0], [2], torch.tensor([6]), torch.tensor([-0.5]))
    assert builder.frontier([0], [1]).ancestor_slots == [0b101]
    tree = builder.build(ProposalLaw.DETERMINISTIC, keep=[[0, 2, 3], [0, 1]])
    tree.validate()
    assert tree.tokens.tolist() == [0, 4, 6, 0, 5]
    assert tree.parents.tolist() == [-1, 0, 1, -1, 0]
    assert tree.draft_slots.tolist() == [0, 1, -1, 0, 1]
    assert tree.score.tolist() == pytest.approx([0, -2, -2.5, 0, -3])


def test_builder_expands_a_node_once():
    builder = TreeBuilder(batch_of(1), capacity=1)
    builder.frontier([0], [0])
    with pytest.raises(AssertionError, match="node 0 of row 0 was expanded before"):
        builder.frontier([0], [0])


def test_an_empty_budget_is_a_root():
    for proposer in PROPOSERS.values():
        tree = proposer.propose(CountingModel(1), batch_of(2), [0, 0])
        assert isinstance(tree, TokenTree)
        assert tree.num_nodes == [1, 1]
