"""C07: a correction is drawn from max(p - q, 0) divided by its sum."""

from __future__ import annotations

import pytest
from specdec_tests.laws import Game, constant, exact_law, grow, joint_law, random_table

from specdec.drafters.trees.chain import ChainProposer
from specdec.verifiers import recursive_rejection
from specdec.verifiers.token_rejection import TokenRejectionVerifier

UNIFORM = (0.25, 0.25, 0.25, 0.25)
Q = (0.4, 0.3, 0.2, 0.1)
SAMPLED = ChainProposer(1, sample=True)


def game(p: tuple[float, ...], q: tuple[float, ...]) -> Game:
    return Game(target=constant(*p), verifier=TokenRejectionVerifier(), propose=grow(SAMPLED, constant(*q)))


def first_token(own: Game) -> list[float]:
    law = joint_law(exact_law(own), own.warped, 1)
    return [law.get((token,), 0.0) for token in range(4)]


def test_honest_sampling_gives_the_target():
    assert first_token(game(UNIFORM, Q)) == pytest.approx(UNIFORM, abs=1e-6)


@pytest.mark.parametrize("p", [UNIFORM, Q], ids=["uniform", "skewed"])
def test_equal_distributions_accept_everything(p):
    law = exact_law(game(p, p))
    assert sum(weight for outcome, weight in law.items() if outcome.path) == pytest.approx(1, abs=1e-12)
    assert first_token(game(p, p)) == pytest.approx(p, abs=1e-6)


@pytest.mark.parametrize("size", [1e-8, 1e-7, 1e-6])
def test_nearly_equal_distributions(size):
    q = (0.25 + size, 0.25 - size, 0.25, 0.25)
    assert first_token(game(UNIFORM, q)) == pytest.approx(UNIFORM, abs=2 * size)


def test_disjoint_distributions_reject_everything():
    law = exact_law(game((0.5, 0.5, 0, 0), (0, 0, 0.9, 0.1)))
    assert not any(outcome.path for outcome in law)
    assert first_token(game((0.5, 0.5, 0, 0), (0, 0, 0.9, 0.1))) == pytest.approx([0.5, 0.5, 0, 0], abs=1e-6)


def test_the_row_of_the_rejected_node_is_used():
    """One row late would draw the correction from what follows the rejected token."""
    target, draft = random_table(20, 3), random_table(21, 3)
    own = Game(
        target=target, verifier=TokenRejectionVerifier(), propose=grow(ChainProposer(2, sample=True), draft)
    )
    assert first_token(own)[:3] == pytest.approx(target(()).tolist(), abs=1e-6)


def test_softmax_variant_gives_its_known_bias(monkeypatch):
    draw = recursive_rejection.draw_correction
    monkeypatch.setattr(
        recursive_rejection, "draw_correction", lambda residual, *args: draw(residual.softmax(-1), *args)
    )
    # The residual the rule passes on is not divided by its sum; the known numbers are of one that is.
    monkeypatch.setattr(recursive_rejection, "residual", lambda p, q, *masses: (p - q).clamp(min=0))
    assert first_token(game(UNIFORM, Q)) == pytest.approx([0.297, 0.297, 0.25, 0.155], abs=1e-3)
