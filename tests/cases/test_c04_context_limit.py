"""C04: drafts are clipped to the room that is left; nothing is ever written at or past the context limit."""

from __future__ import annotations

import pytest
from specdec_tests.models import tiny_lm
from specdec_tests.serving import complete, make_engine, speculate

from specdec.core import SamplingParams
from specdec.engine.request import FinishReason

LIMIT = 32
UNLIMITED = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
SPECULATIONS = {
    "ngram": speculate("ngram"),
    "self": speculate("self"),
    "early-exit": speculate("early_exit"),
    "tree": speculate("early_exit", "best_first"),
    "static": speculate("self", "static"),
}


@pytest.mark.parametrize("name", SPECULATIONS)
@pytest.mark.parametrize("length", range(24, LIMIT))
def test_total_is_the_limit(name: str, length: int) -> None:
    # The model's own context is the limit: position 32 has no embedding it was made for.
    lm = tiny_lm(family="gpt2", max_position_embeddings=LIMIT, vocab_size=60, scale=6.0)
    prompt = [(7 * i) % 50 for i in range(length)]
    (request,) = complete(make_engine(lm.target, SPECULATIONS[name]), [prompt], UNLIMITED)
    assert request.error is None
    assert len(request.token_ids) == LIMIT
    assert request.finish_reason is FinishReason.LENGTH
    assert request.output_token_ids == lm.greedy(prompt, LIMIT - length)


@pytest.mark.parametrize("name", ["self", "early-exit"])
def test_preempted_near_the_limit(name: str) -> None:
    lm = tiny_lm(max_position_embeddings=LIMIT)
    engine = make_engine(lm.target, SPECULATIONS[name], num_blocks=12)
    prompts = [[i, 2 * i, 3] * 4 for i in range(1, 5)]
    requests = complete(engine, prompts, UNLIMITED)
    assert sum(request.num_preemptions for request in requests) > 0
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.output_token_ids == lm.greedy(prompt, LIMIT - len(prompt))


@pytest.mark.parametrize("length", [LIMIT, LIMIT + 1, 3 * LIMIT])
def test_full_prompt_is_refused(length: int) -> None:
    engine = make_engine(tiny_lm(max_position_embeddings=LIMIT).target, SPECULATIONS["ngram"])
    with pytest.raises(ValueError, match=f"{length} tokens and max_model_len={LIMIT}"):
        engine.add_request([1] * length, UNLIMITED)
    assert not engine.has_work
