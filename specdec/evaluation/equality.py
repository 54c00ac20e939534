"""Does speculation reproduce plain decoding? Identical, a tie within rounding, or a bug.

At the first differing token the target's logits after the common prefix are computed again, by a forward of that
prefix. The difference is a tie if both tokens lie within rounding of the largest logit there: several rows in one
forward are summed in another order than one row, which moves logits by a few units in the last place. Rounding
means 4 units in the last place of the largest logit's magnitude for 16-bit types, and 1e-4 for float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from specdec.core import SamplingBatch, SamplingParams, TokenHistory
from specdec.core.logits import change_logits
from specdec.engine.engine import Engine
from specdec.engine.request import FinishReason
from specdec.engine.step import StepResult
from specdec.evaluation.variant import RequestRecord

_ULPS = 4
_FLOAT32_TOLERANCE = 1e-4


class Verdict(Enum):
    """How an output relates to plain decoding's. `different` is a difference that sampling may explain."""

    IDENTICAL = "identical"
    TIE = "tie"
    BUG = "bug"
    DIFFERENT = "different"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A verdict, and for a tie or a bug where and by how much."""

    verdict: Verdict
    position: int | None = None
    """Index of the first differing output token."""
    gap: float | None = None
    """Distance of the lesser of the two tokens' logits from the largest logit."""
    tolerance: float | None = None


def compare(
    plain: RequestRecord,
    other: RequestRecord,
    engine: Engine | None,
    params: SamplingParams | None = None,
) -> Comparison:
    """Compares the outputs of one prompt.

    Args:
        plain: plain decoding's.
        other: the speculative one.
        engine: decodes plainly and greedily, to judge differences; None reports them as `different`.
        params: what both were decoded with; None if nothing changed the logits before the argmax.
    """
    if FinishReason.ERROR in (plain.finish_reason, other.finish_reason):
        return Comparison(verdict=Verdict.FAILED)
    if plain.token_ids == other.token_ids:
        return Comparison(verdict=Verdict.IDENTICAL)
    position = _first_difference(plain.token_ids, other.token_ids)
    if engine is None:
        return Comparison(verdict=Verdict.DIFFERENT, position=position)
    if position == min(len(plain.token_ids), len(other.token_ids)):
        # One output is the start of the other: it ended where no token can have ended it.
        return Comparison(verdict=Verdict.BUG, position=position)
    prefix = plain.prompt.token_ids + plain.token_ids[:position]
    logits = next_logits(engine, prefix)
    if params is not None:
        logits = _changed(logits, params, plain.prompt.token_ids, plain.token_ids[:position], engine)
    return judge(logits, plain.token_ids[position], other.token_ids[position], position)


def judge(logits: Tensor, first: int, second: int, position: int) -> Comparison:
    """Tie or bug, given the logits `[V]` from which one variant took one token and the other another."""
    largest = float(logits.max())
    gap = largest - min(float(logits[first]), float(logits[second]))
    tolerance = rounding(largest, logits.dtype)
    verdict = Verdict.TIE if gap <= tolerance else Verdict.BUG
    return Comparison(verdict=verdict, position=position, gap=gap, tolerance=tolerance)


def rounding(magnitude: float, dtype: torch.dtype) -> float:
    """Difference of two logits of this magnitude that rounding explains."""
    if dtype.itemsize > 2:
        return _FLOAT32_TOLERANCE
    exponent = math.frexp(magnitude)[1] - 1 if magnitude else 0
    return _ULPS * torch.finfo(dtype).eps * 2.0**exponent


def next_logits(engine: Engine, token_ids: Sequence[int]) -> Tensor:
    """The target's logits `[V]` after a prefix, from one prefill."""
    seen: list[Tensor] = []

    def keep(result: StepResult, _num_kept: Sequence[int]) -> None:
        seen.append(result.p.logits[result.tree.roots[0]].clone())

    observers, engine.observers = engine.observers, [keep]
    try:
        request_id = engine.add_request(token_ids, SamplingParams(max_tokens=1, temperature=0.0))
        while engine.has_work:
            engine.step()
        engine.pop_finished(request_id)
    finally:
        engine.observers = observers
    return seen[-1]


def _changed(
    logits: Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], engine: Engine
) -> Tensor:
    """Logits `[V]` after the request's bias, masks and penalties, in their own dtype."""
    history = TokenHistory(
        prompt, output, vocab_size=len(logits), device=logits.device, end_ids=engine.end_ids(params)
    )
    sampling = SamplingBatch([params], logits.device, [history])
    no_path = torch.empty(1, 0, dtype=torch.int64, device=logits.device)
    row = torch.zeros(1, dtype=torch.int64, device=logits.device)
    return change_logits(logits.unsqueeze(0), sampling, row, no_path)[0].to(logits.dtype)


def _first_difference(first: Sequence[int], second: Sequence[int]) -> int:
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))
