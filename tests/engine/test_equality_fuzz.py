"""Invariant 1: in float32, greedy output equals plain decoding's for every drafter, tree, verifier and mix."""

from __future__ import annotations

import random
import time

import pytest
from specdec_tests.models import tiny_lm
from specdec_tests.serving import make_engine, speculate, tokens_of

from specdec.core import SamplingParams

DRAFTERS = ["ngram", "early_exit", "self", "small_lm"]
TREES = {
    "chain": [{"num_tokens": k} for k in (1, 2, 5, 8)] + [{"num_tokens": 4, "sample": True}],
    "best_first": [{"num_nodes": 33, "max_depth": 5}, {"num_nodes": 7, "branching": 3}],
    "static": [{}],
}
SECONDS = 60


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.timeout(240)
def test_random_scenarios(seed: int) -> None:
    chance = random.Random(seed)
    deadline = time.monotonic() + SECONDS / 4
    scenarios = 0
    while time.monotonic() < deadline or scenarios < 6:
        _scenario(chance)
        scenarios += 1


def _scenario(chance: random.Random) -> None:
    lm = tiny_lm(chance.choice(["llama", "qwen3"]))
    drafter, tree = chance.choice(DRAFTERS), chance.choice(list(TREES))
    arguments = chance.choice(TREES[tree])
    verifier = chance.choice(["greedy", "target_only", "token"])
    drafter_args = {"model": tiny_lm(seed=1).target} if drafter == "small_lm" else {}
    speculative = speculate(drafter, tree, verifier, drafter_args=drafter_args, tree_args=arguments)
    block_size = chance.choice([1, 4, 16])
    # From roomy to so small that requests are preempted; one longest request always fits.
    num_blocks = -(-(90 + chance.choice([0, 30, 400])) // block_size)
    engine = make_engine(
        lm.target,
        speculative,
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=56,
        max_num_seqs=chance.choice([1, 3, 8]),
        max_num_batched_tokens=chance.choice([16, 64, 4096]),
    )
    prompts = [
        [chance.randrange(lm.target.vocab_size) for _ in range(chance.choice([1, 2, 3, 7, 16, 17, 30]))]
        for _ in range(chance.randint(1, 6))
    ]
    params = [SamplingParams(temperature=0, max_tokens=chance.choice([1, 2, 9, 24])) for _ in prompts]
    expected = [
        lm.greedy(prompt, min(param.max_tokens or 0, 56 - len(prompt)))
        for prompt, param in zip(prompts, params, strict=True)
    ]
    assert tokens_of(engine, prompts, params) == expected, (drafter, tree, arguments, verifier, block_size)
