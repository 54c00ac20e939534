"""In fp32 and without temperature the engine says what plain decoding says, whatever speculates how."""

from __future__ import annotations

import os
import random
import time
from itertools import product
from typing import Any

import pytest
from specdec_tests.models import TinyLM, tiny_lm
from specdec_tests.scripts import mixed_tree, truth
from specdec_tests.serving import drain, make_engine, scripted, speculate

from specdec.core import SamplingParams
from specdec.engine.config import SpeculativeConfig

FUZZ_SECONDS = float(os.environ.get("SPECDEC_FUZZ_SECONDS", "20"))
DRAFTERS = ("ngram", "early_exit", "self", "small_lm", "small_lm-wide")
TREES: dict[str, tuple[str, dict[str, Any]]] = {
    "chain": ("chain", {"num_tokens": 4}),
    "sampled": ("chain", {"num_tokens": 3, "sample": True}),
    "static": ("static", {}),
    "best_first": ("best_first", {"num_nodes": 12, "max_depth": 5, "branching": 3}),
    "bushy": ("best_first", {"num_nodes": 40, "max_depth": 3, "branching": 12}),
}
VERIFIERS = ("greedy", "target_only", "token")


def drafter_args(name: str) -> dict[str, Any]:
    match name:
        case "early_exit":
            return {"num_layers": 2}
        case "small_lm":
            return {"model": tiny_lm(seed=1).target}
        case "small_lm-wide":
            return {"model": tiny_lm(seed=2, hidden_size=48, num_hidden_layers=1, head_dim=12).target}
        case _:
            return {}


def combination(drafter: str, tree: str, verifier: str) -> SpeculativeConfig:
    name, arguments = TREES[tree]
    return speculate(
        drafter.split("-")[0], name, verifier, drafter_args=drafter_args(drafter), tree_args=arguments
    )


def scenario(lm: TinyLM, speculative: SpeculativeConfig | None, seed: int) -> None:
    """Requests of all lengths arrive over time on a pool of a random size; each must equal the oracle."""
    chooser = random.Random(seed)
    block_size = chooser.choice([1, 2, 4, 16])
    longest = 30
    wanted = [
        (
            [chooser.randrange(lm.target.vocab_size) for _ in range(chooser.choice([1, 1, 2, 3, 5, 8, 17]))],
            chooser.choice([1, 2, 5, 12, 25]),
        )
        for _ in range(chooser.randrange(1, 7))
    ]
    if chooser.random() < 0.5:
        # Repetitive prompts, for lookup.
        wanted[0] = ([3, 4, 5, 3, 4, 5, 3, 4], 12)
    nodes = 50 if speculative else 0
    least = -(-(longest + 25 + nodes) // block_size)
    engine = make_engine(
        lm.target,
        speculative,
        block_size=block_size,
        num_blocks=chooser.randrange(least, 2 * least),
        max_num_seqs=chooser.choice([1, 2, 8]),
        max_num_batched_tokens=chooser.choice([16, 64, 4096]),
    )
    requests: dict[int, tuple[list[int], int]] = {}

    def join(_: object = None) -> None:
        while wanted and (chooser.random() < 0.5 or not engine.has_work):
            prompt, count = wanted.pop()
            params = SamplingParams(temperature=0, max_tokens=count)
            requests[engine.add_request(prompt, params)] = (prompt, count)

    join()
    outputs = drain(engine, after_step=join)
    for number, (prompt, count) in requests.items():
        request = engine.pop_finished(number)
        assert request.output_token_ids == lm.greedy(prompt, count)
        emitted = [token for output in outputs if output.request_id == number for token in output.token_ids]
        assert emitted == request.output_token_ids
        stats = request.stats
        assert stats.num_emitted + stats.num_prefill_tokens == count
        assert stats.num_accepted <= stats.num_drafted


@pytest.mark.parametrize(
    ("drafter", "tree", "verifier"), list(product(DRAFTERS, TREES, VERIFIERS)), ids=lambda name: name
)
def test_equals_plain_decoding(drafter, tree, verifier):
    scenario(tiny_lm(), combination(drafter, tree, verifier), seed=hash_of(drafter, tree, verifier))


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("script", ["right", "half-right", "wrong"])
def test_scripted_equals_plain_decoding(script, verifier):
    lm = tiny_lm()
    scripts = {"right": truth(lm, 7), "half-right": mixed_tree(lm, 12), "wrong": mixed_tree(lm, 12, right=0)}
    scenario(lm, scripted(scripts[script], verifier, max_nodes=12), seed=hash_of(script, verifier))


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "gemma3_text"])
def test_other_families_equal_plain_decoding(family):
    shape = {} if family == "gpt2" else {"head_dim": 8}
    if family == "gemma3_text":
        shape |= {"sliding_window": 6, "sliding_window_pattern": 2}
    lm = tiny_lm(family, **shape)
    for seed, (drafter, tree) in enumerate([("self", "chain"), ("early_exit", "best_first")]):
        scenario(lm, combination(drafter, tree, "target_only"), seed)
    scenario(lm, scripted(mixed_tree(lm, 12), max_nodes=12), seed=2)


def test_without_speculation():
    for seed in range(5):
        scenario(tiny_lm(), None, seed)


@pytest.mark.timeout(120 + 2 * FUZZ_SECONDS)
def test_fuzz():
    """As many random scenarios as `SPECDEC_FUZZ_SECONDS` allows, the same ones first each time."""
    choices = list(product(DRAFTERS, TREES, VERIFIERS))
    chooser = random.Random(0)
    end = time.monotonic() + FUZZ_SECONDS
    seed = 1000
    while time.monotonic() < end:
        seed += 1
        drafter, tree, verifier = chooser.choice(choices)
        scenario(tiny_lm(), combination(drafter, tree, verifier), seed)


def hash_of(*parts: str) -> int:
    """A seed that is the same in every process."""
    return random.Random("/".join(parts)).randrange(10**9)
