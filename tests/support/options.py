"""Sampling options, slow and obvious: one token of one row at a time, the oracle of `change_logits`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from specdec_tests.models import TinyLM
from torch import Tensor

from specdec.core import CounterRng, SamplingBatch, SamplingParams, Stream
from specdec.core.sampling import draw_law

OPTIONS = {
    "repetition": {"repetition_penalty": 1.3},
    "repetition-below-1": {"repetition_penalty": 0.8},
    "presence": {"presence_penalty": 0.7},
    "frequency": {"frequency_penalty": 1.5},
    "negative": {"frequency_penalty": -0.3, "presence_penalty": -0.5},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 1.5},
    "bias": {"logit_bias": {3: 4.0, 7: -100.0, 50: 2.5}},
    "allowed": {"allowed_token_ids": tuple(range(0, 60, 3))},
    "banned": {"banned_token_ids": tuple(range(1, 100, 3))},
    "min_tokens": {"min_tokens": 9},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.6,
        "logit_bias": {2: 1.5, 8: 3.0, 9: -2.0},
        "allowed_token_ids": tuple(range(80)),
        "banned_token_ids": (4, 5, 6),
        "min_tokens": 7,
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 0.01,
    },
}
"""By name, for a vocabulary of about 100 ids."""


def changed_row(
    row: Tensor,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    end_ids: Collection[int],
) -> Tensor:
    """`[V]` float32, the logits after one request's options, given all tokens before."""
    values = row.float().tolist()
    for token, value in enumerate(values):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            value = float("-inf")
        if token in params.banned_token_ids:
            value = float("-inf")
        if token in end_ids and len(output) < params.min_tokens:
            value = float("-inf")
        value += params.logit_bias.get(token, 0.0)
        if token in prompt or token in output:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        count = list(output).count(token)
        value -= params.frequency_penalty * count
        value -= params.presence_penalty * (count > 0)
        values[token] = value
    return torch.tensor(values)


def decode_with_options(
    lm: TinyLM, prompt: Sequence[int], params: SamplingParams, end_ids: Collection[int] = ()
) -> list[int]:
    """Plain decoding with transformers' forward and `changed_row`; sampled tokens take the position's coin."""
    output: list[int] = []
    rng, zero = CounterRng(torch.tensor([params.seed or 0])), torch.zeros(1, dtype=torch.int64)
    while len(output) < (params.max_tokens or 0) and not (output and output[-1] in end_ids):
        known = [*prompt, *output]
        row = changed_row(lm.logits(known)[-1], params, prompt, output, end_ids).unsqueeze(0)
        law = draw_law(row, SamplingBatch([params], torch.device("cpu")), zero)[0].double()
        coin = rng.uniform(zero, torch.tensor([len(known)]), zero, Stream.TARGET)
        cumulative = law.cumsum(0)
        output.append(int(torch.searchsorted(cumulative, coin * cumulative[-1], right=True)))
    return output
