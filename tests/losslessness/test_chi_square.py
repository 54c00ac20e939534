"""The chi-square test: its p-values, its merging of rare cells, its false alarms."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specdec.losslessness.chi_square import ChiSquare, chi_square, expected_variation, pool, total_variation


@pytest.mark.parametrize(
    ("statistic", "freedom", "p_value"),
    [(3.841459, 1, 0.05), (18.307038, 10, 0.05), (149.449, 100, 0.001), (0, 3, 1.0), (5.0, 0, 1.0)],
)
def test_p_values_of_the_tables(statistic, freedom, p_value):
    test = ChiSquare(statistic=statistic, freedom=freedom, num_observed=1000)
    assert test.p_value == pytest.approx(p_value, rel=1e-4)


def test_the_statistic():
    test = chi_square({"a": 60, "b": 40}, {"a": 0.5, "b": 0.5})
    assert (test.statistic, test.freedom, test.num_observed) == (4.0, 1, 100)


def test_rare_cells_are_merged_and_nothing_is_lost():
    expected = {"a": 0.9, "b": 0.04, "c": 0.03, "d": 0.03}
    # b, c and d expect 4, 3 and 3 of 100: together they are one cell.
    test = chi_square({"a": 90, "d": 10}, expected)
    assert (test.statistic, test.freedom) == (pytest.approx(0), 1)
    # Of 30 they expect 3, too little even together: the last large cell takes them in.
    assert chi_square({"a": 20, "b": 10}, expected).freedom == 0


def test_an_impossible_observation():
    test = chi_square({"a": 10_000, "never": 1}, {"a": 1.0, "never": 0.0})
    assert math.isinf(test.statistic)
    assert test.p_value == 0
    assert pool([test, chi_square({"a": 5}, {"a": 1.0})]).p_value == 0


def test_false_alarms_come_as_often_as_stated():
    law = np.array([0.5, 0.2, 0.15, 0.1, 0.04, 0.01])
    draws = np.random.default_rng(0).multinomial(500, law, size=2000)
    p_values = [chi_square(dict(enumerate(row.tolist())), dict(enumerate(law))).p_value for row in draws]
    assert np.mean(np.array(p_values) < 0.05) == pytest.approx(0.05, abs=0.015)
    assert np.mean(p_values) == pytest.approx(0.5, abs=0.03)


def test_pooling_finds_what_is_small_everywhere():
    law, biased = {0: 0.5, 1: 0.5}, {0: 530, 1: 470}
    alone = chi_square(biased, law)
    assert alone.p_value > 0.05
    assert pool([alone] * 20).p_value < 1e-5


def test_distances():
    law = {0: 0.5, 1: 0.5}
    assert total_variation({0: 75, 1: 25}, law) == pytest.approx(0.25)
    samples = np.random.default_rng(0).multinomial(400, [0.5, 0.5], size=2000)
    mean = np.mean([total_variation(dict(enumerate(row.tolist())), law) for row in samples])
    assert expected_variation(law, 400) == pytest.approx(mean, rel=0.05)
