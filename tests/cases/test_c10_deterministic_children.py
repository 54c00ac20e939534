"""C10: children chosen by top-k are point masses; treating them as draws from q is biased."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from specdec_tests.laws import Game, constant, exact_law, fixed_tree, grow, joint_law

from specdec.core import ProposalLaw, SamplingParams, TokenTree
from specdec.drafters.base import DraftBatch
from specdec.drafters.trees.static import StaticProposer
from specdec.verifiers.registry import VERIFIERS

P = (0.5, 0.3, 0.2)
Q = constant(0.6, 0.3, 0.1)
TREES = {
    "top-2": grow(StaticProposer([(0,), (1,)]), Q),
    "reversed": fixed_tree([(1, 0), (0, 0)]),
    "duplicates": fixed_tree([(0, 0), (0, 0)]),
    "all": fixed_tree([(2, 0), (0, 0), (1, 0)]),
    "grandchildren": fixed_tree([(0, 0), (1, 0), (0, 1), (0, 1), (2, 2)]),
}


def law_of(game: Game) -> list[float]:
    law = joint_law(exact_law(game), game.warped, 1)
    return [law.get((token,), 0.0) for token in range(3)]


@pytest.mark.parametrize("verifier", ["token", "target_only"])
@pytest.mark.parametrize("tree", TREES)
def test_exact(tree, verifier):
    game = Game(target=constant(*P), verifier=VERIFIERS.create(verifier), propose=TREES[tree])
    assert law_of(game) == pytest.approx(P, abs=1e-6)


def test_acceptance_by_child():
    game = Game(target=constant(*P), verifier=VERIFIERS.create("token"), propose=TREES["top-2"])
    by_path = {(): 0.0, (1,): 0.0, (2,): 0.0}
    for outcome, weight in exact_law(game).items():
        by_path[outcome.path] += weight
    # 0 with .5, then 1 with .3/.5 of the rest, else nothing.
    assert by_path == pytest.approx({(1,): 0.5, (2,): 0.3, (): 0.2}, abs=1e-6)


@pytest.mark.parametrize("verifier", ["token", "target_only"])
def test_a_duplicate_is_never_accepted(verifier):
    game = Game(target=constant(*P), verifier=VERIFIERS.create(verifier), propose=TREES["duplicates"])
    assert {outcome.path for outcome in exact_law(game)} == {(), (1,)}


@pytest.mark.parametrize("verifier", [name for name in VERIFIERS.names() if not VERIFIERS.get(name).lossy])
@pytest.mark.parametrize("tree", TREES)
def test_greedy_takes_the_argmax_path(tree, verifier):
    game = Game(
        target=constant(*P),
        verifier=VERIFIERS.create(verifier),
        propose=TREES[tree],
        params=SamplingParams(temperature=0),
    )
    (outcome,) = exact_law(game)
    assert set(outcome.tokens) == {0}
    assert outcome.path


def test_the_sampled_rule_gives_its_known_bias():
    """Top-2 children under the rule for draws without replacement."""

    def lie(batch: DraftBatch) -> TokenTree:
        tree = TREES["top-2"](batch)
        first = replace(tree, laws=[ProposalLaw.CHAIN] * batch.size)
        q_row = torch.where(tree.depth == 0, tree.request_of_node, -1)
        return replace(first, q=Q(()).expand(batch.size, -1), q_row=q_row)

    game = Game(target=constant(*P), verifier=VERIFIERS.create("token"), propose=lie)
    assert abs(law_of(game)[0] - P[0]) > 0.1
