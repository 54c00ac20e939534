"""The lossy rules do what they say, and say that they are lossy."""

from __future__ import annotations

import pytest
import torch
from specdec_tests.laws import constant, draft_batch, fixed_tree, outcomes_of, random_table, target_probs

from specdec.core import CounterRng, SamplingParams
from specdec.verifiers.entropy_gate import EntropyGateVerifier
from specdec.verifiers.synthetic import SyntheticVerifier, geometric_rate
from specdec.verifiers.target_only import TargetOnlyVerifier
from specdec.verifiers.typical import TypicalVerifier

COUNT = 4000
CHAIN = [(0, 0), (1, 1), (2, 2), (0, 3)]


def play(verifier, tree, target, params=None, count=COUNT):
    """The outcomes of one request under `count` seeds."""
    batch = draft_batch([params or SamplingParams()] * count, CounterRng(torch.arange(count)))
    drafted = fixed_tree(tree)(batch)
    p = target_probs(drafted, target, batch.sampling)
    return outcomes_of(drafted, verifier.verify(drafted, p, batch.rng))


# p = (.6, .3, .1) has entropy 0.898 and exp(-H) = 0.407.
SURE = constant(0.6, 0.3, 0.1)


@pytest.mark.parametrize(
    ("epsilon", "delta", "kept"),
    [(0.09, 0.3, {0, 1, 2}), (0.5, 0.3, {0, 1}), (0.5, 1.0, {0}), (1.0, 1.0, {0})],
)
def test_typical_keeps_tokens_above_its_threshold(epsilon, delta, kept):
    verifier = TypicalVerifier(epsilon=epsilon, delta=delta)
    for token in range(3):
        outcomes = play(verifier, [(token, 0)], SURE, count=20)
        assert {bool(outcome.path) for outcome in outcomes} == {token in kept}


def test_typical_keeps_the_longest_path():
    tree = [(0, 0), (1, 0), (0, 2), (2, 1)]
    (outcome,) = {o.path for o in play(TypicalVerifier(epsilon=0.2), tree, SURE, count=20)}
    # Node 4 carries a token below the threshold; 2 -> 3 goes deeper than 1.
    assert outcome == (2, 3)


def test_typical_draws_the_next_token_from_p():
    tokens = torch.tensor([outcome.tokens[-1] for outcome in play(TypicalVerifier(), [(0, 0)], SURE)])
    assert tokens.bincount(minlength=3).div(COUNT).tolist() == pytest.approx([0.6, 0.3, 0.1], abs=0.03)


def test_a_gate_that_never_opens_is_target_only():
    target = random_table(5, 4)
    tree = [(0, 0), (1, 0), (2, 1), (3, 2), (0, 4)]
    assert play(EntropyGateVerifier(gate=1e9), tree, target) == play(TargetOnlyVerifier(), tree, target)


def test_an_open_gate_keeps_any_likely_child():
    tree = [(2, 0), (1, 0)]
    outcomes = play(EntropyGateVerifier(gate=0.5, ratio=0.4), tree, SURE)
    # 2 only when drawn, 1 (p = .3, half of the largest) in every other case.
    paths = torch.tensor([outcome.path[0] for outcome in outcomes])
    assert paths.bincount(minlength=3).div(COUNT).tolist() == pytest.approx([0, 0.1, 0.9], abs=0.03)


def test_a_sure_target_closes_the_gate():
    outcomes = play(EntropyGateVerifier(gate=0.9, ratio=0.4), [(1, 0)], SURE)
    assert sum(bool(outcome.path) for outcome in outcomes) / COUNT == pytest.approx(0.3, abs=0.03)


def test_synthetic_survival():
    survival = [0.9, 0.5, 0.2]
    lengths = torch.tensor([len(o.path) for o in play(SyntheticVerifier(survival=survival), CHAIN, SURE)])
    for k, expected in enumerate([*survival, 0.0], start=1):
        assert float((lengths >= k).float().mean()) == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("tau", [1.0, 1.7, 3.2, 5.0])
def test_synthetic_tau(tau):
    lengths = [len(outcome.tokens) for outcome in play(SyntheticVerifier(tau=tau), CHAIN, SURE)]
    assert sum(lengths) / COUNT == pytest.approx(tau, abs=0.08)


def test_synthetic_follows_the_leftmost_path_at_temperature_0():
    tree = [(1, 0), (0, 0), (2, 1)]
    outcomes = play(SyntheticVerifier(tau=3), tree, SURE, SamplingParams(temperature=0), count=5)
    assert {outcome.path for outcome in outcomes} == {(1, 3)}
    assert {outcome.tokens for outcome in outcomes} == {(1, 2, 0)}


def test_synthetic_takes_what_a_short_path_offers():
    assert {len(o.path) for o in play(SyntheticVerifier(tau=4), [(0, 0)], SURE, count=20)} == {1}
    assert {len(o.path) for o in play(SyntheticVerifier(tau=4), [], SURE, count=20)} == {0}


def test_geometric_rate():
    rate = geometric_rate(1.5, torch.tensor([1, 2, 5, 60]))
    sums = [sum(float(r) ** k for k in range(1, n + 1)) for r, n in zip(rate, [1, 2, 5, 60], strict=True)]
    assert sums == pytest.approx([1.0, 1.5, 1.5, 1.5])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SyntheticVerifier(), "tau=None, survival=None"),
        (lambda: SyntheticVerifier(tau=2, survival=[0.5]), "give one of them"),
        (lambda: SyntheticVerifier(tau=0.5), "tau=0.5"),
        (lambda: SyntheticVerifier(tau="two"), "tau='two'"),
        (lambda: SyntheticVerifier(survival=[0.5, 0.6]), "never rise"),
        (lambda: SyntheticVerifier(survival=[]), "survival=\\[\\]"),
        (lambda: SyntheticVerifier(survival="0.5"), "survival='0.5'"),
        (lambda: TypicalVerifier(epsilon=0), "epsilon=0"),
        (lambda: TypicalVerifier(delta="x"), "delta='x'"),
        (lambda: EntropyGateVerifier(gate=-1), "gate=-1"),
        (lambda: EntropyGateVerifier(ratio=0), "ratio=0"),
    ],
)
def test_wrong_arguments_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
