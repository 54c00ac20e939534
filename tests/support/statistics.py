"""Distances and tests between an observed and an expected law."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping

import torch

Law = Mapping[Hashable, float]


def total_variation(a: Law, b: Law) -> float:
    return 0.5 * sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in {*a, *b})


def chi_square_p_value(counts: Counter, expected: Law) -> float:
    """P-value of a goodness-of-fit test; cells are merged until each expects at least 5.

    An observation that the law gives no probability makes it 0.
    """
    total = counts.total()
    if any(expected.get(key, 0.0) <= 0 for key in counts):
        return 0.0
    cells: list[tuple[float, float]] = []
    rest_seen = rest_expected = 0.0
    for key, probability in sorted(expected.items(), key=lambda item: -item[1]):
        if probability * total >= 5:
            cells.append((counts[key], probability * total))
        else:
            rest_seen += counts[key]
            rest_expected += probability * total
    if rest_expected >= 5:
        cells.append((rest_seen, rest_expected))
    elif cells:
        seen, expect = cells.pop()
        cells.append((seen + rest_seen, expect + rest_expected))
    statistic = sum((seen - expect) ** 2 / expect for seen, expect in cells)
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))
