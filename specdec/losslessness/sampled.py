"""The joint law of the first tokens of many seeded requests, against the target's own.

Each case, a prompt with a way of drawing, is tested at several lengths: a mistake of one decision shows best in
short outputs, one that only joint laws have in longer ones. The same tests of all cases together see what is small
everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from specdec.core import SamplingParams
from specdec.engine.engine import Engine
from specdec.losslessness.chi_square import MIN_EXPECTED, ChiSquare, expected_variation, pool, total_variation
from specdec.losslessness.law import TargetLaw, Tokens, target_law
from specdec.losslessness.result import CheckResult, Status, p_text
from specdec.losslessness.subject import Subject

SHORTEST, LONGEST = 2, 4
"""Lengths that are tested. The first token comes from the prompt alone; drafts begin with the second."""
# No two samples of a run share a seed: not the cases, not a repetition, not the members of a matrix.
SEEDS_A_CASE = 2**24
SEEDS_A_MEMBER = 2**5 * SEEDS_A_CASE
_FRESH_SEEDS = 2**14 * SEEDS_A_MEMBER
SEEDS_A_RUN = 2 * _FRESH_SEEDS


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A prompt, a way of drawing, and what plain decoding makes of it."""

    name: str
    prompt: Tokens
    params: SamplingParams
    law: TargetLaw


@dataclass(kw_only=True, eq=False)
class Samples:
    """Outputs of many seeds of a subject as it stands, so broken ones too."""

    subject: Subject
    cases: Sequence[Case]
    first_seed: int
    tokens: list[list[Tokens]] = field(init=False)
    """Of each case."""

    def __post_init__(self) -> None:
        self.tokens = [[] for _ in self.cases]

    @property
    def per_case(self) -> int:
        return len(self.tokens[0])

    def extend(self, count: int) -> None:
        """Decodes `count` more requests a case; the i-th of a case has the same seed in every run."""
        for index, (case, tokens) in enumerate(zip(self.cases, self.tokens, strict=True)):
            start = self.first_seed + index * SEEDS_A_CASE + len(tokens)
            tokens += self.subject.draw(
                self.subject.engine, case.prompt, case.params, range(start, start + count), LONGEST
            )

    def tests(self) -> dict[str, ChiSquare]:
        """One test a case and length, and one a length over all cases; keys are for people."""
        found: dict[str, ChiSquare] = {}
        for length in range(SHORTEST, LONGEST + 1):
            own = [
                case.law.test(tokens, length) for case, tokens in zip(self.cases, self.tokens, strict=True)
            ]
            found.update(
                (f"{case.name}, {length} tokens", test) for case, test in zip(self.cases, own, strict=True)
            )
            if len(own) > 1:
                found[all_cases(length)] = pool(own)
        return found

    def agrees_with(self, others: Samples) -> bool:
        """Whether every token of the seeds that both have is the same."""
        count = min(self.per_case, others.per_case)
        return all(a[:count] == b[:count] for a, b in zip(self.tokens, others.tokens, strict=True))

    def worst(self) -> tuple[str, float]:
        """The test with the smallest p-value."""
        name, test = min(self.tests().items(), key=lambda item: item[1].p_value)
        return name, test.p_value

    def distance(self) -> tuple[float, float]:
        """Mean total variation from the target's law over the cases, and what chance alone would give."""
        seen, chance = 0.0, 0.0
        for case, tokens in zip(self.cases, self.tokens, strict=True):
            cells = case.law.cells(LONGEST)
            seen += total_variation(case.law.count(tokens, LONGEST), cells)
            chance += expected_variation(cells, len(tokens))
        return seen / len(self.cases), chance / len(self.cases)


def all_cases(length: int) -> str:
    """Name of the test over all cases."""
    return f"all cases, {length} tokens"


def num_tests(num_cases: int) -> int:
    """Tests that `Samples.tests` makes."""
    return (LONGEST + 1 - SHORTEST) * (num_cases + (num_cases > 1))


def make_case(
    plain: Engine, name: str, prompt: Sequence[int], params: SamplingParams, num_samples: int = 4096
) -> Case:
    """A case, its law taken from plain decoding; what so many samples can't tell apart is not looked at."""
    law = target_law(plain, prompt, params, length=LONGEST, min_mass=min(MIN_EXPECTED / num_samples, 0.05))
    return Case(name=name, prompt=tuple(prompt), params=params, law=law)


def law_check(samples: Samples, plan: Sequence[int], threshold: float, seconds: float) -> CheckResult:
    """Samples until the time is over, then tests; what fails is repeated with fresh seeds and twice the samples.

    Args:
        samples: of the subject as it is; filled here.
        plan: requests a case of each round, as `rounds` gives them.
        threshold: p-value below which a test fails.
        seconds: after which no other round begins.
    """
    subject = samples.subject
    end = time.perf_counter() + seconds
    for count in plan:
        begun = time.perf_counter()
        samples.extend(count)
        # The next round takes up to twice as long.
        if 3 * time.perf_counter() - 2 * begun > end:
            break
    decisive = samples
    if not subject.verifier.lossy and samples.worst()[1] < threshold:
        decisive = Samples(subject=subject, cases=samples.cases, first_seed=samples.first_seed + _FRESH_SEEDS)
        decisive.extend(2 * samples.per_case)
    name, worst = decisive.worst()
    distance, chance = samples.distance()
    status = Status.FAIL if worst < threshold else Status.PASS
    detail = f"distance {distance:.3f}, chance alone {chance:.3f}"
    return CheckResult(
        name="law",
        status=Status.LOSSY if subject.verifier.lossy else status,
        statistic=f"{p_text(worst)}, {len(samples.cases)} × {samples.per_case} requests",
        detail=f"{name} ({p_text(worst)}); {detail}" if status is Status.FAIL else detail,
        data={
            "first_seed": samples.first_seed,
            "num_samples": samples.per_case,
            "repeated": decisive is not samples,
            "p_value": worst,
            "distance": distance,
            "distance_by_chance": chance,
            "cases": [_case_data(case) for case in samples.cases],
            "tests": {
                key: {**asdict(test), "p_value": test.p_value} for key, test in decisive.tests().items()
            },
        },
    )


def rounds(total: int, wave: int) -> list[int]:
    """Sizes of doubling rounds that add up to `total`, the first one at most a wave."""
    sizes = [min(wave, total)]
    while sum(sizes) < total:
        sizes.append(min(sum(sizes), total - sum(sizes)))
    return sizes


def _case_data(case: Case) -> dict[str, Any]:
    return {
        "name": case.name,
        "prompt": list(case.prompt),
        "temperature": case.params.temperature,
        "top_k": case.params.top_k,
        "top_p": case.params.top_p,
        "num_cells": len(case.law.cells(case.law.length)),
    }
