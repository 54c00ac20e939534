"""`check`: is one combination exact? Identity, law, coins and company, and controls that show the power of the law.

False alarms: all tests of a run share `alpha` (Bonferroni), and a failed law test is repeated once with fresh seeds
and twice the samples; only what fails both times is called not exact.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from specdec.core import SamplingParams
from specdec.engine.config import SpeculativeConfig
from specdec.losslessness.batches import batch_check
from specdec.losslessness.identity import greedy_check, reproduction_check
from specdec.losslessness.law import Tokens
from specdec.losslessness.power import control_check
from specdec.losslessness.result import CheckResult, Status, Verdict, verdict
from specdec.losslessness.sampled import (
    LONGEST,
    SEEDS_A_RUN,
    Samples,
    law_check,
    make_case,
    num_tests,
    rounds,
)
from specdec.losslessness.streams import NUM_TESTS, stream_check
from specdec.losslessness.subject import Subject
from specdec.models.target import TargetModel

_STREAM_REQUESTS = 24
_FEWEST_SAMPLES = 64
# Of the time that the law and its controls have.
_LAW_SHARE = 0.4


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """How much a check does."""

    budget: float = 120.0
    """Seconds, roughly: what doesn't fit is left out of the samples, never of the list of checks."""
    alpha: float = 1e-3
    """The probability that a run calls an exact combination not exact."""
    seed: int = 0
    """Of the sampled requests: runs with different ones share none."""
    max_samples: int = 16_384
    """Requests a case at most."""

    def __post_init__(self) -> None:
        for name, valid, expected in (
            ("budget", self.budget > 0, "> 0 seconds"),
            ("alpha", 0 < self.alpha < 1, "in (0, 1)"),
            ("seed", 0 <= self.seed < 2**18, "in [0, 2**18)"),
            ("max_samples", self.max_samples >= 64, ">= 64"),
        ):
            if not valid:
                raise ValueError(f"{name}={getattr(self, name)}: expected {name} {expected}")


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What a run found."""

    combination: dict[str, Any]
    config: CheckConfig
    threshold: float
    """p-value below which one test fails: alpha over the number of tests."""
    results: Sequence[CheckResult]
    verdict: Verdict
    reasons: Sequence[str]
    seconds: float


def check(
    target: TargetModel,
    speculative: SpeculativeConfig,
    sampling: SamplingParams,
    prompts: Sequence[Sequence[int]],
    config: CheckConfig | None = None,
) -> CheckReport:
    """Checks one combination.

    Args:
        target: best in float32: exactness belongs to the algorithm, and rounding hides it.
        speculative: drafter, tree and verifier.
        sampling: how tokens are drawn.
        prompts: a few short ones as token ids.
        config: how much to do.

    Raises:
        ValueError: the parts don't fit each other, or the target can't serve a prompt.
    """
    config = config or CheckConfig()
    start = time.perf_counter()
    subject = Subject(target, speculative, sampling, prompts)
    ways = _ways_to_draw(subject)
    threshold = config.alpha / (num_tests(len(ways)) + NUM_TESTS)
    results = [greedy_check(subject, max_tokens=24)]
    begun = time.perf_counter()
    results.append(stream_check(subject, _STREAM_REQUESTS, LONGEST + 2, threshold))
    cost = (time.perf_counter() - begun) / (2 * _STREAM_REQUESTS * len(subject.prompts))
    results.append(batch_check(subject, requests_per_prompt=2, max_tokens=12))

    def left() -> float:
        return max(config.budget - (time.perf_counter() - start), 0.0)

    affordable = int(_LAW_SHARE * left() / (cost * len(ways)))
    planned = max(_FEWEST_SAMPLES, min(affordable, _most_samples(subject, config)))
    if subject.verifier.reproduces and not subject.is_greedy:
        results.append(reproduction_check(subject, num_samples=min(planned // 4, 256), length=8))
    cases = [make_case(subject.plain, *way, num_samples=planned) for way in ways]
    samples = Samples(subject=subject, cases=cases, first_seed=config.seed * SEEDS_A_RUN)
    plan = rounds(_most_samples(subject, config), min(subject.wave, max(_FEWEST_SAMPLES, planned // 4)))
    results.append(law_check(samples, plan, threshold, seconds=_LAW_SHARE * left()))
    lossy = subject.verifier.lossy
    if lossy:
        results[0] = replace(results[0], status=Status.LOSSY)
    else:
        results.append(control_check(samples, threshold, seconds=left(), budget=config.budget))
    outcome, reasons = verdict(results, lossy)
    return CheckReport(
        combination=describe(subject),
        config=config,
        threshold=threshold,
        results=results,
        verdict=outcome,
        reasons=reasons,
        seconds=time.perf_counter() - start,
    )


def describe(subject: Subject) -> dict[str, Any]:
    """The combination for a report."""
    config = subject.config
    return {
        "target": subject.target.name,
        "dtype": str(subject.target.dtype).removeprefix("torch."),
        "drafter": config.drafter,
        "drafter_args": {key: repr(value) for key, value in config.drafter_args.items()},
        "tree": config.tree,
        "tree_args": dict(config.tree_args),
        "verifier": config.verifier,
        "verifier_args": dict(config.verifier_args),
        "law": subject.law.value,
        "lossy": subject.verifier.lossy,
        "sampling": asdict(subject.sampling),
        "prompts": [list(prompt) for prompt in subject.prompts],
        "distance_p_q": subject.conditions.distance,
    }


def _ways_to_draw(subject: Subject) -> list[tuple[str, Tokens, SamplingParams]]:
    """Every prompt as asked for, and the first one with filters, which take tokens out of p and q."""
    ways = [(f"prompt {index}", prompt, subject.sampling) for index, prompt in enumerate(subject.prompts)]
    if not subject.is_greedy:
        temperature = 0.8 * subject.sampling.temperature
        filtered = replace(subject.sampling, temperature=temperature, top_k=8, top_p=0.9)
        ways.append(("prompt 0 filtered", subject.prompts[0], filtered))
    return ways


def _most_samples(subject: Subject, config: CheckConfig) -> int:
    """Requests for each way to draw. Beside equality of tokens the law is only the second witness."""
    return min(config.max_samples, 2048) if subject.verifier.reproduces else config.max_samples
