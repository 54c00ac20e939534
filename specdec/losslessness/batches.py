"""A request's tokens do not depend on its company: alone, in a mixed batch, and after preemption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specdec.core import SamplingParams
from specdec.losslessness.identity import first_difference, is_tie
from specdec.losslessness.law import Tokens
from specdec.losslessness.result import CheckResult, Status
from specdec.losslessness.serving import decode, scarce_pages, seeded, tokens_of
from specdec.losslessness.subject import Subject

_FILLER_SEED = 900_000
# Pool sizes tried until requests preempt one another.
_MOST_TRIES = 6


@dataclass(frozen=True, kw_only=True)
class _Case:
    prompt: Sequence[int]
    params: SamplingParams


def batch_check(subject: Subject, requests_per_prompt: int, max_tokens: int) -> CheckResult:
    """The same requests in three kinds of company."""
    cases = [
        _Case(prompt=prompt, params=params)
        for prompt in subject.prompts
        for params in seeded(subject.sampling, range(requests_per_prompt), max_tokens)
    ]
    alone = [_run(subject, [case])[0] for case in cases]
    mixed = _mixed(subject, cases, max_tokens)
    scarce, num_preempted = _preempted(subject, cases, max_tokens)
    different = _differences(subject, cases, alone, mixed, "in a batch")
    if num_preempted:
        different += _differences(subject, cases, alone, scarce, "after preemption")
    note = f"{num_preempted} preemptions" if num_preempted else "no preemption could be brought about"
    return CheckResult(
        name="company",
        status=Status.FAIL if different else Status.PASS,
        statistic=f"{len(cases)} requests × 3",
        detail=f"{different[0]}, {len(different)} differences in all" if different else note,
        data={"num_requests": len(cases), "num_preemptions": num_preempted, "differences": different},
    )


def _run(subject: Subject, cases: Sequence[_Case]) -> list[Tokens]:
    return tokens_of(decode(subject.engine, [c.prompt for c in cases], [c.params for c in cases]))


def _mixed(subject: Subject, cases: Sequence[_Case], max_tokens: int) -> list[Tokens]:
    """Each request beside one of another length, another limit and other parameters."""
    together: list[_Case] = []
    for index, case in enumerate(cases):
        together += [_filler(subject, index, max_tokens), case]
    return _run(subject, together)[1::2]


def _filler(subject: Subject, index: int, max_tokens: int) -> _Case:
    prompt = subject.prompts[index % len(subject.prompts)]
    shorter = prompt[: 1 + index % len(prompt)]
    (params,) = seeded(subject.sampling, [_FILLER_SEED + index], 1 + (3 * index + 5) % (2 * max_tokens))
    if not subject.is_greedy:
        others = ({"temperature": 0.0}, {"temperature": 0.6, "top_p": 0.9}, {"top_k": 3}, {"min_p": 0.05})
        params = replace(params, **others[index % len(others)])
    return _Case(prompt=shorter, params=params)


def _preempted(subject: Subject, cases: Sequence[_Case], max_tokens: int) -> tuple[list[Tokens], int]:
    """All requests on a pool that is too small for them, the smallest first that leads to preemption."""
    blocks = subject.engine.blocks
    longest = max(len(case.prompt) for case in cases)
    needed = blocks.blocks_for(longest + max_tokens + subject.max_nodes)
    admitted = blocks.blocks_for(longest + 1 + subject.max_nodes)
    tokens: list[Tokens] = []
    for tried in range(_MOST_TRIES):
        with scarce_pages(subject.engine, min(max(needed, 2 * admitted) + tried, blocks.num_free)):
            requests = decode(subject.engine, [c.prompt for c in cases], [c.params for c in cases])
        tokens = tokens_of(requests)
        count = sum(request.num_preemptions for request in requests)
        if count:
            return tokens, count
    return tokens, 0


def _differences(
    subject: Subject, cases: Sequence[_Case], alone: Sequence[Tokens], other: Sequence[Tokens], where: str
) -> list[str]:
    found = []
    for case, first, second in zip(cases, alone, other, strict=True):
        if first != second and not is_tie(subject.engine, case.prompt, case.params, first, second):
            position = first_difference(first, second)
            found.append(f"seed {case.params.seed} differs at token {position} {where}")
    return found
