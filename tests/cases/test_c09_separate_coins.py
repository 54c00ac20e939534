"""C09: draft noise, acceptance coin and correction draw do not share a random number."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from specdec_tests.laws import Coins, Game, constant, exact_law, grow, joint_law
from specdec_tests.statistics import chi_square_p_value

from specdec.core import CounterRng
from specdec.drafters.trees.chain import ChainProposer
from specdec.verifiers.token_rejection import TokenRejectionVerifier

P = (0.2, 0.5, 0.3)
GAME = Game(
    target=constant(*P),
    verifier=TokenRejectionVerifier(),
    propose=grow(ChainProposer(1, sample=True), constant(0.6, 0.2, 0.2)),
)
NUM_TRIALS = 40_000


class NodesIgnored(Coins):
    """Acceptance and correction share a coin; the draft has its own."""

    def key(self, position, node, stream):
        return (stream == 0,)


def first_token(coins: type[Coins]) -> list[float]:
    law = joint_law(exact_law(GAME, coins), GAME.warped, 1)
    return [law.get((token,), 0.0) for token in range(3)]


def test_exact_law():
    assert first_token(Coins) == pytest.approx(P, abs=1e-6)


def test_seeded_trials():
    outcomes: Counter[int] = Counter()
    for start in range(0, NUM_TRIALS, 20_000):
        rng = CounterRng(torch.arange(start, start + 20_000))
        outcomes.update(outcome.tokens[0] for outcome in GAME.play(rng, 20_000))
    assert outcomes.total() == NUM_TRIALS
    assert chi_square_p_value(outcomes, dict(enumerate(P))) > 1e-4
    assert max(abs(outcomes[token] / NUM_TRIALS - p) for token, p in enumerate(P)) < 0.005


def test_a_shared_coin_gives_its_known_bias():
    assert first_token(NodesIgnored) == pytest.approx([0.2, 0.45, 0.35], abs=1e-6)
