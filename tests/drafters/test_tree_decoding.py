"""Every tree in the engine: greedy output is plain decoding's, and sampled output doesn't depend on batch mates."""

from __future__ import annotations

from typing import Any

import pytest
from specdec_tests.models import tiny_lm
from specdec_tests.serving import complete, make_engine, speculate, tokens_of

from specdec.core import SamplingParams
from specdec.drafters.registry import TREES

LM = tiny_lm()
PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [7], [5, 6] * 4, [9] * 11]
WOR, IID = {"draw": "without_replacement"}, {"draw": "with_replacement"}
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "chain": ("chain", {"min_confidence": 0.05}, "token"),
    "chain-drawn": ("chain", {"sample": True, "min_confidence": 0.05}, "block"),
    "static": ("static", {"paths": "eagle1"}, "token"),
    "static-wor": ("static", WOR, "rrsw"),
    "expansion": ("expansion", {}, "target_only"),
    "expansion-iid": ("expansion", {"sizes": [2, 2, 1], **IID}, "rrs"),
    "best_first": ("best_first", {}, "token"),
    "eagle2": ("eagle2", {"num_nodes": 12, "depth": 4, "top_k": 4}, "target_only"),
    "opt_tree": ("opt_tree", {"num_nodes": 10, "max_depth": 5, "delta": 0.0}, "token"),
    "dyspec": ("dyspec", {"num_nodes": 8}, "rrsw"),
    "sequoia": ("sequoia", {"num_nodes": 8}, "traversal"),
    "ddtree": ("ddtree", {"num_nodes": 12}, "token"),
}


def drafters(tree: str) -> list[tuple[str, dict[str, Any]]]:
    if tree == "ddtree":
        return [("ngram", {})]
    # A wide early exit agrees often, so that deep and scattered paths are accepted.
    return [("ngram", {}), ("early_exit", {"num_layers": 2}), ("small_lm", {"model": tiny_lm(seed=1).target})]


def engine_of(case: str, drafter: str, args: dict[str, Any], **changes: Any):
    tree, tree_args, verifier = CASES[case]
    config = speculate(drafter, tree, verifier, drafter_args=args, tree_args=tree_args, **changes)
    return make_engine(LM.target, config, block_size=4, num_blocks=160)


def test_all_trees_are_here():
    assert {tree for tree, _, _ in CASES.values()} == set(TREES.names())


@pytest.mark.parametrize("case", CASES)
def test_greedy_output_is_plain_decoding(case):
    params = SamplingParams(temperature=0, max_tokens=20)
    for drafter, args in drafters(case):
        requests = complete(engine_of(case, drafter, args), PROMPTS, params)
        for prompt, request in zip(PROMPTS, requests, strict=True):
            assert request.output_token_ids == LM.greedy(prompt, 20), (drafter, prompt)
        assert sum(request.stats.num_drafted for request in requests) > 0
        assert drafter == "small_lm" or sum(request.stats.num_accepted for request in requests) > 0


@pytest.mark.parametrize("case", [case for case in CASES if case != "ddtree"])
def test_a_self_draft_is_accepted_down_to_a_leaf(case):
    """Where a node has children, the likeliest is among them; so every rejection is a fault of the draft cache."""
    (request,) = complete(
        engine_of(case, "self", {}), [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=30)
    )
    assert request.output_token_ids == LM.greedy([1, 2, 3], 30)
    assert request.stats.num_accepted > 0
    assert set(request.stats.conditional()) <= {1.0, None}


@pytest.mark.parametrize("case", CASES)
def test_sampled_output_does_not_depend_on_batch_mates(case):
    drafter, args = drafters(case)[-1] if case != "ddtree" else ("ngram", {})
    params = [SamplingParams(temperature=1.2, max_tokens=15, seed=seed) for seed in range(4)]
    together = tokens_of(engine_of(case, drafter, args), PROMPTS, params)
    alone = [
        tokens_of(engine_of(case, drafter, args), [prompt], [own])[0]
        for prompt, own in zip(PROMPTS, params, strict=True)
    ]
    assert together == alone
