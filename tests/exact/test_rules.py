"""Every rule under every law it claims keeps the target's joint law; expected acceptance is what theory says.

The tokens of a tree are enumerated with their probabilities, the coins of the shipped rules by walking them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from specdec_tests.drawn import AllDraws
from specdec_tests.laws import (
    Coins,
    Conditional,
    Game,
    Outcome,
    constant,
    decode_law,
    exact_law,
    joint_law,
    random_table,
    warped,
)
from specdec_tests.statistics import total_variation

from specdec.core import ProposalLaw, SamplingParams, TokenTree
from specdec.drafters.base import DraftBatch
from specdec.verifiers import kseq, recursive_rejection, traversal
from specdec.verifiers.registry import VERIFIERS

EXACT, BIASED = 1e-6, 1e-3
CHAIN, IID, WITHOUT = ProposalLaw.CHAIN, ProposalLaw.IID, ProposalLaw.WITHOUT_REPLACEMENT
TARGET, DRAFT = random_table(1, 3), random_table(2, 3)
WARP = SamplingParams(temperature=0.7, top_k=2)
# Parents of the nodes; the last one is not breadth-first.
SHAPES = {
    CHAIN: [(0,), (0, 1), (0, 1, 2)],
    IID: [(0, 0), (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0)],
    WITHOUT: [(0, 0), (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 0, 1, 1)],
}
RULES = [
    (name, law)
    for name in VERIFIERS.names()
    if not VERIFIERS.get(name).lossy and not VERIFIERS.get(name).reproduces
    for law in (CHAIN, IID, WITHOUT)
    if law in VERIFIERS.get(name).laws and not VERIFIERS.get(name).greedy_only
]
CASES = [(name, law, shape) for name, law in RULES for shape in SHAPES[law]]


def law_of(
    name: str,
    law: ProposalLaw,
    shape: tuple[int, ...],
    target: Conditional = TARGET,
    draft: Conditional = DRAFT,
    params: SamplingParams | None = None,
    change: Callable[[TokenTree], TokenTree] = lambda tree: tree,
    coins: type[Coins] = Coins,
) -> tuple[Game, dict[Outcome, float]]:
    """The law of a rule's outcomes; `change` falsifies trees."""
    params = params or SamplingParams()
    draws = AllDraws(shape, draft, law, params)

    def propose(batch: DraftBatch) -> TokenTree:
        return change(draws.propose(batch))

    game = Game(target=target, verifier=VERIFIERS.create(name), propose=propose, params=params)
    return game, exact_law(game, coins, draws.weights)


def bias(*args, length: int = 3, **kwargs) -> float:
    game, law = law_of(*args, **kwargs)
    assert sum(law.values()) == pytest.approx(1, abs=1e-9)
    return total_variation(joint_law(law, game.warped, length), decode_law(game.warped, length))


def tau(law: dict[Outcome, float]) -> float:
    """Expected accepted tokens."""
    return sum(weight * len(outcome.path) for outcome, weight in law.items())


@pytest.mark.parametrize(("name", "law", "shape"), CASES, ids=str)
def test_rules_are_exact(name, law, shape):
    assert bias(name, law, shape) < EXACT


@pytest.mark.parametrize(("name", "law"), RULES, ids=str)
def test_rules_are_exact_under_warping(name, law):
    """Top-2 of three tokens leaves rows with zeros in p and in q, and draws that run out of mass."""
    assert bias(name, law, SHAPES[law][-1], params=WARP) < EXACT
    assert bias(name, law, SHAPES[law][1], params=replace(WARP, top_k=0, top_p=0.8)) < EXACT


@pytest.mark.parametrize(("name", "law"), RULES, ids=str)
def test_greedy_targets_are_exact(name, law):
    assert bias(name, law, SHAPES[law][-1], target=random_table(1, 3, sharpness=60)) < EXACT


@pytest.mark.parametrize(("name", "law"), RULES, ids=str)
def test_a_perfect_drafter_is_always_accepted(name, law):
    shape = SHAPES[law][-1]
    _, outcomes = law_of(name, law, shape, draft=TARGET)
    assert tau(outcomes) == pytest.approx(max(depths(shape)), abs=EXACT)


def depths(shape: tuple[int, ...]) -> list[int]:
    result = [0]
    for parent in shape:
        result.append(result[parent] + 1)
    return result


P, Q = constant(0.5, 0.3, 0.2), constant(0.2, 0.3, 0.5)


@pytest.mark.parametrize(
    ("name", "law", "shape", "acceptance"),
    [
        ("token", CHAIN, (0,), 0.7),
        ("block", CHAIN, (0,), 0.7),
        ("rrs", IID, (0, 0), 0.76),
        ("kseq", IID, (0, 0), 0.7913553),
        ("rrsw", WITHOUT, (0, 0), 0.82),
        ("target_only", IID, (0, 0), 0.483),
    ],
)
def test_acceptance_vectors(name, law, shape, acceptance):
    _, outcomes = law_of(name, law, shape, target=P, draft=Q)
    assert tau(outcomes) == pytest.approx(acceptance, abs=EXACT)


@pytest.mark.parametrize(
    ("length", "token", "block"), [(1, 2 / 3, 2 / 3), (2, 10 / 9, 11 / 9), (3, 1.407407407, 5 / 3)]
)
def test_block_vectors(length, token, block):
    """The example of the block verification paper, section 2."""
    p, q = constant(1 / 3, 2 / 3), constant(2 / 3, 1 / 3)
    shape = tuple(range(length))
    for name, expected in (("token", token), ("block", block), ("traversal", block)):
        _, outcomes = law_of(name, CHAIN, shape, target=p, draft=q)
        assert tau(outcomes) == pytest.approx(expected, abs=EXACT)


@cache
def transport_bound(p: tuple[float, ...], q: tuple[float, ...], law: ProposalLaw) -> float:
    """The largest chance to accept one of two draws under any exact rule: the dual of optimal transport.

    min over sets H of p(H) + 1 - P(both draws in H); arXiv:2502.18779.
    """
    tokens = range(len(p))

    def both_inside(inside: frozenset[int]) -> float:
        if law is IID:
            return sum(q[token] for token in inside) ** 2
        return sum(q[a] * q[b] / (1 - q[a]) for a, b in product(inside, inside) if a != b)

    sets = [frozenset(t for t in tokens if mask >> t & 1) for mask in range(2 ** len(p))]
    return min(sum(p[token] for token in inside) + 1 - both_inside(inside) for inside in sets)


def test_transport_bound_vectors():
    p, q = (0.5, 0.3, 0.2), (0.2, 0.3, 0.5)
    assert transport_bound(p, q, IID) == pytest.approx(0.86)
    assert transport_bound(p, q, WITHOUT) == pytest.approx(0.9857143, abs=1e-7)


@pytest.mark.parametrize(("name", "law"), [case for case in RULES if case[1] is not CHAIN], ids=str)
def test_no_rule_passes_the_transport_bound(name, law):
    for seed in range(12):
        p, q = random_table(10 + seed, 4), random_table(50 + seed, 4)
        p_row, q_row = (warped(table, (), SamplingParams()).double().tolist() for table in (p, q))
        _, outcomes = law_of(name, law, (0, 0), target=constant(*p_row), draft=constant(*q_row))
        acceptance = tau(outcomes)
        floor = sum(min(a, b) for a, b in zip(p_row, q_row, strict=True))
        assert floor - EXACT < acceptance < transport_bound(tuple(p_row), tuple(q_row), law) + EXACT


def test_rules_rank_as_theory_says():
    chain, wide = (0, 1, 2), (0, 0, 1, 1)
    for seed in range(3):
        p, q = random_table(30 + seed, 3), random_table(40 + seed, 3)

        def length(name: str, law: ProposalLaw, shape: tuple[int, ...], p=p, q=q) -> float:
            return tau(law_of(name, law, shape, target=p, draft=q)[1])

        assert length("block", CHAIN, chain) >= length("token", CHAIN, chain) - EXACT
        assert length("traversal", CHAIN, chain) == pytest.approx(length("block", CHAIN, chain), abs=EXACT)
        assert length("traversal", WITHOUT, wide) >= length("rrsw", WITHOUT, wide) - EXACT
        assert length("kseq", IID, (0, 0)) >= length("token", CHAIN, (0,)) - EXACT


# Negative controls: misuse must show. What the first rejection leaves of p has two tokens.

P4, Q4 = constant(0.4, 0.3, 0.2, 0.1), constant(0.1, 0.25, 0.25, 0.4)


def misuse(name: str, law: ProposalLaw, shape: tuple[int, ...], **kwargs) -> float:
    return bias(name, law, shape, target=P4, draft=Q4, length=2, **kwargs)


def relabelled(law: ProposalLaw) -> Callable[[TokenTree], TokenTree]:
    return lambda tree: replace(tree, laws=[law] * tree.batch_size)


def sorted_siblings(tree: TokenTree) -> TokenTree:
    """The first two children of each root, the likelier first."""
    tokens, roots = tree.tokens.clone(), tree.roots
    first, second = tree.first_child[roots], tree.next_sibling[tree.first_child[roots]]
    pair = tree.tokens[torch.stack((first, second))]
    likelihood = tree.q[tree.q_row[roots]].gather(1, pair.T).T
    swap = (likelihood[1] > likelihood[0]) & (second >= 0)
    tokens[first[swap]], tokens[second[swap]] = pair[1][swap], pair[0][swap]
    return replace(tree, tokens=tokens)


def flattened(tree: TokenTree) -> TokenTree:
    q = tree.q.sqrt()
    return replace(tree, q=q / q.sum(-1, keepdim=True))


class TestMisuseIsBiased:
    @pytest.mark.parametrize(("name", "law"), RULES, ids=str)
    def test_dishonest_q(self, name, law):
        assert misuse(name, law, SHAPES[law][-1], change=flattened) > BIASED

    @pytest.mark.parametrize(("name", "law"), RULES, ids=str)
    def test_p_and_q_swapped(self, name, law):
        """The drafter draws from what the rule takes for p."""
        draws = AllDraws(SHAPES[law][0], Q4, law, SamplingParams())

        def swap(batch: DraftBatch) -> TokenTree:
            tree = draws.propose(batch)
            return replace(tree, q=P4(()).expand_as(tree.q))

        game = Game(target=Q4, verifier=VERIFIERS.create(name), propose=swap)
        law_seen = joint_law(exact_law(game, weights=draws.weights), Q4, 1)
        assert total_variation(law_seen, decode_law(P4, 1)) > BIASED

    @pytest.mark.parametrize(("name", "law"), [case for case in RULES if case[1] is WITHOUT], ids=str)
    def test_siblings_sorted_after_the_draw(self, name, law):
        assert misuse(name, law, (0, 0), change=sorted_siblings) > BIASED

    @pytest.mark.parametrize("name", ["rrs", "traversal"])
    def test_without_replacement_taken_for_independent(self, name):
        assert misuse(name, WITHOUT, (0, 0), change=relabelled(IID)) > BIASED

    @pytest.mark.parametrize("name", ["rrsw", "traversal"])
    def test_independent_taken_for_without_replacement(self, name):
        assert misuse(name, IID, (0, 0), change=relabelled(WITHOUT)) > BIASED

    @pytest.mark.parametrize(("name", "law"), RULES, ids=str)
    def test_top_k_taken_for_draws(self, name, law):
        order = Q4(()).argsort(descending=True)

        def best(tree: TokenTree) -> TokenTree:
            tokens = tree.tokens.clone()
            tokens[tree.depth > 0] = order[tree.index_in_request[tree.depth > 0] - 1]
            return replace(tree, tokens=tokens)

        assert misuse(name, law, (0,) if law is CHAIN else (0, 0), change=best) > BIASED

    @pytest.mark.parametrize(("name", "law"), RULES, ids=str)
    def test_one_coin_for_acceptance_and_correction(self, name, law):
        class OneStream(Coins):
            def key(self, position, node, stream):
                return (position if stream >= 2 else position + 1,)

        assert misuse(name, law, SHAPES[law][0], coins=OneStream) > BIASED

    @pytest.mark.parametrize(("name", "law"), RULES, ids=str)
    def test_raw_target_in_place_of_the_residual(self, name, law, monkeypatch):
        for module in (recursive_rejection, kseq, traversal):
            draw = module.draw_correction
            monkeypatch.setattr(
                module,
                "draw_correction",
                lambda residual, p, nodes, rng, draw=draw: draw(p.rows(nodes), p, nodes, rng),
            )
        assert misuse(name, law, SHAPES[law][0]) > BIASED

    @pytest.mark.parametrize(("name", "law"), RULES, ids=str)
    def test_trees_cut_where_the_drawn_token_is_unlikely(self, name, law):
        """A cut may look at q, never at what was drawn."""
        draws = AllDraws((0,), Q4, law, SamplingParams())
        keep = [float(Q4(())[tokens[0]]) > float(Q4(()).median()) for tokens, _ in draws.cases]

        def propose(batch: DraftBatch) -> TokenTree:
            tree = draws.propose(batch)
            kept = [keep[case] for case in batch.request_ids]
            nodes = [node for row, all_ in enumerate(kept) for node in range(2 * row, 2 * row + 1 + all_)]
            return replace(
                tree,
                tokens=tree.tokens[nodes],
                parents=tree.parents[nodes],
                depth=tree.depth[nodes],
                q_row=tree.q_row[nodes],
                num_nodes=[1 + own for own in kept],
            )

        game = Game(target=P4, verifier=VERIFIERS.create(name), propose=propose)
        law_seen = joint_law(exact_law(game, weights=draws.weights), P4, 1)
        assert total_variation(law_seen, decode_law(P4, 1)) > BIASED
