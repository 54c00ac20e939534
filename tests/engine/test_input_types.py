"""Wrong types are refused where they enter, by name, and a pool of one page serves what fits in it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from specdec_tests.models import tiny_lm
from specdec_tests.serving import complete, make_engine, speculate, tokens_of

from specdec.core import SamplingParams
from specdec.engine.config import EngineConfig
from specdec.models import loading


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": "5"},
        {"max_tokens": 2.5},
        {"temperature": None},
        {"temperature": "hot"},
        {"top_k": 2.5},
        {"top_k": True},
        {"top_p": "all"},
        {"min_p": None},
        {"seed": 1.5},
        {"stop_token_ids": "12"},
        {"stop_token_ids": 5},
        {"stop_token_ids": (1, "2")},
        {"min_tokens": 1.0},
        {"min_tokens": None},
        {"repetition_penalty": "high"},
        {"presence_penalty": None},
        {"frequency_penalty": True},
        {"logprobs": True},
        {"logprobs": 2.0},
        {"allowed_token_ids": {1: 2}},
        {"allowed_token_ids": (1.5,)},
        {"banned_token_ids": None},
        {"logit_bias": None},
        {"logit_bias": [1, 2]},
        {"logit_bias": {"5": 1.0}},
        {"logit_bias": {5: "1"}},
    ],
    ids=str,
)
def test_sampling_parameter_of_another_type(values):
    (name,) = values
    with pytest.raises(ValueError, match=f"{name}="):
        SamplingParams(**values)


def test_numpy_numbers_and_lists_are_fine():
    params = SamplingParams(
        max_tokens=np.int64(3), temperature=np.float32(0), top_k=np.int32(2), stop_token_ids=[np.int64(4)]
    )
    lm = tiny_lm()
    assert tokens_of(make_engine(lm.target), [np.array([1, 2, 3])], params) == [lm.greedy([1, 2, 3], 3)]


def test_numpy_numbers_in_options():
    ids = np.array([3, 5, 7])
    params = SamplingParams(
        temperature=0,
        max_tokens=4,
        presence_penalty=np.float32(2),
        logit_bias={np.int64(5): np.float64(30)},
        allowed_token_ids=list(ids),
        banned_token_ids=[ids[0]],
        min_tokens=np.int64(2),
        logprobs=np.int64(1),
    )
    (request,) = complete(make_engine(tiny_lm().target), [[1, 2]], params)
    assert request.output_token_ids[0] == 5
    assert set(request.output_token_ids) <= {5, 7}
    assert len(request.logprobs[0].top) == 1


@pytest.mark.parametrize("name", ["block_size", "num_blocks", "max_num_seqs", "max_model_len"])
@pytest.mark.parametrize("value", ["a", 2.5, 0, -1])
def test_engine_size(name, value):
    with pytest.raises(ValueError, match=f"{name}="):
        EngineConfig(**{name: value})


@pytest.mark.parametrize("prompt", [["a", "b"], [1, 2.5], [None], "12"], ids=str)
def test_prompt_of_other_things_than_ids(prompt):
    engine = make_engine(tiny_lm().target)
    with pytest.raises(ValueError, match="expected integers"):
        engine.add_request(prompt)
    assert not engine.has_work


def test_one_page_of_one_token():
    lm = tiny_lm()
    engine = make_engine(lm.target, num_blocks=1, block_size=1)
    assert engine.max_model_len == 2
    assert tokens_of(engine, [[7]], SamplingParams(temperature=0)) == [lm.greedy([7], 1)]


@pytest.mark.parametrize(
    ("tree", "arguments"),
    [("chain", {"num_tokens": "x"}), ("chain", {"num_tokens": 2.5}), ("best_first", {"max_depth": "deep"})],
    ids=str,
)
def test_tree_argument_of_another_type(tree, arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name}="):
        make_engine(tiny_lm().target, speculate("ngram", tree, tree_args=arguments))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_that_is_not_there():
    with pytest.raises(ValueError, match="device='cuda:0': torch finds no GPU"):
        loading.resolve_device("cuda:0")
