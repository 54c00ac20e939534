"""Plain decoding with a rule's own way of drawing, and coins that a check can replace."""

from __future__ import annotations

import pytest
import torch

from specdec.core import CounterRng, SamplingParams
from specdec.engine.config import EngineConfig, SpeculativeConfig
from specdec.engine.engine import Engine
from specdec.losslessness.serving import decode, tokens_of

SIZES = EngineConfig(num_kv_tokens=1024, max_model_len=60)
PARAMS = [SamplingParams(seed=seed, max_tokens=12, ignore_eos=True) for seed in range(6)]
PROMPTS = [(1, 2, 3)] * len(PARAMS)


@pytest.mark.parametrize("verifier", ["target_only", "gumbel", "token"])
def test_no_drafter_decodes_plainly(target, verifier):
    engine = Engine(target, SIZES, SpeculativeConfig(drafter="none", verifier=verifier))
    assert engine.drafter is None
    assert engine.max_nodes == 0
    requests = decode(engine, PROMPTS, PARAMS)
    assert {request.stats.num_drafted for request in requests} == {0}
    assert {request.stats.acceptance_length for request in requests} == {1.0}
    plain = tokens_of(decode(Engine(target, SIZES), PROMPTS, PARAMS))
    assert (tokens_of(requests) == plain) == (verifier != "gumbel")
    assert len({*tokens_of(requests)}) > 1


def test_a_greedy_rule_without_a_drafter_refuses_to_sample(target):
    engine = Engine(target, SIZES, SpeculativeConfig(drafter="none", verifier="greedy"))
    with pytest.raises(ValueError, match="temperature"):
        engine.add_request([1], SamplingParams())


def test_coins_can_be_replaced(target):
    class Zero(CounterRng):
        def uniform(self, requests, positions, nodes, stream):
            return torch.zeros(requests.shape, dtype=torch.float64)

    engine = Engine(target, SIZES)
    before = tokens_of(decode(engine, PROMPTS, PARAMS))
    engine.step_runner.make_rng = Zero
    assert len(set(tokens_of(decode(engine, PROMPTS, PARAMS)))) == 1
    engine.step_runner.make_rng = CounterRng
    assert tokens_of(decode(engine, PROMPTS, PARAMS)) == before
