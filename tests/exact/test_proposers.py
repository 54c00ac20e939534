"""What the shipped proposers draw has exactly the law they claim, and the chosen trees verify exactly.

All outcomes of the shipped code's coins are walked. A tree's probability is that of its draws: the topology is a
function of them, adaptive or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from specdec_tests.laws import (
    Conditional,
    Game,
    decode_law,
    draft_batch,
    exact_law,
    grow,
    joint_law,
    random_table,
    warped,
)
from specdec_tests.statistics import total_variation
from specdec_tests.trees import CountingModel

from specdec.core import CounterRng, ProposalLaw, SamplingParams, TokenTree
from specdec.drafters.base import DraftBatch, TreeProposer
from specdec.drafters.budget import BudgetedDrafter
from specdec.drafters.model_drafter import ModelDrafter
from specdec.drafters.trees.chain import ChainProposer
from specdec.drafters.trees.ddtree import DDTreeProposer
from specdec.drafters.trees.dyspec import DySpecProposer
from specdec.drafters.trees.eagle2 import Eagle2Proposer
from specdec.drafters.trees.expansion import ExpansionProposer
from specdec.drafters.trees.opt_tree import OptTreeProposer
from specdec.drafters.trees.sequoia import SequoiaProposer
from specdec.drafters.trees.static import StaticProposer
from specdec.verifiers.registry import VERIFIERS
from specdec.verifiers.target_only import TargetOnlyVerifier

EXACT = 1e-6
TARGET, DRAFT = random_table(1, 3), random_table(5, 3)
WARPS = {"plain": SamplingParams(), "warped": SamplingParams(temperature=0.7, top_k=2)}
SHAPE = [(0,), (1,), (0, 0)]
DRAWN: dict[str, TreeProposer] = {
    "chain": ChainProposer(2, sample=True),
    "chain-confident": ChainProposer(2, sample=True, min_confidence=0.6),
    "static-iid": StaticProposer(SHAPE, draw="with_replacement"),
    "static-wor": StaticProposer(SHAPE, draw="without_replacement"),
    "expansion-iid": ExpansionProposer([2, 1], draw="with_replacement"),
    "expansion-wor": ExpansionProposer([3], draw="without_replacement"),
    "dyspec": DySpecProposer(num_nodes=3, max_depth=2),
    "sequoia": SequoiaProposer([0.5, 0.3], num_nodes=3, max_depth=2),
}
CHOSEN: dict[str, TreeProposer] = {
    "chain-confident": ChainProposer(2, min_confidence=0.6),
    "expansion": ExpansionProposer([2, 2]),
    "eagle2": Eagle2Proposer(num_nodes=4, depth=2, top_k=2),
    "opt-tree": OptTreeProposer(num_nodes=4, max_depth=2, delta=0.2),
    "ddtree": DDTreeProposer(num_nodes=4, max_depth=2),
}


@dataclass(frozen=True, kw_only=True)
class Drafting(Game):
    """Only proposes; an outcome is the `(token, parent)` nodes of a tree."""

    def play(self, rng: CounterRng, count: int, cases: Sequence[int] | None = None) -> list[Any]:
        tree = self.propose(draft_batch([self.params] * count, rng))
        tree.validate()
        nodes = list(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True))
        return [tuple(nodes[start:end]) for start, end in pairwise(tree.host_offsets)]


def probability(nodes: Sequence[tuple[int, int]], law: ProposalLaw, q: Conditional) -> float:
    """Of the draws in a tree, node by node: each from q, or from what its earlier siblings left of it."""
    paths: list[tuple[int, ...]] = [()]
    drawn: dict[int, list[int]] = {}
    product = 1.0
    for token, parent in nodes[1:]:
        row = q(paths[parent]).double()
        gone = drawn.setdefault(parent, [])
        left = 1 - sum(float(row[own]) for own in gone) if law is ProposalLaw.WITHOUT_REPLACEMENT else 1.0
        product *= float(row[token]) / left
        gone.append(token)
        paths.append((*paths[parent], token))
    return product


@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("name", DRAWN)
def test_draws_have_the_law_they_claim(name, warp):
    params, proposer = WARPS[warp], DRAWN[name]
    game = Drafting(
        target=TARGET, verifier=TargetOnlyVerifier(), propose=grow(proposer, DRAFT), params=params
    )
    law = exact_law(game)
    assert sum(law.values()) == pytest.approx(1, abs=1e-9)
    for nodes, weight in law.items():
        expected = probability(nodes, proposer.law, lambda path: warped(DRAFT, path, params))
        assert weight == pytest.approx(expected, abs=EXACT)
    assert len(law) > 1


def bias(game: Game) -> float:
    """Total variation between the first two tokens and plain decoding."""
    law = exact_law(game)
    assert sum(law.values()) == pytest.approx(1, abs=1e-9)
    return total_variation(joint_law(law, game.warped, 2), decode_law(game.warped, 2))


def propose_with(proposer: TreeProposer):
    """A proposer on a model that knows marginals too."""

    def propose(batch: DraftBatch) -> TokenTree:
        return proposer.propose(CountingModel(DRAFT), batch, [proposer.max_nodes] * batch.size)

    return propose


@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("verifier", ["target_only", "token"])
@pytest.mark.parametrize("name", CHOSEN)
def test_chosen_trees_verify_exactly(name, verifier, warp):
    game = Game(
        target=TARGET,
        verifier=VERIFIERS.create(verifier),
        propose=propose_with(CHOSEN[name]),
        params=WARPS[warp],
    )
    assert bias(game) < EXACT


@pytest.mark.parametrize(
    ("name", "verifier"),
    [("dyspec", "rrsw"), ("sequoia", "rrsw"), ("static-iid", "rrs"), ("chain-confident", "token")],
)
def test_drawn_trees_verify_exactly(name, verifier):
    game = Game(target=TARGET, verifier=VERIFIERS.create(verifier), propose=grow(DRAWN[name], DRAFT))
    assert bias(game) < EXACT


@pytest.mark.parametrize("verifier", ["target_only", "token"])
def test_a_shared_budget_keeps_chosen_trees_exact(verifier):
    """Whatever a neighbour drafts: here the trees of a batch compete for few nodes."""
    drafter = BudgetedDrafter(ModelDrafter(CountingModel(DRAFT), CHOSEN["eagle2"]), max_batch_nodes=5)

    def propose(batch: DraftBatch) -> TokenTree:
        # Pairs compete: the outcome of one request doesn't depend on how many others are played at once.
        trees = [drafter.propose(draft_batch([SamplingParams()] * 2, batch.rng), [4, 4])] * batch.size
        nodes = [
            list(zip(t.tokens.tolist(), t.parents.tolist(), strict=True))[1 : t.num_nodes[0]] for t in trees
        ]
        return TokenTree.from_lists(batch.roots, nodes, batch.root_positions)

    game = Game(target=TARGET, verifier=VERIFIERS.create(verifier), propose=propose)
    assert 0 < len(propose(draft_batch([SamplingParams()], CounterRng(torch.zeros(1).long()))).tokens) < 5
    assert bias(game) < EXACT
