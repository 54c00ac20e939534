"""Hidden states and logits on pages equal those of the unmodified model, whatever the batch looks like."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from specdec.kernels.tree_attention.builder import Request
from specdec.models import TargetModel

PROMPT = [5, 17, 3, 88, 42, 9, 61, 23, 70, 11, 34, 56, 2, 90, 13, 27, 45]
# Neither breadth-first nor depth-first, with two siblings that lie far apart.
PARENTS = (-1, 0, 1, 0, 3, 1, 2, 3, 0)
NODES = [45, 7, 19, 33, 51, 66, 72, 84, 95]


@torch.inference_mode()
def plain_logits(model, tokens: Sequence[int]) -> Tensor:
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def path(node: int) -> list[int]:
    """Tokens from the root to the node."""
    return [] if node < 0 else [*path(PARENTS[node]), NODES[node]]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_whole_prompt(pair, make_pool, block_size):
    model, target = pair
    pool = make_pool(target, [len(PROMPT)], block_size)
    logits = pool.logits(PROMPT, [Request(cached=0, prefill=len(PROMPT) - 1)])
    assert logits.shape == (len(PROMPT), target.vocab_size)
    assert_close(logits, plain_logits(model, PROMPT))


@pytest.mark.parametrize("chunk", [1, 5])
def test_chunks(pair, make_pool, chunk):
    model, target = pair
    pool = make_pool(target, [len(PROMPT)], block_size=4)
    logits = [
        pool.logits(PROMPT[start : start + chunk], [Request(start, len(PROMPT[start : start + chunk]) - 1)])
        for start in range(0, len(PROMPT), chunk)
    ]
    assert_close(torch.cat(logits), plain_logits(model, PROMPT))


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_trees_and_prefill_in_one_batch(pair, make_pool, block_size):
    model, target = pair
    context = PROMPT[:-1]
    pool = make_pool(target, [len(context) + len(NODES), 12, 30], block_size)
    # The tree's context is committed first, together with an unrelated decode.
    pool.forward([*context, 8], [Request(0, len(context), parents=()), Request(0)])
    batch = [Request(len(context), parents=PARENTS), Request(1, 3, parents=()), Request(0, 5, (-1, 0))]
    third = [31, 32, 33, 34, 35, 36, 37]
    logits = pool.logits([*NODES, 60, 61, 62, *third], batch)
    for node in range(len(NODES)):
        assert_close(logits[node], plain_logits(model, context + path(node))[-1])
    assert_close(logits[len(NODES) :][:3], plain_logits(model, [8, 60, 61, 62])[1:])
    assert_close(logits[len(NODES) + 3 :], plain_logits(model, third))


@pytest.mark.parametrize("depth", [1, 3])
def test_early_exit_equals_a_shallower_model(pair, make_pool, tiny, depth):
    model, target = pair
    pool = make_pool(target, [len(PROMPT)], block_size=4)
    requests = [Request(cached=0, prefill=len(PROMPT) - 1)]
    hidden = pool.forward(PROMPT, requests, num_layers=depth).hidden
    shallow = AutoModelForCausalLM.from_config(_shallow_config(model.config, depth)).eval()
    shallow.load_state_dict({name: model.state_dict()[name] for name in shallow.state_dict()})
    assert_close(target.logits(hidden), plain_logits(shallow, PROMPT))
    assert torch.all(pool.kv[depth:] == 1e4), "layers beyond the exit must not run"
    assert_close(pool.logits(PROMPT, requests), plain_logits(model, PROMPT))


def _shallow_config(config, depth):
    fields = {**config.to_dict(), "num_hidden_layers": depth}
    for name in ("layer_types", "mlp_layer_types"):
        if fields.get(name):
            fields[name] = fields[name][:depth]
    return type(config)(**fields)


def test_taps_equal_hidden_states(pair, make_pool):
    model, target = pair
    pool = make_pool(target, [len(PROMPT)], block_size=4)
    taps = (2, 0, target.num_layers, 2)
    output = pool.forward(PROMPT, [Request(cached=0, prefill=len(PROMPT) - 1)], taps=taps)
    with torch.inference_mode():
        states = model(
            input_ids=torch.tensor([PROMPT]), use_cache=False, output_hidden_states=True
        ).hidden_states
    assert_close(output.taps[0], states[2][0])
    assert_close(output.taps[1], states[0][0])
    assert_close(output.taps[3], states[2][0])
    # transformers reports the last hidden state after the final norm, taps are before it.
    final_norm = getattr(model.get_decoder(), "norm", None) or model.get_decoder().ln_f
    with torch.inference_mode():
        assert_close(final_norm(output.taps[2]), states[-1][0])
    assert_close(output.hidden, states[-1][0])


@pytest.mark.parametrize("fuse", [False, True])
def test_taps_under_early_exit(tiny, make_pool, fuse):
    target = TargetModel(tiny("llama"), name="llama", fuse=fuse)
    pool = make_pool(target, [len(PROMPT)], block_size=4)
    requests = [Request(cached=0, prefill=len(PROMPT) - 1)]
    full = pool.forward(PROMPT, requests, taps=(1, 2))
    early = pool.forward(PROMPT, requests, num_layers=2, taps=(1, 2))
    assert_close(early.taps[0], full.taps[0])
    assert_close(early.taps[1], full.taps[1])


def test_fused_equals_stock_in_bfloat16_up_to_rounding(tiny, make_pool):
    outputs = []
    for fuse in (False, True):
        target = TargetModel(tiny("qwen3").bfloat16(), name="qwen3", fuse=fuse)
        pool = make_pool(target, [len(PROMPT)], block_size=4)
        outputs.append(pool.logits(PROMPT, [Request(cached=0, prefill=len(PROMPT) - 1)]).float())
    error = (outputs[0] - outputs[1]).norm() / outputs[0].norm()
    assert error < 0.03


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.5] * 8,
            "long_factor": [4.0] * 8,
            "original_max_position_embeddings": 32,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotary_scaling(tiny, make_pool, rope):
    model = tiny("llama", rope_parameters=rope)
    target = TargetModel(tiny("llama", rope_parameters=rope), name="llama")
    assert target.fused
    assert target.max_context == (32 if rope["rope_type"] == "longrope" else 128)
    tokens = [(7 * i + 3) % 97 for i in range(target.max_context)]
    pool = make_pool(target, [len(tokens)], block_size=16)
    assert_close(pool.logits(tokens, [Request(0, len(tokens) - 1)]), plain_logits(model, tokens))
