"""Drafting with the target's own rounded weights: it agrees, changes nothing, and is honest about q."""

from __future__ import annotations

import logging
from copy import deepcopy

import pytest
import torch
from specdec_tests.models import GREEDY, tiny_lm
from specdec_tests.quantised import rounded_twin
from specdec_tests.serving import complete, draft_runner, make_engine, speculate
from torch import Tensor
from transformers import PreTrainedModel

from specdec.core import SamplingBatch, SamplingParams, TokenHistory
from specdec.core.sampling import warp
from specdec.engine.step import StepResult
from specdec.models import TargetModel
from specdec.models.quantisation import Rounding

LM = tiny_lm()
PROMPTS = [[1, 2, 3, 4, 5], [7], [6] * 17]
BITS = [4, 8]


# Tokens a step; a draft that knows nothing of the target gives 1.0. A random model this small suffers from 4 bits
# more than a trained one.
@pytest.mark.parametrize(
    ("bits", "tree", "least"),
    [
        (4, "chain", 2.0),
        (4, "static", 2.0),
        (4, "best_first", 2.0),
        (8, "chain", 4.5),
        (8, "static", 4.0),
        (8, "best_first", 2.5),
    ],
)
def test_greedy_output_is_plain_decodings(bits, tree, least):
    engine = make_engine(LM.target, speculate("quantised", tree, drafter_args={"bits": bits}))
    requests = complete(engine, PROMPTS, GREEDY)
    for prompt, request in zip(PROMPTS, requests, strict=True):
        assert request.output_token_ids == LM.greedy(prompt, 40)
    steps = sum(request.stats.num_steps for request in requests)
    assert sum(request.stats.num_emitted for request in requests) / steps > least


def test_the_cache_is_its_own():
    engine = make_engine(LM.target, speculate("quantised"))
    runner = draft_runner(engine)
    assert runner.model is not LM.target
    assert runner.kv.data_ptr() != engine.target.kv.data_ptr()
    assert engine.kv_bytes == 2 * engine.target.kv_bytes


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=20, seed=1),
        SamplingParams(temperature=0.6, top_p=0.9, max_tokens=20, seed=2),
        SamplingParams(temperature=1.5, top_k=5, repetition_penalty=1.3, max_tokens=20, seed=3),
    ],
    ids=["plain", "top-p", "penalty"],
)
def test_q_is_the_law_of_the_rounded_model(bits, params):
    """Each drafted token comes with the warped distribution of a plain model with rounded weights."""
    twin = rounded_twin(LM.plain, Rounding(bits))
    engine = make_engine(
        LM.target,
        speculate(
            "quantised",
            verifier="token",
            drafter_args={"bits": bits},
            tree_args={"num_tokens": 3, "sample": True},
        ),
    )
    results: list[StepResult] = []
    engine.observers.append(lambda result, kept: results.append(result))
    (request,) = complete(engine, PROMPTS[:1], params)
    checked = 0
    for result in results:
        tree = result.tree
        if tree.q is None:
            continue
        # The root is the last token that was committed when the step began.
        text = request.token_ids[: int(tree.root_positions[0]) + 1]
        for node, row in enumerate(tree.q_row.tolist()):
            if row >= 0:
                path = tree.tokens[1 : node + 1].tolist()
                expected = warped(next_logits(twin, text + path), params, text, path)
                torch.testing.assert_close(tree.q[row], expected, rtol=1e-3, atol=1e-4)
                checked += 1
    assert checked > 10


@torch.inference_mode()
def next_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """`[1, V]`"""
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1:]


def warped(logits: Tensor, params: SamplingParams, text: list[int], path: list[int]) -> Tensor:
    """`[V]`, the law of the token after text and path."""
    num_prompt = len(PROMPTS[0])
    device = torch.device("cpu")
    history = TokenHistory(text[:num_prompt], text[num_prompt:], vocab_size=logits.shape[1], device=device)
    sampling = SamplingBatch([params], device, [history])
    return warp(logits, sampling, torch.tensor([0]), torch.tensor([path or [-1]]))[0]


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
def test_preemption_changes_no_token(sample):
    config = speculate("quantised", verifier="token", tree_args={"num_tokens": 4, "sample": sample})
    prompts = [[row, 1, row, 2] for row in range(5)]
    params = [SamplingParams(temperature=1.5 if sample else 0, max_tokens=40, seed=row) for row in range(5)]
    calm = complete(make_engine(LM.target, config), prompts, params)
    engine = make_engine(LM.target, config, num_blocks=16)
    pressed = complete(engine, prompts, params)
    assert sum(request.num_preemptions for request in pressed) > 0
    assert [r.output_token_ids for r in pressed] == [r.output_token_ids for r in calm]
    assert [r.stats for r in pressed] == [r.stats for r in calm]
    assert [engine.drafter.model.num_cached(number) for number in range(5)] == [0] * 5


@pytest.mark.parametrize(("bits", "least"), [(4, 0.25), (8, 0.75)])
def test_bfloat16_drafts_are_accepted(bits, least):
    """The dtype of real targets: packed kernels on a model whose matrices fill no tile."""
    target = TargetModel(deepcopy(LM.plain).bfloat16(), name="tiny")
    plain = complete(make_engine(target), PROMPTS, GREEDY)
    drafted = complete(
        make_engine(target, speculate("quantised", drafter_args={"bits": bits})), PROMPTS, GREEDY
    )
    num_drafted = sum(request.stats.num_drafted for request in drafted)
    assert sum(request.stats.num_accepted for request in drafted) > least * num_drafted
    # Ties may differ; the first tokens come before any.
    assert [r.output_token_ids[:3] for r in drafted] == [r.output_token_ids[:3] for r in plain]


# What is refused, what is said


def test_targets_that_do_not_run_fused_are_refused():
    with pytest.raises(ValueError, match="model 'tiny-gpt2-0' .*cannot be quantised.*use a Llama, Mistral"):
        make_engine(tiny_lm("gpt2").target, speculate("quantised"))


@pytest.mark.parametrize(
    ("args", "message"),
    [({"bits": 3}, "bits=3, expected 4 or 8"), ({"group_size": 16}, "group_size=16, expected 32, 64, 128")],
)
def test_wrong_arguments_are_refused(args, message):
    with pytest.raises(ValueError, match=message):
        make_engine(LM.target, speculate("quantised", drafter_args=args))


def test_a_target_without_kernels_is_told_so(caplog):
    target = TargetModel(deepcopy(LM.plain).double(), name="tiny")
    with caplog.at_level(logging.WARNING):
        make_engine(target, speculate("quantised"))
    assert "No 4-bit kernel for torch.float64 on cpu" in caplog.text
    caplog.clear()
    make_engine(LM.target, speculate("quantised"))
    assert not caplog.text
