"""What a check found: results, and the verdict they add up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any


class Status(Enum):
    """How one check ended."""

    PASS = "pass"
    FAIL = "FAIL"
    WEAK = "too little power"
    """Nothing is wrong that was seen, but something wrong might not have been seen."""
    SKIP = "not applicable"
    LOSSY = "lossy"
    """A measured distance of a rule that changes the distribution on purpose."""


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """One row of the table."""

    name: str
    status: Status
    statistic: str = ""
    """The number that decided, as text."""
    detail: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    """Everything else, for the JSON report."""


class Verdict(IntEnum):
    """What the results add up to; the value is the exit code of `specdec check`."""

    EXACT = 0
    NOT_EXACT = 1
    UNDECIDED = 3
    """Too little power: 2 is wrong usage."""

    @property
    def text(self) -> str:
        return {
            Verdict.EXACT: "exact",
            Verdict.NOT_EXACT: "NOT EXACT",
            Verdict.UNDECIDED: "undecided: too little power",
        }[self]


def verdict(results: Sequence[CheckResult], lossy: bool) -> tuple[Verdict, list[str]]:
    """The verdict on a combination, and the reasons for anything but `exact`."""
    failed = [f"{result.name}: {result.detail}" for result in results if result.status is Status.FAIL]
    if lossy:
        return Verdict.NOT_EXACT, ["the verifier declares itself lossy", *failed]
    if failed:
        return Verdict.NOT_EXACT, failed
    weak = [f"{result.name}: {result.detail}" for result in results if result.status is Status.WEAK]
    return (Verdict.UNDECIDED, weak) if weak else (Verdict.EXACT, [])


def p_text(p_value: float) -> str:
    """A p-value as people write it."""
    return f"p = {p_value:.2g}" if p_value >= 1e-12 else "p < 1e-12"
