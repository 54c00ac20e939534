"""Random streams: every coin serves one decision, streams are independent, nothing global is drawn from."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from specdec.core import Stream
from specdec.losslessness.coins import CoinLog, recorded
from specdec.losslessness.law import Tokens
from specdec.losslessness.result import CheckResult, Status, p_text
from specdec.losslessness.serving import decode, seeded, tokens_of
from specdec.losslessness.subject import Subject

NUM_TESTS = len(Stream) * (len(Stream) - 1) // 2
"""Pairs of streams at most."""
_OF_A_DECISION = frozenset({Stream.DRAFT, Stream.ACCEPT, Stream.RESIDUAL, Stream.TARGET})
# Where a rule reproduces plain decoding, a position's coin is asked for whenever the position is looked at.
_OF_A_STEP = frozenset({Stream.DRAFT, Stream.ACCEPT})


def stream_check(
    subject: Subject, requests_per_prompt: int, max_tokens: int, threshold: float
) -> CheckResult:
    """Runs the same requests twice with other global seeds, and looks at every coin of the first run."""
    with recorded(subject.engine) as log, _global_seed(1) as untouched:
        first = _run(subject, requests_per_prompt, max_tokens)
        used = not untouched()
    with _global_seed(2):
        second = _run(subject, requests_per_prompt, max_tokens)
    tests = log.dependence()
    worst = min((test.p_value for test in tests.values()), default=1.0)
    problems = _problems(subject, log)
    if used:
        problems.append("a global random generator is drawn from; ask `rng` for coins")
    if first != second:
        problems.append("a second run with the same seeds gives other tokens")
    problems += [
        f"streams {one.name} and {other.name} are not independent ({p_text(test.p_value)})"
        for (one, other), test in tests.items()
        if test.p_value < threshold
    ]
    statistic = f"{log.num_coins} coins, {p_text(worst)}" if tests else f"{log.num_coins} coins"
    return CheckResult(
        name="coins",
        status=Status.FAIL if problems else Status.PASS,
        statistic=statistic,
        detail="; ".join(problems),
        data={
            "num_coins": log.num_coins,
            "p_values": {f"{a.name}-{b.name}": test.p_value for (a, b), test in tests.items()},
            "problems": problems,
        },
    )


def _problems(subject: Subject, log: CoinLog) -> list[str]:
    problems = []
    repeated = log.repeated(_OF_A_STEP if subject.verifier.reproduces else _OF_A_DECISION)
    if repeated:
        seed, position, node, stream = repeated[0]
        problems.append(
            f"{len(repeated)} coins are asked for twice, such as {stream.name} of seed {seed}, position "
            f"{position}, node {node}"
        )
    if log.colliding():
        problems.append(f"{log.colliding()} coins of different keys are the same number")
    return problems


def _run(subject: Subject, requests_per_prompt: int, max_tokens: int) -> list[Tokens]:
    params = seeded(subject.sampling, range(requests_per_prompt * len(subject.prompts)), max_tokens)
    prompts = [prompt for prompt in subject.prompts for _ in range(requests_per_prompt)]
    return tokens_of(decode(subject.engine, prompts, params, wave=subject.wave))


@contextmanager
def _global_seed(seed: int) -> Iterator[Callable[[], bool]]:
    """Seeds the global generators, and puts their states back; yields a function that says if none was used."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        before = _global_state()
        try:
            yield lambda: _global_state() == before
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _global_state() -> tuple[object, ...]:
    numpy = np.random.get_state(legacy=False)["state"]
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy["key"].tobytes(), numpy["pos"]
