"""Bootstrap intervals and percentiles."""

import numpy as np
import pytest

from specdec.evaluation.statistics import Bootstrap, percentile


def ratio(a, b):
    return a / b


def test_value_is_the_ratio_of_sums_not_the_mean_of_ratios():
    estimate = Bootstrap(2).estimate([[10, 1], [1, 1]], ratio)
    assert estimate.value == pytest.approx(5.5)


def test_equal_units_leave_no_spread():
    estimate = Bootstrap(20).estimate([[6.0] * 20, [3.0] * 20], ratio)
    assert (estimate.value, estimate.low, estimate.high) == (2.0, 2.0, 2.0)


def test_interval_of_a_mean_agrees_with_the_normal_approximation():
    values = np.random.default_rng(1).normal(10, 2, size=400)
    estimate = Bootstrap(400).estimate([values, np.ones(400)], ratio)
    error = 1.96 * values.std() / 20
    assert estimate.low == pytest.approx(values.mean() - error, abs=0.03)
    assert estimate.high == pytest.approx(values.mean() + error, abs=0.03)


def test_two_units_have_three_possible_samples():
    estimate = Bootstrap(2, resamples=2000).estimate([[1, 3], [1, 1]], ratio)
    assert (estimate.low, estimate.value, estimate.high) == (1.0, 2.0, 3.0)


def test_pairs_stay_together():
    # The speedup is exactly 2 on every unit, however much the units differ.
    seconds = [1.0, 10.0, 100.0]
    estimate = Bootstrap(3).estimate([seconds, [value / 2 for value in seconds]], ratio)
    assert (estimate.low, estimate.high) == (2.0, 2.0)


def test_the_seed_decides():
    columns = [list(range(1, 30)), [1] * 29]
    first, again, other = (Bootstrap(29, seed=seed).estimate(columns, ratio) for seed in (0, 0, 1))
    assert first == again
    assert first.low != other.low


def test_confidence_widens_the_interval():
    columns = [list(range(1, 30)), [1] * 29]
    narrow, wide = (Bootstrap(29, confidence=c).estimate(columns, ratio) for c in (0.5, 0.99))
    assert wide.low < narrow.low < narrow.high < wide.high


def test_one_unit_has_a_value_but_no_interval():
    estimate = Bootstrap(1).estimate([[4], [2]], ratio)
    assert (estimate.value, estimate.low, estimate.high) == (2.0, None, None)


@pytest.mark.parametrize("columns", [[[0, 0], [0, 0]], [[1, 1], [0, 0]]])
def test_what_is_not_defined_is_none(columns):
    assert Bootstrap(2).estimate(columns, ratio) is None


def test_samples_on_which_it_is_not_defined_are_left_out():
    estimate = Bootstrap(2, resamples=500).estimate([[0, 2], [0, 1]], ratio)
    assert (estimate.low, estimate.high) == (2.0, 2.0)


def test_percentile():
    assert percentile([1, 2, 3, 4], 50) == 2.5
    assert percentile([], 50) is None
