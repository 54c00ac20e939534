"""Intervals: the bootstrap over prompts, and percentiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number with its bootstrap interval; the bounds are None where a single unit gives no spread."""

    value: float
    low: float | None = None
    high: float | None = None


class Bootstrap:
    """Percentile intervals of statistics that are functions of sums over units.

    All statistics of one object see the same resamples, so they are paired.

    Args:
        num_units: prompts, or batches where prompts were decoded together.
        resamples: how often the units are drawn with replacement.
        confidence: probability content of the interval.
        seed: of the draws.
    """

    def __init__(
        self, num_units: int, *, resamples: int = 10_000, confidence: float = 0.95, seed: int = 0
    ) -> None:
        self.num_units = num_units
        self.tail = (1 - confidence) / 2
        # How often each unit is drawn: all that a sum depends on.
        shares = np.full(num_units, 1 / max(num_units, 1))
        self._counts = np.random.default_rng(seed).multinomial(num_units, shares, size=resamples)  # [R, n]

    def estimate(
        self, columns: Sequence[Sequence[float]], statistic: Callable[..., Array]
    ) -> Estimate | None:
        """Value and interval of `statistic(*sums)`.

        Args:
            columns: C columns of one value a unit; the statistic gets one array of sums for each of them.
            statistic: element-wise function of C arrays; NaN where it is not defined.

        Returns:
            None where the statistic is not defined on the whole sample.
        """
        units = np.asarray(columns, dtype=np.float64).T  # [n, C]
        with np.errstate(divide="ignore", invalid="ignore"):
            value = float(statistic(*units.sum(axis=0)))
            resampled = statistic(*(self._counts @ units).T)  # [R]
        if not np.isfinite(value):
            return None
        defined = resampled[np.isfinite(resampled)]
        if self.num_units < 2 or not len(defined):
            return Estimate(value=value)
        low, high = np.quantile(defined, [self.tail, 1 - self.tail])
        return Estimate(value=value, low=float(low), high=float(high))


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linearly interpolated percentile; None of nothing."""
    return float(np.percentile(values, percent)) if len(values) else None
