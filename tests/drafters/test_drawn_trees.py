"""Drawn trees: DySpec against a replay of its definition, confidence stops, and what shapes refuse."""

from __future__ import annotations

import re

import pytest
import torch
from specdec_tests.laws import node_paths
from specdec_tests.trees import TABLES, VOCAB, CountingModel, batch_of

from specdec.core import ProposalLaw, SamplingParams, TokenTree
from specdec.drafters.trees.chain import ChainProposer
from specdec.drafters.trees.draws import Draw
from specdec.drafters.trees.dyspec import DySpecProposer
from specdec.drafters.trees.expansion import ExpansionProposer
from specdec.drafters.trees.static import StaticProposer


def children_of(tree: TokenTree, row: int) -> dict[tuple[int, ...], list[int]]:
    """Tokens of the children of each node of a request, in order."""
    children: dict[tuple[int, ...], list[int]] = {}
    for path in node_paths(tree)[row][1:]:
        children.setdefault(path[:-1], []).append(path[-1])
    return children


# Draws


@pytest.mark.parametrize("table", TABLES)
def test_without_replacement_takes_each_token_once_until_none_is_left(table):
    model = CountingModel(TABLES[table])
    proposer = ExpansionProposer([9, 2], draw="without_replacement")
    tree = proposer.propose(model, batch_of(4), [proposer.max_nodes] * 4)
    for row in range(4):
        for path, tokens in children_of(tree, row).items():
            q = model.conditional(path)
            support = set(q.nonzero().squeeze(1).tolist()) if not q.isnan().any() else set(range(VOCAB))
            assert len(set(tokens)) == len(tokens)
            assert set(tokens) <= support
            assert len(tokens) == min(9 if not path else 2, len(support))


def test_with_replacement_repeats_tokens():
    model = CountingModel(TABLES["certain"])
    tree = ExpansionProposer([3], draw="with_replacement").propose(model, batch_of(1), [3])
    assert tree.tokens.tolist() == [0, 0, 0, 0]
    assert tree.parents.tolist() == [-1, 0, 0, 0]


def test_a_greedy_request_draws_its_one_token():
    model = CountingModel(3)
    for proposer in (ExpansionProposer([3, 3], draw="without_replacement"), DySpecProposer(2, 2)):
        tree = proposer.propose(model, batch_of(1, params=SamplingParams(temperature=0)), [9])
        first = int(model.conditional(()).argmax())
        assert node_paths(tree)[0] == [(), (first,), (first, int(model.conditional((first,)).argmax()))]


def test_a_smaller_budget_keeps_the_draws_of_the_larger():
    """Cutting is by rank alone: the nodes that stay are those of the whole tree, coins and all."""
    proposer = ExpansionProposer([3, 2], draw="without_replacement")
    whole = children_of(proposer.propose(CountingModel(8), batch_of(1), [9]), 0)
    part = children_of(proposer.propose(CountingModel(8), batch_of(1), [3]), 0)
    assert part[()] == whole[()][: len(part[()])]


@pytest.mark.parametrize(
    ("build", "law"),
    [
        (lambda draw: StaticProposer(draw=draw), None),
        (lambda draw: ExpansionProposer(draw=draw), None),
        (lambda draw: DySpecProposer(), ProposalLaw.WITHOUT_REPLACEMENT),
    ],
)
def test_each_draw_has_its_law(build, law):
    laws = {
        "top_k": ProposalLaw.DETERMINISTIC,
        "with_replacement": ProposalLaw.IID,
        "without_replacement": ProposalLaw.WITHOUT_REPLACEMENT,
    }
    assert {draw.value for draw in Draw} == set(laws)
    for draw, own in laws.items():
        assert build(draw).law is (law or own)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: StaticProposer(draw="topk"),
            "draw='topk': expected one of top_k, with_replacement, without",
        ),
        (lambda: StaticProposer([(0,), (2,)], draw="with_replacement"), "[2] skips a sibling; with draw="),
        (lambda: ExpansionProposer([]), "sizes=[]: expected a list of numbers of children"),
        (lambda: ExpansionProposer([2, 0]), "sizes=[2, 0]: expected a list"),
        (lambda: ExpansionProposer(3), "sizes=3: expected a list"),
        (lambda: DySpecProposer(0), "num_nodes=0"),
        (lambda: DySpecProposer(max_depth=0), "max_depth=0"),
        (lambda: ChainProposer(min_confidence=1.5), "min_confidence=1.5: expected min_confidence in [0, 1]"),
        (lambda: ChainProposer(min_confidence="no"), "min_confidence='no'"),
    ],
)
def test_wrong_arguments_are_refused(build, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build()


# Confidence stop


@pytest.mark.parametrize("sample", [True, False])
@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.8])
def test_a_chain_ends_before_the_first_flat_q(sample, threshold):
    for seed in range(10):
        model = CountingModel(seed)
        whole = ChainProposer(5, sample=sample).propose(model, batch_of(1), [5]).tokens.tolist()[1:]
        peaks = [float(model.conditional(tuple(whole[:depth])).max()) for depth in range(5)]
        length = next((depth for depth, peak in enumerate(peaks) if peak < threshold), 5)
        tree = ChainProposer(5, sample, threshold).propose(model, batch_of(1), [5])
        assert tree.tokens.tolist()[1:] == whole[:length]


def test_the_stop_does_not_look_at_the_drawn_token():
    """Where the largest q passes, an unlikely draw stays."""
    row = torch.tensor([0.6, 0.1, 0.1, 0.1, 0.1, 0.0])
    model = CountingModel(lambda path: row)
    tree = ChainProposer(1, sample=True, min_confidence=0.5).propose(model, batch_of(200), [1] * 200)
    assert tree.num_drafted == [1] * 200
    assert set(tree.tokens[1::2].tolist()) == {0, 1, 2, 3, 4}


# DySpec


def replay(tree: TokenTree, row: int, model: CountingModel, num_nodes: int, max_depth: int):
    """Fills the best slot with the next token of the tree, by the definition; returns the nodes' parents."""
    tokens = tree.tokens[tree.host_offsets[row] + 1 : tree.host_offsets[row + 1]].tolist()
    slots = [(1.0, 0, (), torch.ones(VOCAB, dtype=torch.bool))]
    parents, count = [], 0
    while slots and count < num_nodes:
        best = max(slots, key=lambda slot: (slot[0], -slot[1]))
        slots.remove(best)
        value, node, path, free = best
        q = model.conditional(path).double() * free
        token = tokens[count]
        share = float(q[token] / q.sum())
        parents.append(node)
        count += 1
        if float(q.sum() - q[token]) > 1e-9:
            slots.append((value * (1 - share), node, path, free & (torch.arange(VOCAB) != token)))
        if len(path) + 1 < max_depth:
            slots.append((value * share, count, (*path, token), torch.ones(VOCAB, dtype=torch.bool)))
    return parents


@pytest.mark.parametrize("table", ["peaked", "flat", "sparse"])
@pytest.mark.parametrize(("num_nodes", "max_depth"), [(1, 3), (6, 2), (12, 4), (40, 2)])
def test_dyspec_fills_the_best_slot(table, num_nodes, max_depth):
    model = CountingModel(TABLES[table])
    tree = DySpecProposer(num_nodes, max_depth).propose(model, batch_of(6), [num_nodes] * 6)
    tree.validate()
    for row in range(6):
        start, end = tree.host_offsets[row], tree.host_offsets[row + 1]
        assert tree.parents[start + 1 : end].tolist() == replay(tree, row, model, num_nodes, max_depth)


def test_dyspec_keeps_what_it_has_drawn():
    """A larger budget continues the smaller one's tree."""
    small, large = (
        DySpecProposer(num_nodes, 4).propose(CountingModel(11), batch_of(1), [num_nodes])
        for num_nodes in (5, 11)
    )
    assert large.tokens.tolist()[:6] == small.tokens.tolist()
    assert large.parents.tolist()[:6] == small.parents.tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"coupled": 0.3}, "coupled=0.3"),
        ({"sample": "yes"}, "sample='yes'"),
        ({"sample": True, "coupled": True}, "one or the other"),
    ],
)
def test_a_chain_is_drawn_in_one_way(arguments, message):
    with pytest.raises(ValueError, match=message):
        ChainProposer(3, **arguments)
