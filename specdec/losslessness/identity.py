"""Equality of tokens: greedy outputs with plain decoding's, and sampled ones where a rule promises them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch

from specdec.core import CounterRng, SamplingParams, TokenTree
from specdec.data import TokenizedPrompt
from specdec.engine.engine import Engine
from specdec.engine.request import FinishReason, Request
from specdec.evaluation.equality import Verdict, compare, rounding
from specdec.evaluation.variant import RequestRecord
from specdec.losslessness.law import Tokens
from specdec.losslessness.result import CheckResult, Status
from specdec.losslessness.serving import decode, seeded, tokens_of
from specdec.losslessness.subject import Subject
from specdec.verifiers.base import Acceptance, TargetProbs, Verifier

_REPLAYS = 32
_MOST_JUDGED = 8


def greedy_check(subject: Subject, max_tokens: int) -> CheckResult:
    """Greedy outputs equal plain decoding's; a difference is a tie within rounding, or a bug."""
    params = seeded(
        replace(subject.sampling, temperature=0.0), [0] * len(subject.prompts), max_tokens=max_tokens
    )
    plain = decode(subject.plain, subject.prompts, params)
    ours = decode(subject.engine, subject.prompts, params)
    found = [
        compare(_record(first), _record(second), subject.plain)
        for first, second in zip(plain, ours, strict=True)
    ]
    counts = Counter(comparison.verdict for comparison in found)
    bug = next((c for c in found if c.verdict is Verdict.BUG), None)
    detail = f"{counts[Verdict.TIE]} ties within rounding" if counts[Verdict.TIE] else ""
    if bug is not None:
        gap = "" if bug.gap is None else f", {bug.gap:.3g} below the largest logit"
        detail = f"{counts[Verdict.BUG]} outputs differ, the first at token {bug.position}{gap}"
    stats = [request.stats for request in ours]
    return CheckResult(
        name="greedy",
        status=Status.FAIL if bug else Status.PASS,
        statistic=f"{counts[Verdict.IDENTICAL]} of {len(found)} equal",
        detail=detail,
        data={
            "num_tokens": max_tokens,
            "num_drafted": sum(own.num_drafted for own in stats),
            "num_accepted": sum(own.num_accepted for own in stats),
            "comparisons": [{**asdict(c), "verdict": c.verdict.value} for c in found],
        },
    )


def reproduction_check(subject: Subject, num_samples: int, length: int) -> CheckResult:
    """The rule's own promise: the same tokens as it draws without any draft, seed by seed."""
    differing: list[tuple[Tokens, int, int]] = []
    bugs = 0
    for prompt in subject.prompts:
        plain = subject.draw(subject.alike, prompt, subject.sampling, range(num_samples), length)
        ours = subject.draw(subject.engine, prompt, subject.sampling, range(num_samples), length)
        wrong = [seed for seed, (a, b) in enumerate(zip(plain, ours, strict=True)) if a != b]
        for seed in wrong[:_MOST_JUDGED]:
            params = replace(subject.sampling, seed=seed)
            bugs += not is_tie(subject.alike, prompt, params, plain[seed], ours[seed])
        differing += [(prompt, seed, first_difference(plain[seed], ours[seed])) for seed in wrong]
    total = num_samples * len(subject.prompts)
    detail = f"{len(differing)} within rounding" if differing else ""
    if bugs:
        _, seed, position = differing[0]
        detail = (
            f"{len(differing)} outputs differ from plain decoding's, such as seed {seed} at token {position}"
        )
    return CheckResult(
        name="same tokens",
        status=Status.FAIL if bugs else Status.PASS,
        statistic=f"{total - len(differing)} of {total} equal",
        detail=detail,
        data={"num_samples": total, "num_tokens": length, "num_different": len(differing)},
    )


def is_tie(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, first: Tokens, second: Tokens
) -> bool:
    """Whether rounding of the target's logits explains that a request gave one output, then another.

    The request is repeated with noise of that size on the logits: a tie falls either way. Repeated without, it must
    be the same every time, or it is no function of its seed and no rounding is to blame.
    """
    end = first_difference(first, second) + 1
    copies = seeded(params, [params.seed or 0] * _REPLAYS, max_tokens=max(len(first), end))

    def replay() -> set[Tokens]:
        return set(tokens_of(decode(engine, [prompt] * _REPLAYS, copies, enough=end), end))

    if len(replay()) > 1:
        return False
    runner = engine.step_runner
    verifier, runner.verifier = runner.verifier, _Shaken(runner.verifier)
    try:
        return {first[:end], second[:end]} <= replay()
    finally:
        runner.verifier = verifier


def first_difference(first: Sequence[int], second: Sequence[int]) -> int:
    """Index of the first differing token."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


class _Shaken(Verifier):
    """A rule on logits with noise of the size of rounding."""

    def __init__(self, inner: Verifier) -> None:
        self.inner = inner
        self.noise = torch.Generator().manual_seed(0)

    def verify(self, tree: TokenTree, p: TargetProbs, rng: CounterRng) -> Acceptance:
        size = rounding(float(p.logits.abs().max()), p.logits.dtype)
        noise = size * torch.randn(p.logits.shape, generator=self.noise).to(p.logits)
        return self.inner.verify(tree, TargetProbs(p.logits + noise, tree, p.sampling), rng)


def _record(request: Request) -> RequestRecord:
    prompt = TokenizedPrompt(id=str(request.request_id), token_ids=request.prompt_token_ids, text="")
    reason = request.finish_reason or FinishReason.ERROR
    return RequestRecord(prompt=prompt, token_ids=request.output_token_ids, finish_reason=reason)
