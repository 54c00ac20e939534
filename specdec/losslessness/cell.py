"""A cell of the matrix, all combinations of one verifier and one law, and how it is checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specdec.core import ProposalLaw, SamplingParams
from specdec.engine.engine import Engine
from specdec.losslessness.batches import batch_check
from specdec.losslessness.chi_square import ChiSquare, pool
from specdec.losslessness.controls import CONTROLS
from specdec.losslessness.identity import greedy_check, reproduction_check
from specdec.losslessness.members import Member
from specdec.losslessness.power import ControlResult, Outcome, try_control
from specdec.losslessness.result import CheckResult, Status, Verdict, verdict
from specdec.losslessness.sampled import (
    LONGEST,
    SEEDS_A_MEMBER,
    SHORTEST,
    Samples,
    all_cases,
    law_check,
    make_case,
    rounds,
)
from specdec.losslessness.streams import stream_check
from specdec.losslessness.subject import Subject, engine_sizes
from specdec.losslessness.tiny import PROMPTS, tiny_target

SAMPLING = SamplingParams(temperature=1.0)
WARPS = (
    ("temperature 1", PROMPTS[0], SAMPLING),
    ("filtered", PROMPTS[1], SamplingParams(temperature=0.8, top_k=8, top_p=0.9)),
)
# A control starts with the first number of requests a case, and gives up after the second.
_CONTROL_START, _CONTROL_SAMPLES = 256, 16_384
# Combinations of a rule and a law on which a control may show itself.
_MOST_TRIES = 3
# Lossy rules are measured, and not often.
_LOSSY_SAMPLES = 2048


@dataclass(frozen=True, kw_only=True, eq=False)
class MemberReport:
    """What was found about one combination."""

    name: str
    tree_args: Mapping[str, Any]
    results: Sequence[CheckResult]
    tests: dict[str, ChiSquare]
    verdict: Verdict
    reasons: Sequence[str]


@dataclass(kw_only=True, eq=False)
class Cell:
    """All combinations of one verifier and one law."""

    verifier: str
    law: ProposalLaw
    lossy: bool
    chosen: list[Member] = field(default_factory=list)
    reports: list[MemberReport] = field(default_factory=list)
    controls: list[ControlResult] = field(default_factory=list)

    @property
    def worst(self) -> float:
        """The smallest p-value of a combination."""
        return min((test.p_value for own in self.reports for test in own.tests.values()), default=1.0)

    def pooled(self) -> dict[int, ChiSquare]:
        """One test a length over all combinations."""
        return {
            length: pool([own.tests[all_cases(length)] for own in self.reports])
            for length in range(SHORTEST, LONGEST + 1)
        }

    def missed(self) -> list[str]:
        """Controls that bias the rule and were not noticed, and whether none had an opportunity."""
        missed = [own.name for own in self.controls if own.outcome is Outcome.MISSED]
        if not missed and not any(own.outcome is Outcome.CAUGHT for own in self.controls):
            return ["no control changed a token"]
        return [f"{name!r} was missed" for name in missed]


class CellRunner:
    """What all combinations share: the tiny target, plain decoding and its laws, and how much is done.

    Args:
        threshold: p-value below which one test fails.
        num_samples: requests of a combination for each way to draw.
    """

    def __init__(self, threshold: float, num_samples: int) -> None:
        self.target = tiny_target()
        self.plain = Engine(self.target, engine_sizes(self.target, max(map(len, PROMPTS))))
        self.threshold = threshold
        self.num_samples = num_samples
        self._cases = {
            greedy: [
                make_case(self.plain, name, prompt, replace(params, temperature=0.0) if greedy else params)
                for name, prompt, params in WARPS
            ]
            for greedy in (False, True)
        }

    def run(
        self, members: Sequence[Member], first_seed: int, lossy: bool
    ) -> tuple[list[MemberReport], list[ControlResult]]:
        """Checks the combinations of a cell, then its controls; uses `2 * len(members) * SEEDS_A_MEMBER` seeds."""
        seeds = [first_seed + index * SEEDS_A_MEMBER for index in range(2 * len(members))]
        reports = [self.check(member, seed) for member, seed in zip(members, seeds, strict=False)]
        # What has failed needs no proof that failures are noticed.
        failed = any(report.verdict is Verdict.NOT_EXACT for report in reports)
        return reports, [] if lossy or failed else self.controls(members, seeds[len(members) :])

    def check(self, member: Member, first_seed: int) -> MemberReport:
        """The checks of a single combination, with fewer samples."""
        subject = self._subject(member)
        results = [
            greedy_check(subject, max_tokens=12),
            stream_check(subject, requests_per_prompt=16, max_tokens=6, threshold=self.threshold),
            batch_check(subject, requests_per_prompt=1, max_tokens=8),
        ]
        if subject.verifier.lossy:
            results[0] = replace(results[0], status=Status.LOSSY)
        if subject.verifier.reproduces:
            results.append(reproduction_check(subject, num_samples=64, length=6))
        samples = self._samples(subject, first_seed)
        results.append(law_check(samples, [_samples_needed(subject, self.num_samples)], self.threshold, 0.0))
        outcome, reasons = verdict(results, subject.verifier.lossy)
        return MemberReport(
            name=member.name,
            tree_args=member.config.tree_args,
            results=results,
            tests=samples.tests(),
            verdict=outcome,
            reasons=reasons,
        )

    def controls(self, members: Sequence[Member], seeds: Sequence[int]) -> list[ControlResult]:
        """Each control on the combinations of a cell in turn, until one of them catches it."""
        results: dict[str, ControlResult] = {}
        for member, seed in list(zip(members, seeds, strict=True))[:_MOST_TRIES]:
            left = [control for control in CONTROLS if not _is_settled(results.get(control.name))]
            if not left:
                break
            subject = self._subject(member)
            honest = self._samples(subject, seed)
            honest.extend(_samples_needed(subject, _CONTROL_START))
            plan = rounds(_samples_needed(subject, _CONTROL_SAMPLES), honest.per_case)
            for control in left:
                result = replace(try_control(control, honest, plan, self.threshold), where=member.name)
                results[control.name] = max(result, results.get(control.name, result), key=_says_most)
        return list(results.values())

    def _subject(self, member: Member) -> Subject:
        return Subject(self.target, member.config, SAMPLING, PROMPTS, plain=self.plain)

    def _samples(self, subject: Subject, first_seed: int) -> Samples:
        return Samples(subject=subject, cases=self._cases[subject.is_greedy], first_seed=first_seed)


def _samples_needed(subject: Subject, wanted: int) -> int:
    """Requests a case: at temperature 0 all are alike, and equality of tokens leaves the law little to say."""
    if subject.is_greedy:
        return min(wanted, 16)
    if subject.verifier.lossy:
        return _LOSSY_SAMPLES
    return wanted // 2 if subject.verifier.reproduces else wanted


def _says_most(result: ControlResult) -> tuple[bool, bool, float]:
    """Order of results about one control from different combinations."""
    p_value = 1.0 if result.p_value is None else result.p_value
    return result.outcome is Outcome.CAUGHT, result.outcome is Outcome.MISSED, -p_value


def _is_settled(result: ControlResult | None) -> bool:
    return result is not None and result.outcome is Outcome.CAUGHT
