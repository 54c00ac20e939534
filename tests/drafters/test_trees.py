"""Every tree proposer on draft models given as tables: topology, budgets, independence, and honest q."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from specdec_tests.laws import TableModel, node_paths, random_table
from specdec_tests.statistics import chi_square_p_value
from specdec_tests.trees import CHOSEN, PROPOSERS, TABLES, VOCAB, CountingModel, Speechless, batch_of

from specdec.core import ProposalLaw, SamplingParams, TokenTree
from specdec.core.sampling import warp
from specdec.drafters.base import DraftBatch
from specdec.drafters.trees.best_first import BestFirstProposer
from specdec.drafters.trees.builder import TreeBuilder
from specdec.drafters.trees.chain import ChainProposer
from specdec.drafters.trees.expansion import ExpansionProposer
from specdec.drafters.trees.shapes import SHAPES
from specdec.drafters.trees.static import StaticProposer

WARPS = {
    "plain": SamplingParams(),
    "filtered": SamplingParams(temperature=0.7, top_k=4, top_p=0.9),
    "penalised": SamplingParams(frequency_penalty=0.7, repetition_penalty=1.5, min_tokens=9),
    "banned": SamplingParams(banned_token_ids=(0, 1, 2)),
    "greedy": SamplingParams(temperature=0),
}


def check_tree(name: str, model: CountingModel, batch: DraftBatch, budgets: list[int]) -> TokenTree:
    """Proposes, and checks all that holds for any tree."""
    proposer = PROPOSERS[name]
    tree = proposer.propose(model, batch, budgets)
    tree.validate()
    assert tree.laws == [proposer.law] * batch.size
    assert (tree.q is not None) == (proposer.law.needs_q and tree.max_depth > 0)
    repeats = proposer.law is ProposalLaw.IID
    for row, paths in enumerate(node_paths(tree)):
        assert tree.num_drafted[row] <= min(budgets[row], proposer.max_nodes)
        assert tree.host_depths[row] <= batch.max_depths[row]
        assert repeats or len(set(paths)) == len(paths), "siblings repeat"
        if tree.draft_slots is not None:
            start = tree.host_offsets[row]
            slots = tree.draft_slots[start : start + len(paths)]
            held = slots[slots >= 0].tolist()
            assert len(set(held)) == len(held), "two nodes share a slot"
            assert int(slots.max()) <= budgets[row], "a slot lies outside the reserved pages"
            expanded = Counter(path for own, path in model.expanded if own == row)
            if repeats:
                assert len(held) == expanded.total()
            else:
                assert {
                    path for path, slot in zip(paths, slots, strict=True) if slot >= 0
                } == expanded.keys() & set(paths)
                assert max(expanded.values(), default=1) == 1, "a node was expanded twice"
    return tree


@pytest.mark.parametrize("name", PROPOSERS)
def test_trees_are_sound_within_budget_and_depth(name):
    proposer = PROPOSERS[name]
    may_stop = "confident" in name
    for seed in range(20):
        chooser = random.Random(seed)
        count = chooser.randrange(1, 5)
        budgets = [chooser.randrange(proposer.max_nodes + 3) for _ in range(count)]
        budgets[0] = max(budgets[0], 1)
        depths = [chooser.randrange(1, 6) for _ in range(count)]
        model = CountingModel(seed)
        tree = check_tree(name, model, batch_of(count, depths), budgets)
        for row, paths in enumerate(node_paths(tree)):
            assert tree.num_drafted[row] > 0 or budgets[row] == 0 or may_stop
            start = tree.host_offsets[row]
            for node, path in enumerate(paths):
                expected = model.log_q(path, proposer.needs)
                assert float(tree.score[start + node]) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("params", WARPS)
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", PROPOSERS)
def test_any_draft_model_and_warp_gives_a_tree(name, table, params):
    """Ties, certainty, impossible tokens and NaN rows included."""
    model = CountingModel(TABLES[table])
    tree = check_tree(name, model, batch_of(3, [2, 5, 3], WARPS[params]), [4, 20, 1])
    assert int(tree.tokens.max()) < VOCAB
    assert not tree.score.isnan().any()
    if name in CHOSEN:
        assert tree.score.isfinite().all()
    elif tree.max_depth:
        check_q(tree, model)


def check_q(tree: TokenTree, model: CountingModel) -> None:
    """Rows of q are what the model said, warped, bit for bit; they belong to inner nodes, and they are laws."""
    rows = {}
    for frontier, logits in model.answers:
        paths = frontier.paths()
        width = max(map(len, paths))
        padded = [path + [-1] * (width - len(path)) for path in paths]
        path_tokens = torch.tensor(padded, dtype=torch.int64).view(len(paths), width)
        warped = warp(logits, frontier.batch.sampling, torch.tensor(frontier.rows), path_tokens)
        rows.update(zip(zip(frontier.rows, map(tuple, paths), strict=True), warped, strict=True))
    used = tree.q_row[tree.q_row >= 0]
    assert torch.equal(used.sort().values, torch.arange(len(tree.q)))
    inner = torch.zeros(len(tree.tokens), dtype=torch.bool)
    inner[tree.flat_parents[tree.flat_parents >= 0]] = True
    assert torch.equal(inner, tree.q_row >= 0)
    assert tree.q.dtype == torch.float32
    torch.testing.assert_close(tree.q.sum(-1), torch.ones(len(tree.q)))
    for row, paths in enumerate(node_paths(tree)):
        start = tree.host_offsets[row]
        for node, path in enumerate(paths):
            if tree.q_row[start + node] < 0:
                continue
            q, said = tree.q[tree.q_row[start + node]], rows[row, path]
            if bool((said > 0).any()):
                assert torch.equal(q, said)
            else:
                assert torch.equal(q, torch.full((VOCAB,), 1 / VOCAB)), "nothing can be drawn: uniform"
            children = tree.tokens[tree.flat_parents == start + node]
            assert bool((q[children] > 0).all())


@pytest.mark.parametrize("params", [SamplingParams(), WARPS["penalised"]], ids=["plain", "penalised"])
@pytest.mark.parametrize("name", PROPOSERS)
def test_requests_do_not_affect_each_other(name, params):
    proposer = PROPOSERS[name]
    batch, budgets = batch_of(4, [5, 2, 1, 4], params), [3, 0, 10, 2]
    together = proposer.propose(CountingModel(3), batch, budgets)
    for row in range(4):
        own = replace(batch_of(1, [batch.max_depths[row]], params, seeds=[row]), request_ids=[row])
        alone = proposer.propose(CountingModel(3), own, [budgets[row]])
        start, end = together.host_offsets[row], together.host_offsets[row + 1]
        assert together.tokens[start:end].tolist() == alone.tokens.tolist()
        assert together.parents[start:end].tolist() == alone.parents.tolist()


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("longest", [0, 1, 2])
def test_nothing_is_drafted_where_the_model_knows_nothing(name, longest):
    tree = PROPOSERS[name].propose(Speechless(CountingModel(4), longest), batch_of(2), [9, 9])
    tree.validate()
    assert tree.max_depth == longest


@pytest.mark.parametrize(
    "proposer",
    [StaticProposer([(0,), (9,)]), BestFirstProposer(branching=9), ExpansionProposer([9])],
    ids=str,
)
def test_more_branches_than_the_vocabulary_has_tokens(proposer):
    tree = proposer.propose(CountingModel(5), batch_of(1), [9])
    tree.validate()
    assert int(tree.tokens.max()) < VOCAB


def test_an_empty_budget_is_a_root():
    for proposer in PROPOSERS.values():
        tree = proposer.propose(CountingModel(1), batch_of(2), [0, 0])
        assert isinstance(tree, TokenTree)
        assert tree.num_nodes == [1, 1]


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


@pytest.mark.parametrize("budget", range(1, len(SHAPES["default"]) + 1))
def test_smaller_budgets_take_a_closed_part(budget):
    tree = StaticProposer().propose(CountingModel(9), batch_of(1), [budget])
    tree.validate()
    assert tree.num_drafted == [budget]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ("meduza", "paths='meduza': expected a list of paths or one of default, medusa, eagle1"),
        ([0, 1], "paths=[0, 1]: expected paths to list paths of sibling ranks"),
        ([["a"]], "paths=[['a']]: expected paths to list paths of sibling ranks"),
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
