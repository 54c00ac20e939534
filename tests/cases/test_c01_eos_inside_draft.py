"""C01: an EOS accepted in the middle of a drafted block ends the request there."""

from __future__ import annotations

import pytest
from specdec_tests.models import tiny_lm
from specdec_tests.serving import complete, drain, make_engine, scripted

from specdec.core import SamplingParams
from specdec.engine.request import FinishReason

PROMPT = [3, 1, 4, 1, 5]


def oracle() -> tuple[list[int], int]:
    """Twelve greedy tokens, and the index of a token that occurs there for the first time."""
    tokens = tiny_lm().greedy(PROMPT, 12)
    index = next(i for i in range(4, 12) if tokens[i] not in tokens[:i])
    return tokens, index


def follow(tokens: list[int], num_drafted: int):
    """A script that proposes the true continuation."""

    def script(request_id: int, committed: list[int]) -> list[int]:
        done = len(committed) - len(PROMPT)
        return tokens[done : done + num_drafted]

    return script


@pytest.mark.parametrize("num_drafted", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("how", ["model-eos", "stop-id", "several-eos"])
def test_ends_at_eos(num_drafted: int, how: str) -> None:
    tokens, index = oracle()
    stop = tokens[index]
    eos = {"model-eos": (stop,), "stop-id": (), "several-eos": (100, stop, 99)}[how]
    lm = tiny_lm(eos=eos)
    params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(stop,) if how == "stop-id" else ())
    engine = make_engine(lm.target, scripted(follow(tokens, num_drafted)))
    (request,) = complete(engine, [PROMPT], params)
    assert request.output_token_ids == tokens[: index + 1]
    assert request.finish_reason is FinishReason.STOP
    stats = request.stats
    assert stats.num_emitted + stats.num_prefill_tokens == index + 1
    assert stats.num_accepted <= stats.num_drafted


@pytest.mark.parametrize("num_drafted", [1, 4, 8])
def test_step_outputs_hold_nothing_after_eos(num_drafted: int) -> None:
    tokens, index = oracle()
    engine = make_engine(tiny_lm(eos=(tokens[index],)).target, scripted(follow(tokens, num_drafted)))
    engine.add_request(PROMPT, SamplingParams(temperature=0, max_tokens=12))
    outputs = drain(engine)
    assert [token for output in outputs for token in output.token_ids] == tokens[: index + 1]
    assert all(len(output.token_ids) == len(output.origins) for output in outputs)


def test_ignore_eos_gives_the_full_budget() -> None:
    tokens, index = oracle()
    engine = make_engine(tiny_lm(eos=(tokens[index],)).target, scripted(follow(tokens, 4)))
    (request,) = complete(engine, [PROMPT], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    assert request.output_token_ids == tokens
    assert request.finish_reason is FinishReason.LENGTH
