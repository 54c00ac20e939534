"""Every legal pair of proposer and verifier keeps the target's joint law; misuse is caught by the same walk."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from specdec_tests.laws import (
    Coins,
    Game,
    constant,
    decode_law,
    exact_law,
    fixed_tree,
    grow,
    joint_law,
    random_table,
)
from specdec_tests.statistics import total_variation

from specdec.core import ProposalLaw, SamplingParams, TokenTree
from specdec.drafters.base import DraftBatch
from specdec.drafters.models.ngram import NGramModel
from specdec.drafters.trees.best_first import BestFirstProposer
from specdec.drafters.trees.chain import ChainProposer
from specdec.drafters.trees.static import StaticProposer
from specdec.verifiers.greedy import greedy_walk
from specdec.verifiers.target_only import TargetOnlyVerifier
from specdec.verifiers.token_rejection import TokenRejectionVerifier

EXACT, BIASED = 1e-6, 1e-3
WARPS = {
    "plain": SamplingParams(),
    "temperature": SamplingParams(temperature=0.6),
    "top-k": SamplingParams(top_k=2),
    "top-p": SamplingParams(temperature=1.3, top_p=0.8),
    "mixed": SamplingParams(temperature=0.7, top_k=2, top_p=0.9, min_p=0.1),
    "greedy": SamplingParams(temperature=0),
}
VERIFIERS = {"token": TokenRejectionVerifier(), "target_only": TargetOnlyVerifier()}
PROPOSERS = {
    "sampled-1": ChainProposer(1, sample=True),
    "sampled-2": ChainProposer(2, sample=True),
    "argmax-2": ChainProposer(2),
    "static": StaticProposer([(0,), (1,), (0, 0), (0, 1), (1, 0)]),
    "best-first": BestFirstProposer(num_nodes=4, max_depth=2, branching=2),
}
TREES = {
    "siblings": [(0, 0), (1, 0)],
    "all-tokens": [(2, 0), (0, 0), (1, 0)],
    "duplicates": [(0, 0), (0, 0), (1, 0)],
    "duplicate-branches": [(0, 0), (0, 0), (1, 1), (1, 2), (2, 2)],
    "not-breadth-first": [(0, 0), (1, 1), (2, 0), (0, 3), (2, 1)],
    "root-only": [],
}


def bias(game: Game, length: int = 2, coins: type[Coins] = Coins) -> float:
    """Total variation between the first tokens of a game and plain decoding."""
    law = exact_law(game, coins)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    return total_variation(joint_law(law, game.warped, length), decode_law(game.warped, length))


@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_shipped_pairs_are_exact(proposer, verifier, warp):
    game = Game(
        target=random_table(1, vocab_size=3),
        verifier=VERIFIERS[verifier],
        propose=grow(PROPOSERS[proposer], random_table(2, vocab_size=3)),
        params=WARPS[warp],
    )
    assert bias(game) < EXACT


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("tree", TREES)
def test_any_deterministic_tree_is_exact(tree, verifier):
    game = Game(
        target=random_table(3, vocab_size=3), verifier=VERIFIERS[verifier], propose=fixed_tree(TREES[tree])
    )
    assert bias(game, length=3) < EXACT


def test_the_draft_may_be_warped_otherwise_than_the_target():
    draft = grow(ChainProposer(2, sample=True), random_table(5, vocab_size=4))

    def sharper(batch: DraftBatch) -> TokenTree:
        sampling = replace(batch.sampling, params=[SamplingParams(temperature=0.4, top_k=3)] * batch.size)
        return draft(replace(batch, sampling=sampling))

    game = Game(target=random_table(4, vocab_size=4), verifier=TokenRejectionVerifier(), propose=sharper)
    assert bias(game) < EXACT


@pytest.mark.parametrize("name", ["sampled-2", "argmax-2", "static"])
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_ngram_drafts_are_exact(verifier, name):
    model = NGramModel(max_n=2, min_n=1, vocab_size=3)

    def look_up(batch: DraftBatch) -> TokenTree:
        batch = replace(batch, token_ids=[[0, 0, 1, 0]] * batch.size)
        model.extend(batch)
        return PROPOSERS[name].propose(model, batch, [5] * batch.size)

    game = Game(target=random_table(6, vocab_size=3), verifier=VERIFIERS[verifier], propose=look_up)
    law = exact_law(game)
    assert total_variation(joint_law(law, game.warped, 2), decode_law(game.warped, 2)) < EXACT
    if name == "sampled-2":
        # What followed the suffix [0]: 1 the last time, 0 the time before.
        first = {token: sum(law[o] for o in law if o.drafted[0] == token) for token in range(3)}
        assert first == pytest.approx({0: 1 / 3, 1: 2 / 3, 2: 0}, abs=EXACT)


def test_acceptance_is_one_minus_the_distance():
    p, q = constant(0.5, 0.3, 0.2), constant(0.2, 0.3, 0.5)
    game = Game(target=p, verifier=TokenRejectionVerifier(), propose=grow(ChainProposer(1, sample=True), q))
    accepted = sum(weight for outcome, weight in exact_law(game).items() if outcome.path)
    assert accepted == pytest.approx(0.7, abs=EXACT)


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_top_k_children_are_accepted_with_their_mass(verifier):
    p, q = constant(0.5, 0.3, 0.2), constant(0.2, 0.3, 0.5)
    top_2 = grow(StaticProposer([(0,), (1,)]), q)
    game = Game(target=p, verifier=VERIFIERS[verifier], propose=top_2)
    accepted = sum(weight for outcome, weight in exact_law(game).items() if outcome.path)
    assert accepted == pytest.approx(0.5, abs=EXACT)


def test_a_drawn_token_may_be_verified_as_a_point_mass():
    """Its q is then irrelevant: exact as well, only accepted less often."""
    chain = grow(ChainProposer(1, sample=True), random_table(2, vocab_size=3))

    def forget_q(batch: DraftBatch) -> TokenTree:
        laws = [ProposalLaw.DETERMINISTIC] * batch.size
        return replace(chain(batch), q=None, q_row=None, laws=laws)

    game = Game(target=random_table(1, vocab_size=3), verifier=VERIFIERS["token"], propose=forget_q)
    assert bias(game) < EXACT


# Negative controls: if the walk passed these, it would pass anything.


class TestMisuseIsBiased:
    target = staticmethod(random_table(1, vocab_size=3))
    draft = staticmethod(random_table(2, vocab_size=3))

    def game(self, propose, verifier=VERIFIERS["token"], **fields) -> Game:
        return Game(target=self.target, verifier=verifier, propose=propose, **fields)

    def test_argmax_drafts_with_a_soft_q(self):
        sampled, argmax = (grow(ChainProposer(1, sample=flag), self.draft) for flag in (True, False))

        def lie(batch: DraftBatch) -> TokenTree:
            return replace(sampled(batch), tokens=argmax(batch).tokens)

        assert bias(self.game(lie)) > BIASED

    def test_q_before_warping(self):
        sampled = grow(ChainProposer(1, sample=True), self.draft)

        def lie(batch: DraftBatch) -> TokenTree:
            tree = sampled(batch)
            return replace(tree, q=self.draft(()).expand_as(tree.q))

        assert bias(self.game(lie, params=SamplingParams(temperature=0.5))) > BIASED

    def test_chains_cut_where_the_drawn_token_is_unlikely(self):
        chain = grow(ChainProposer(1, sample=True), self.draft)

        def peek(batch: DraftBatch) -> TokenTree:
            tree = chain(batch)
            drawn = tree.q.gather(1, tree.tokens[1::2].unsqueeze(1)).squeeze(1)
            keep = (drawn > self.draft(()).median()).tolist()
            nodes = [
                node
                for row, kept in enumerate(keep)
                for node in ([2 * row, 2 * row + 1] if kept else [2 * row])
            ]
            return replace(
                tree,
                tokens=tree.tokens[nodes],
                parents=tree.parents[nodes],
                depth=tree.depth[nodes],
                q_row=tree.q_row[nodes],
                score=tree.score[nodes],
                draft_slots=tree.draft_slots[nodes],
                num_nodes=[1 + kept for kept in keep],
            )

        assert bias(self.game(peek)) > BIASED

    def test_one_coin_for_all_purposes(self):
        class OneStream(Coins):
            def key(self, position, node, stream):
                return (position,)

        assert bias(self.game(grow(ChainProposer(1, sample=True), self.draft)), coins=OneStream) > BIASED

    def test_greedy_rule_for_a_sampled_request(self):
        class Greedy(TargetOnlyVerifier):
            def verify(self, tree, p, rng):
                return greedy_walk(tree, p)

        assert bias(self.game(fixed_tree([(0, 0)]), verifier=Greedy())) > BIASED


def test_walk_finds_narrow_pieces():
    probs = torch.tensor([1e-6, 0.4, 1e-5, 0.6 - 1.1e-5])
    game = Game(target=lambda path: probs, verifier=TargetOnlyVerifier(), propose=fixed_tree([]))
    law = {outcome.tokens[0]: weight for outcome, weight in exact_law(game).items()}
    assert [law[token] for token in range(4)] == pytest.approx(probs.tolist(), abs=1e-8)
