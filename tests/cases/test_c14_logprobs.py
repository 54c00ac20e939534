"""C14: each kept token has the target's log probability at its own row, accepted, corrected or added."""

from __future__ import annotations

import pytest
import torch
from specdec_tests.models import tiny_lm
from specdec_tests.scripts import half_right
from specdec_tests.serving import drain, make_engine, scripted, speculate, tokens_of

from specdec.core import SamplingParams

LM = tiny_lm(scale=2.0)
PROMPTS = [[3, 1, 4], [1, 5, 9, 2], [6, 5]]
SAMPLED = speculate("early_exit", verifier="token", tree_args={"num_tokens": 4, "sample": True})


@pytest.mark.parametrize("kind", ["scripted", "sampled-chain"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_log_softmax_of_the_target_s_row(temperature: float, kind: str) -> None:
    """K = 4; the second request ends inside a block."""
    params = [
        SamplingParams(temperature=temperature, seed=row, logprobs=3, max_tokens=count)
        for row, count in enumerate((24, 10, 23))
    ]
    config = SAMPLED
    if kind == "scripted":
        plain = tokens_of(make_engine(LM.target), PROMPTS, params)
        config = scripted(half_right(PROMPTS, plain, 4, vocab_size=LM.target.vocab_size))
    engine = make_engine(LM.target, config)
    numbers = [engine.add_request(prompt, own) for prompt, own in zip(PROMPTS, params, strict=True)]
    outputs = drain(engine)
    assert {"accepted", "correction"} <= {origin.value for output in outputs for origin in output.origins}
    for number, prompt, own in zip(numbers, PROMPTS, params, strict=True):
        request = engine.pop_finished(number)
        tokens = request.output_token_ids
        assert len(request.logprobs) == len(tokens) == own.max_tokens
        rows = LM.logits([*prompt, *tokens])[len(prompt) - 1 : -1].log_softmax(-1)
        actual = torch.tensor([entry.logprob for entry in request.logprobs])
        expected = rows[torch.arange(len(tokens)), torch.tensor(tokens)]
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
        for entry, row in zip(request.logprobs, rows, strict=True):
            values = torch.tensor([value for _, value in entry.top])
            torch.testing.assert_close(values, row.topk(3).values, atol=1e-5, rtol=0)
            assert entry.rank > 3 or entry.token_id in [token for token, _ in entry.top]
