"""Distances and tests between an observed and an expected law."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping

from specdec.losslessness.chi_square import chi_square

Law = Mapping[Hashable, float]


def total_variation(a: Law, b: Law) -> float:
    return 0.5 * sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in {*a, *b})


def chi_square_p_value(counts: Counter, expected: Law) -> float:
    """P-value of the product's own test, which `tests/losslessness/test_chi_square.py` checks."""
    return chi_square(counts, expected).p_value
