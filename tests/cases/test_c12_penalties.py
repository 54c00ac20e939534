"""C12: penalties see the committed tokens and the drafts on a row's own path, and nothing else."""

from __future__ import annotations

import pytest
import torch
from specdec_tests.models import tiny_lm
from specdec_tests.options import decode_with_options
from specdec_tests.scripts import half_right
from specdec_tests.serving import complete, make_engine, scripted
from torch import Tensor

from specdec.core import SamplingParams
from specdec.core.logits import counts_after
from specdec.engine.step import StepResult

LM = tiny_lm(scale=2.0)
PROMPT = [3, 1, 4] * 4
PENALTIES = {
    "frequency": {"frequency_penalty": 1.5},
    "presence": {"presence_penalty": 0.7},
    "repetition": {"repetition_penalty": 1.3},
    "together": {"frequency_penalty": 1.5, "presence_penalty": 0.7, "repetition_penalty": 1.3},
}


@pytest.mark.parametrize("num_tokens", [2, 4, 8])
@pytest.mark.parametrize("name", PENALTIES)
def test_greedy_output_is_the_oracle_s(name: str, num_tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=32, **PENALTIES[name])
    expected = decode_with_options(LM, PROMPT, params)
    assert expected != LM.greedy(PROMPT, 32), "the penalty changes nothing here"
    script = half_right([PROMPT], [expected], num_tokens, vocab_size=LM.target.vocab_size)
    (request,) = complete(make_engine(LM.target, scripted(script)), [PROMPT], params)
    assert request.output_token_ids == expected
    assert 0 < request.stats.num_accepted < request.stats.num_drafted


def test_rows_see_the_drafts_before_them_and_rejected_ones_are_forgotten() -> None:
    """History {5: 1}, drafts [7, 7]: the target, all but flat, says 5 first, then 7, then 9."""
    flat = tiny_lm(scale=0.1)
    params = SamplingParams(
        temperature=0, max_tokens=8, frequency_penalty=2.0, logit_bias={5: 10.0, 7: 9.5, 9: 9.0}
    )
    engine = make_engine(flat.target, scripted([7, 7]))
    seen: list[list[dict[int, int]]] = []
    engine.observers.append(lambda result, _: seen.append(_counts_of_rows(result)))
    request = engine.request(engine.add_request(PROMPT, params))
    engine.step()
    assert request.output_token_ids == [5]
    engine.step()
    assert seen == [[{}], [{5: 1}, {5: 1, 7: 1}, {5: 1, 7: 2}]]
    # The penalty of the accepted 7 makes 9 the best: the second 7 is rejected and leaves no trace.
    assert request.output_token_ids == [5, 7, 9]
    assert _as_dict(request.history.counts) == {5: 1, 7: 1, 9: 1}
    plain = make_engine(flat.target)
    other = plain.request(plain.add_request(PROMPT, params))
    for _ in range(3):
        plain.step()
    assert other.output_token_ids == request.output_token_ids
    assert torch.equal(other.history.counts, request.history.counts)


def _counts_of_rows(result: StepResult) -> list[dict[int, int]]:
    own = torch.zeros_like(result.tree.tokens)
    every_id = torch.arange(LM.target.vocab_size).expand(len(own), -1)
    return [_as_dict(row) for row in counts_after(result.p.sampling, own, result.tree.path_tokens, every_id)]


def _as_dict(counts: Tensor) -> dict[int, int]:
    return {token: count for token, count in enumerate(counts.tolist()) if count}
