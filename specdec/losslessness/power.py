"""Running the negative controls: what a test doesn't notice when it is there, it can't rule out when it isn't."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum

import torch

from specdec.losslessness.chi_square import ChiSquare
from specdec.losslessness.controls import CONTROLS, Control, broken
from specdec.losslessness.law import Tokens
from specdec.losslessness.result import CheckResult, Status
from specdec.losslessness.sampled import Samples, rounds
from specdec.losslessness.subject import Subject

_IDENTITY_SAMPLES, _IDENTITY_LENGTH = 256, 8


class Outcome(Enum):
    """What became of a control."""

    CAUGHT = "caught"
    MISSED = "missed"
    NO_EFFECT = "no effect"
    """It changed no token at the same seeds, so it says nothing about power."""
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True, kw_only=True)
class ControlResult:
    """What became of one control."""

    name: str
    outcome: Outcome
    p_value: float | None = None
    num_samples: int = 0
    """Requests a case."""
    where: str = ""
    """The combination it was tried on, where there are several."""
    needed: float | None = None
    """How many times as many samples would do, roughly; None if nothing points to a number."""


def control_check(honest: Samples, threshold: float, seconds: float, budget: float) -> CheckResult:
    """Every control that can bias the combination must be noticed.

    Args:
        honest: samples of the subject as it is.
        threshold: p-value below which a test fails.
        seconds: after which no other round of a control begins.
        budget: of the whole run, to say which one would do.
    """
    subject = honest.subject
    end = time.perf_counter() + seconds
    plan = rounds(honest.per_case, subject.wave)
    found = [
        try_control(control, honest, plan, threshold, has_time=lambda: time.perf_counter() < end)
        for control in CONTROLS
    ]
    caught = [result.name for result in found if result.outcome is Outcome.CAUGHT]
    missed = [result for result in found if result.outcome is Outcome.MISSED]
    status, detail = Status.PASS, f"noticed: {', '.join(caught)}"
    if missed:
        status, detail = Status.WEAK, "; ".join(_missed_text(result, budget) for result in missed)
    elif not caught:
        # At temperature 0 outputs are compared token by token: that needs no power.
        status = Status.SKIP if subject.is_greedy else Status.WEAK
        detail = "no control changed a token: nothing was drafted that could be wrong"
    return CheckResult(
        name="controls",
        status=status,
        statistic=f"{len(caught)} of {len(caught) + len(missed)} caught",
        detail=detail,
        data={"controls": [{**asdict(result), "outcome": result.outcome.value} for result in found]},
    )


def try_control(
    control: Control,
    honest: Samples,
    plan: Sequence[int],
    threshold: float,
    has_time: Callable[[], bool] = lambda: True,
) -> ControlResult:
    """Breaks the subject of honest samples and sees whether the check that decides for it notices.

    Args:
        control: what to break.
        honest: samples of the subject as it is; at least one round.
        plan: requests a case of each round; they end when the control is caught.
        threshold: p-value below which a test fails.
        has_time: whether another round may start.
    """
    subject = honest.subject
    if not control.applies(subject.conditions):
        return ControlResult(name=control.name, outcome=Outcome.NOT_APPLICABLE)
    if subject.verifier.reproduces and not subject.is_greedy:
        return _try_identity(control, subject)
    samples = Samples(subject=subject, cases=honest.cases, first_seed=honest.first_seed)
    outcome = Outcome.MISSED
    for count in plan:
        if samples.per_case and not has_time():
            break
        with broken(subject.engine, control):
            samples.extend(count)
        if samples.worst()[1] < threshold:
            outcome = Outcome.CAUGHT
            break
        if samples.agrees_with(honest):
            outcome = Outcome.NO_EFFECT
            break
    return ControlResult(
        name=control.name,
        outcome=outcome,
        p_value=samples.worst()[1],
        num_samples=samples.per_case,
        needed=_needed(list(samples.tests().values()), threshold) if outcome is Outcome.MISSED else None,
    )


def _try_identity(control: Control, subject: Subject) -> ControlResult:
    """For a rule whose tokens must be plain decoding's: any change is noticed."""

    def draw() -> list[Tokens]:
        return subject.draw(
            subject.engine, subject.prompts[0], subject.sampling, range(_IDENTITY_SAMPLES), _IDENTITY_LENGTH
        )

    honest = draw()
    with broken(subject.engine, control):
        spoiled = draw()
    outcome = Outcome.NO_EFFECT if honest == spoiled else Outcome.CAUGHT
    return ControlResult(name=control.name, outcome=outcome, num_samples=_IDENTITY_SAMPLES)


def _needed(tests: Sequence[ChiSquare], threshold: float) -> float | None:
    """The factor by which the samples must grow until some test is likely to fall below the threshold."""
    factors = [
        (_quantile(threshold, test.freedom) - test.freedom + math.sqrt(8 * test.freedom)) / test.excess
        for test in tests
        # An excess within a standard deviation or two says nothing.
        if test.freedom and test.excess > 2 * math.sqrt(2 * test.freedom)
    ]
    return min(factors, default=None)


def _quantile(p_value: float, freedom: int) -> float:
    """The statistic with that p-value."""
    low, high = 0.0, 10.0 * freedom + 1000
    half = torch.tensor(freedom / 2, dtype=torch.float64)
    while high - low > 0.01:
        middle = (low + high) / 2
        above = float(torch.special.gammaincc(half, torch.tensor(middle / 2, dtype=torch.float64))) > p_value
        low, high = (middle, high) if above else (low, middle)
    return high


def _missed_text(result: ControlResult, budget: float) -> str:
    if result.needed is None:
        return f"{result.name!r} left no trace; raise --budget well above {budget:g}"
    return f"{result.name!r} was missed; --budget {1.5 * budget * max(result.needed, 1):.0f} should do"
