"""C08: a token the target gives no probability is rejected even by a coin of exactly 0."""

from __future__ import annotations

import pytest
import torch
from specdec_tests.laws import ConstantCoin, constant, draft_batch, fixed_tree, outcomes_of, target_probs
from specdec_tests.models import tiny_lm
from specdec_tests.serving import complete, make_engine, speculate

from specdec.core import CounterRng, ProposalLaw, SamplingParams
from specdec.verifiers.registry import VERIFIERS

Q = torch.tensor([[0.6, 0.0, 0.4, 0.0]])


@pytest.mark.parametrize("coin", [0.0, 1 - 2.0**-53], ids=["first-coin", "last-coin"])
@pytest.mark.parametrize("drafted", [0, 3], ids=["q-positive", "q-zero"])
@pytest.mark.parametrize("law", [ProposalLaw.CHAIN, ProposalLaw.DETERMINISTIC], ids=lambda law: law.value)
@pytest.mark.parametrize("verifier", ["token", "target_only"])
def test_rejected(verifier, law, drafted, coin):
    rng = ConstantCoin(coin)
    batch = draft_batch([SamplingParams()], rng)
    fields = {"q": Q, "q_row": torch.tensor([0, -1])} if law is ProposalLaw.CHAIN else {}
    tree = fixed_tree([(drafted, 0)], law=law, **fields)(batch)
    p = target_probs(tree, constant(0.0, 0.3, 0.7, 0.0), batch.sampling)
    (outcome,) = outcomes_of(tree, VERIFIERS.create(verifier).verify(tree, p, rng))
    assert outcome.path == ()
    row = p.rows(torch.tensor([0]))[0]
    assert row[outcome.tokens[0]] > 0
    assert row.log()[outcome.tokens[0]].isfinite()


@pytest.mark.parametrize("coin", [0.0, 2.0**-53, 1 - 2.0**-53])
@pytest.mark.parametrize("verifier", ["token", "target_only"])
@pytest.mark.parametrize("tree", [{"sample": True}, {}], ids=["sampled", "argmax"])
def test_whole_runs_emit_possible_tokens(monkeypatch, verifier, tree, coin):
    """Top-k removes the draft's favourites from the target; all coins are the worst ones."""
    monkeypatch.setattr(CounterRng, "uniform", ConstantCoin(coin).uniform)
    lm, draft = tiny_lm(), tiny_lm(seed=5)
    params = SamplingParams(top_k=3, max_tokens=12)
    engine = make_engine(
        lm.target,
        speculate(
            "small_lm",
            verifier=verifier,
            drafter_args={"model": draft.target},
            tree_args={"num_tokens": 3, **tree},
        ),
    )
    (request,) = complete(engine, [[5, 6, 7]], params)
    tokens = request.token_ids
    for position in range(3, len(tokens)):
        assert lm.probs(tokens[:position], params)[tokens[position]] > 0
