"""`TokenTree` against an obvious reading of its parents, for any topology and size."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.core import ProposalLaw, TokenTree

SIZES = [1, 2, 3, 5, 31, 32, 33, 63, 64, 65, 100]
SHAPES = {
    "chain": lambda node, draw: node - 1,
    "star": lambda node, draw: 0,
    "comb": lambda node, draw: max(0, node - 2 + node % 2),
    "random": lambda node, draw: int(draw * node),
}


@st.composite
def topologies(draw: st.DrawFn, max_nodes: int = 200) -> list[list[int]]:
    """Parents of the drafted nodes of one to four requests."""
    trees = []
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.integers(0, max_nodes - 1))
        # A small reach gives deep trees, a large one bushy trees.
        reach = draw(st.integers(1, max_nodes))
        offsets = draw(st.lists(st.integers(1, reach), min_size=size, max_size=size))
        trees.append([max(0, node - offset) for node, offset in enumerate(offsets, start=1)])
    return trees


def make_tree(topology: list[list[int]], **fields) -> TokenTree:
    """Tokens are arbitrary; request b has its root at position 10 + b."""
    count = len(topology)
    entries = [
        [(100 * row + node, parent) for node, parent in enumerate(tree)] for row, tree in enumerate(topology)
    ]
    return TokenTree.from_lists(torch.arange(count), entries, torch.arange(10, 10 + count), **fields)


def ancestors(parents: list[int], node: int) -> list[int]:
    """The node and its ancestors, upwards; `parents` has the root's -1 first."""
    return [] if node < 0 else [node, *ancestors(parents, parents[node])]


def naive_mask(topology: list[list[int]]) -> torch.Tensor:
    width = 1 + max(len(tree) for tree in topology)
    mask = torch.zeros(sum(len(tree) + 1 for tree in topology), width, dtype=torch.bool)
    first = 0
    for tree in topology:
        parents = [-1, *tree]
        for node in range(len(parents)):
            up = node
            while up >= 0:
                mask[first + node, up] = True
                up = parents[up]
        first += len(parents)
    return mask


def words_to_mask(words: torch.Tensor, width: int) -> torch.Tensor:
    rows = [[bool(word >> bit & 1) for word in row for bit in range(32)] for row in words.tolist()]
    return torch.tensor(rows)[:, :width]


@settings(max_examples=60, deadline=None)
@given(topologies())
def test_derived_fields_equal_naive_ones(topology):
    tree = make_tree(topology)
    tree.validate()
    mask = naive_mask(topology)
    assert torch.equal(tree.ancestor_mask, mask)
    assert tree.ancestor_words.dtype == torch.int32
    assert torch.equal(words_to_mask(tree.ancestor_words, mask.shape[1]), mask)
    depths = mask.sum(-1) - 1
    assert torch.equal(tree.depth, depths)
    assert tree.num_drafted == [len(own) for own in topology]
    first = 0
    for row, own in enumerate(topology):
        parents = [-1, *own]
        count = len(parents)
        span = slice(first, first + count)
        assert torch.equal(tree.positions[span], depths[span] + 10 + row)
        assert tree.request_of_node[span].tolist() == [row] * count
        assert tree.index_in_request[span].tolist() == list(range(count))
        assert tree.host_depths[row] == int(depths[span].max())
        for node in range(count):
            children = [child + first for child in range(count) if parents[child] == node]
            chain = [int(tree.first_child[first + node])]
            while chain[-1] >= 0:
                chain.append(int(tree.next_sibling[chain[-1]]))
            assert chain == [*children, -1]
            above = [first + up for up in ancestors(parents, node)[-2::-1]]
            assert tree.path_nodes[first + node].tolist() == above + [-1] * (tree.max_depth - len(above))
        leaves = [node for node in range(count) if node not in parents]
        assert tree.paths(row) == [ancestors(parents, leaf)[::-1] for leaf in leaves]
        first += count
    assert tree.max_depth == int(depths.max())
    assert tree.num_children.tolist() == [own.count(node) for own in topology for node in range(len(own) + 1)]


@settings(max_examples=30, deadline=None)
@given(topologies(max_nodes=60), st.randoms(use_true_random=False))
def test_renumbered_nodes_keep_their_ancestors(topology, chooser):
    """Any order with parents before children is a legal order: siblings permuted, not breadth-first."""
    own = topology[0]
    order = [0]
    while len(order) <= len(own):
        ready = [n for n in range(1, len(own) + 1) if n not in order and own[n - 1] in order]
        order.append(chooser.choice(ready))
    new_index = {node: index for index, node in enumerate(order)}
    renumbered = [new_index[own[node - 1]] for node in order[1:]]
    first, second = make_tree([own]), make_tree([renumbered])
    second.validate()
    assert torch.equal(first.depth[order], second.depth)
    assert torch.equal(first.positions[order], second.positions)
    assert torch.equal(first.num_children[order], second.num_children)
    assert torch.equal(first.ancestor_mask[order][:, order], second.ancestor_mask)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", SIZES)
def test_words_at_their_borders(size, shape):
    draws = torch.rand(size, generator=torch.Generator().manual_seed(size)).tolist()
    topology = [[SHAPES[shape](node, draws[node]) for node in range(1, size)], [], [0, 0, 1]]
    tree = make_tree(topology)
    mask = naive_mask(topology)
    assert tree.ancestor_words.shape == (size + 5, -(-max(size, 4) // 32))
    assert torch.equal(tree.ancestor_mask, mask)
    assert torch.equal(words_to_mask(tree.ancestor_words, mask.shape[1]), mask)


@pytest.mark.parametrize(
    "parents",
    [[0, 1, 0, 3, 1, 2, 3, 0], [0, 0, 1, 1, 2, 2], [0, 1, 2, 0, 4, 5]],
    ids=["mixed", "breadth-first", "depth-first"],
)
def test_positions_come_from_depth(parents):
    tree = make_tree([parents])
    assert tree.positions.tolist() == [
        10 + len(ancestors([-1, *parents], n)) - 1 for n in range(len(parents) + 1)
    ]


@settings(max_examples=30, deadline=None)
@given(topologies(max_nodes=20), topologies(max_nodes=20))
def test_concat_puts_requests_side_by_side(first, second):
    both = TokenTree.concat(make_tree(first), make_tree(second))
    both.validate()
    whole = make_tree([*first, *second])
    assert torch.equal(both.ancestor_mask, whole.ancestor_mask)
    assert torch.equal(both.flat_parents, whole.flat_parents)
    assert both.num_nodes == whole.num_nodes
    assert both.root_positions.tolist() == [*range(10, 10 + len(first)), *range(10, 10 + len(second))]


def test_concat_fills_what_the_second_lacks():
    q = torch.tensor([[0.5, 0.5]])
    fields = {"q": q, "q_row": torch.tensor([0, -1]), "score": torch.tensor([0.0, -0.7])}
    first = make_tree([[0]], law=ProposalLaw.CHAIN, draft_slots=torch.tensor([0, -1]), **fields)
    both = TokenTree.concat(first, TokenTree.root_only(torch.tensor([7]), torch.tensor([3])))
    both.validate()
    assert both.q_row.tolist() == [0, -1, -1]
    assert both.score.tolist() == pytest.approx([0.0, -0.7, 0.0])
    assert both.draft_slots.tolist() == [0, -1, -1]
    assert both.laws == [ProposalLaw.CHAIN, ProposalLaw.DETERMINISTIC]


def test_chain_has_ragged_lengths():
    tree = TokenTree.chain(torch.tensor([1, 2, 3]), [[4, 5, 6], [], [7]], torch.tensor([10, 20, 30]))
    tree.validate()
    assert tree.tokens.tolist() == [1, 4, 5, 6, 2, 3, 7]
    assert tree.parents.tolist() == [-1, 0, 1, 2, -1, -1, 0]
    assert tree.depth.tolist() == [0, 1, 2, 3, 0, 0, 1]
    assert tree.num_nodes == [4, 1, 2]
    assert tree.positions.tolist() == [10, 11, 12, 13, 20, 30, 31]


def test_root_only_is_a_tree():
    tree = TokenTree.root_only(torch.tensor([5, 6]), torch.tensor([0, 9]))
    tree.validate()
    assert (tree.max_depth, tree.num_children.tolist(), tree.num_drafted) == (0, [0, 0], [0, 0])
    assert tree.ancestor_mask.tolist() == [[True], [True]]


TREE = make_tree([[0, 0, 1], [0]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.arange(5)}, "tokens has 5 entries; num_nodes sums to 6"),
        ({"depth": torch.arange(7)}, "depth has 7 entries"),
        ({"num_nodes": [6, 0]}, "at least its root"),
        ({"parents": torch.tensor([0, 0, 0, 1, -1, 0])}, "request 0: node 0 must be the root"),
        ({"parents": torch.tensor([-1, 0, 3, 1, -1, 0])}, "parents[2]=3; parents must precede children"),
        ({"parents": torch.tensor([-1, 0, 0, 1, -1, -1])}, "request 1: parents[1]=-1"),
        ({"depth": torch.tensor([0, 1, 1, 3, 0, 1])}, "request 0: depth[3]=3, expected 2"),
        ({"depth": torch.tensor([0, 1, 1, 2, 1, 2])}, "request 1: node 0 must be the root"),
        ({"laws": [ProposalLaw.CHAIN] * 2}, "request 0: law chain needs q and q_row"),
        ({"laws": [ProposalLaw.DETERMINISTIC, ProposalLaw.IID]}, "request 1: law iid needs q"),
    ],
)
def test_validate_names_what_is_wrong(change, message):
    TREE.validate()
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(TREE, **change).validate()


def test_from_lists_refuses_children_before_parents():
    with pytest.raises(ValueError, match="parents must precede"):
        TokenTree.from_lists(torch.tensor([0]), [[(1, 2), (1, 0)]], torch.tensor([0]))


def test_roots_alone_need_no_q():
    tree = replace(TokenTree.root_only(torch.tensor([5]), torch.tensor([0])), laws=[ProposalLaw.CHAIN])
    tree.validate()
