"""The numbers of a study, from what its variants recorded. Acceptance numbers come from `SpeculationStats` alone.

A number that is not defined (no drafts, no steps) is None, never 0. Sums are taken over prompts before they are
divided, so a long output weighs more than a short one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import reduce
from operator import add
from typing import Any

from specdec.engine.engine import Engine
from specdec.engine.metrics import SpeculationStats, StepTimes
from specdec.evaluation.equality import Comparison, Verdict
from specdec.evaluation.statistics import Bootstrap, Estimate, percentile
from specdec.evaluation.variant import BatchRecord, Variant

Metrics = dict[str, Any]


def measure(plain: Variant, speculative: Variant | None, bootstrap: Bootstrap) -> Metrics:
    """Numbers of the variants, and of speculation against plain decoding.

    Args:
        plain: plain decoding.
        speculative: the same prompts in the same batches; None if plain decoding was measured alone.
        bootstrap: over the batches.
    """
    variants = [plain] if speculative is None else [plain, speculative]
    metrics: Metrics = {variant.name: variant_metrics(variant, bootstrap) for variant in variants}
    if speculative is not None:
        metrics["speedup"] = _speedup(plain.batches, speculative.batches, bootstrap)
    return metrics


def variant_metrics(variant: Variant, bootstrap: Bootstrap) -> Metrics:
    """Acceptance, speed, latency, time shares and memory of one variant."""
    batches = variant.batches
    requests = [request for batch in batches for request in batch.requests]
    ttft = [request.ttft for request in requests if request.ttft is not None]
    itl = [seconds for request in requests for seconds in request.itl]
    return {
        "acceptance": acceptance_metrics(batches, bootstrap),
        "tokens_per_second": _json(
            bootstrap.estimate(
                [_tokens(batches), _seconds(batches)], lambda tokens, seconds: tokens / seconds
            )
        ),
        "num_tokens": sum(_tokens(batches)),
        "seconds": sum(_seconds(batches)),
        "ttft": {"p50": percentile(ttft, 50), "p95": percentile(ttft, 95)},
        "itl": {"p50": percentile(itl, 50), "p95": percentile(itl, 95)},
        "time_shares": time_shares([step.times for batch in batches for step in batch.steps]),
        "memory": memory_metrics(variant.engine),
    }


def acceptance_metrics(batches: Sequence[BatchRecord], bootstrap: Bootstrap) -> Metrics:
    """τ, acceptance rate and survival by position."""
    parts = [batch.stats for batch in batches]
    total = SpeculationStats.merge(parts)
    length = bootstrap.estimate(
        [[part.num_emitted for part in parts], [part.num_steps for part in parts]],
        lambda emitted, steps: emitted / steps,
    )
    rate = bootstrap.estimate(
        [[part.num_accepted for part in parts], [part.num_drafted for part in parts]],
        lambda accepted, drafted: accepted / drafted,
    )
    return {
        "length": _json(length),
        "rate": _json(rate),
        "survival": total.survival(),
        "conditional": total.conditional(),
        "by_rank": total.by_rank(),
        "num_steps": total.num_steps,
        "num_emitted": total.num_emitted,
        "num_drafted": total.num_drafted,
        "num_accepted": total.num_accepted,
    }


def time_shares(times: Sequence[StepTimes]) -> dict[str, float] | None:
    """Shares of the engine's time; bookkeeping is everything but models and sampling mathematics."""
    total = reduce(add, times, StepTimes())
    if total.total == 0:
        return None
    shares = {
        "draft": total.draft,
        "forward": total.forward,
        "sampling": total.verify,
        "bookkeeping": total.bookkeeping,
    }
    return {name: seconds / total.total for name, seconds in shares.items()}


def memory_metrics(engine: Engine) -> dict[str, int]:
    """Bytes of the K/V pools, and of the pages that were in use at the peak."""
    target = engine.target.kv_bytes
    drafter = engine.drafter.memory_bytes() if engine.drafter else 0
    peak, pages = engine.blocks.peak_used, engine.blocks.num_blocks
    return {
        "peak_bytes": (target + drafter) * peak // pages,
        "pool_bytes": target + drafter,
        "target_peak_bytes": target * peak // pages,
        "target_pool_bytes": target,
        "drafter_peak_bytes": drafter * peak // pages,
        "drafter_pool_bytes": drafter,
    }


def equality_metrics(comparisons: Sequence[Comparison] | None) -> Metrics:
    """Counts of the verdicts; None says that equality is not to be expected."""
    if comparisons is None:
        return {"applicable": False}
    counts = Counter(comparison.verdict for comparison in comparisons)
    return {"applicable": True, **{verdict.value: counts[verdict] for verdict in Verdict}}


def _speedup(plain: Sequence[BatchRecord], other: Sequence[BatchRecord], bootstrap: Bootstrap) -> Metrics:
    """Tokens a second over plain decoding's: of whole requests, and of the steps without a prefill."""

    def ratio(tokens: Any, seconds: Any, plain_tokens: Any, plain_seconds: Any) -> Any:
        return (tokens / seconds) / (plain_tokens / plain_seconds)

    total = bootstrap.estimate([_tokens(other), _seconds(other), _tokens(plain), _seconds(plain)], ratio)
    columns = [
        [value(batch) for batch in batches]
        for batches in (other, plain)
        for value in (lambda batch: batch.num_decode_tokens, lambda batch: batch.decode_seconds)
    ]
    return {"total": _json(total), "decode": _json(bootstrap.estimate(columns, ratio))}


def _tokens(batches: Sequence[BatchRecord]) -> list[int]:
    return [batch.num_tokens for batch in batches]


def _seconds(batches: Sequence[BatchRecord]) -> list[float]:
    return [batch.seconds for batch in batches]


def _json(estimate: Estimate | None) -> dict[str, float | None] | None:
    return None if estimate is None else asdict(estimate)
