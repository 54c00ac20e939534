"""Pearson's chi-square test of counts against an expected law, with rare cells merged."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

Cell = TypeVar("Cell", bound=Hashable)

MIN_EXPECTED = 5
"""Cells that expect less are merged: below it the statistic is not chi-square distributed."""


@dataclass(frozen=True, kw_only=True)
class ChiSquare:
    """A goodness-of-fit test."""

    statistic: float
    """Infinite if something was observed that the law gives no probability."""
    freedom: int
    """Cells after merging, less one."""
    num_observed: int

    @property
    def p_value(self) -> float:
        """Probability of a statistic at least as large under the law; 0 for an impossible observation."""
        if math.isinf(self.statistic):
            return 0.0
        if self.freedom == 0:
            return 1.0
        halves = torch.tensor([self.freedom / 2, self.statistic / 2], dtype=torch.float64)
        return float(torch.special.gammaincc(halves[0], halves[1]))

    @property
    def excess(self) -> float:
        """How far the statistic lies above its mean under the law; grows in proportion to the observations."""
        return self.statistic - self.freedom


def chi_square(counts: Mapping[Cell, int], expected: Mapping[Cell, float]) -> ChiSquare:
    """Tests counts against the probabilities of their cells.

    Args:
        counts: observations of each cell.
        expected: probability of each cell; they sum to 1.
    """
    total = sum(counts.values())
    if any(count and expected.get(key, 0.0) <= 0 for key, count in counts.items()):
        return ChiSquare(statistic=math.inf, freedom=0, num_observed=total)
    cells = _merge(
        [(counts.get(key, 0), mass * total) for key, mass in sorted(expected.items(), key=lambda i: -i[1])]
    )
    statistic = sum((seen - expect) ** 2 / expect for seen, expect in cells)
    return ChiSquare(statistic=statistic, freedom=max(len(cells) - 1, 0), num_observed=total)


def pool(tests: Sequence[ChiSquare]) -> ChiSquare:
    """One test of several independent samples: statistics and degrees of freedom add up."""
    return ChiSquare(
        statistic=sum(test.statistic for test in tests),
        freedom=sum(test.freedom for test in tests),
        num_observed=sum(test.num_observed for test in tests),
    )


def total_variation(counts: Mapping[Cell, int], expected: Mapping[Cell, float]) -> float:
    """Distance between observed shares and an expected law."""
    total = sum(counts.values())
    keys = {*counts, *expected}
    return 0.5 * sum(abs(counts.get(key, 0) / total - expected.get(key, 0.0)) for key in keys)


def expected_variation(expected: Mapping[Cell, float], num_observed: int) -> float:
    """Mean total variation of a sample of that size drawn from the law itself."""
    return sum(
        math.sqrt(mass * max(1 - mass, 0) / (2 * math.pi * num_observed)) for mass in expected.values()
    )


def _merge(cells: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Merges the cells that expect too little; cells come largest first."""
    kept = [cell for cell in cells if cell[1] >= MIN_EXPECTED]
    rare = [cell for cell in cells if 0 < cell[1] < MIN_EXPECTED]
    seen, expect = sum(cell[0] for cell in rare), sum(cell[1] for cell in rare)
    if expect >= MIN_EXPECTED or not kept:
        return [*kept, (seen, expect)] if rare else kept
    last_seen, last_expect = kept.pop()
    return [*kept, (last_seen + seen, last_expect + expect)]
