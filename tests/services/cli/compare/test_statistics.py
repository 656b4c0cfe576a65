"""Interquartile mean, its bootstrap interval, and bands of curves."""

import numpy as np
import pytest

from services.cli.compare.statistics import COVERAGE, band, estimate, interquartile_mean, interval

pytestmark = pytest.mark.pure


def test_the_interquartile_mean_leaves_out_a_quarter_at_each_end():
    assert interquartile_mean(np.array([100.0, 1, 2, 3, 4, 5, 6, -50])) == 3.5
    assert interquartile_mean(np.array([9.0, 1, 2, 3, -9])) == 2.0


def test_below_four_values_it_is_the_mean():
    assert interquartile_mean(np.array([0.0, 0.0, 9.0])) == 3.0


def test_each_point_of_a_curve_is_trimmed_for_itself():
    values = np.array([[0.0, 9.0], [1.0, 2.0], [2.0, 1.0], [9.0, 0.0]])
    assert interquartile_mean(values).tolist() == [1.5, 1.5]


def test_the_interval_covers_the_mean_as_often_as_it_says():
    """Of 300 samples of 20 values about 95 % have an interval with the true centre; the bootstrap is a little too narrow."""
    rng = np.random.default_rng(1)
    samples = rng.normal(size=(20, 300))
    low, high = interval(samples)
    assert 0.88 < np.mean((low <= 0.0) & (high >= 0.0)) < 0.98


@pytest.mark.parametrize("count", COVERAGE)
def test_the_interval_of_few_seeds_covers_the_mean_as_often_as_a_comparison_says(count):
    low, high = interval(np.random.default_rng(2).normal(size=(count, 800)))
    assert 100 * np.mean((low <= 0.0) & (high >= 0.0)) == pytest.approx(COVERAGE[count], abs=4)


def test_the_interval_of_three_seeds_is_as_wide_as_they_are():
    """All three draws are the same seed in 1 of 27 resamples, more than the 2.5 % of a tail."""
    found = estimate([10.0, 20.0, 40.0])
    assert (found.low, found.high, found.count) == (10.0, 40.0, 3)
    assert found.value == pytest.approx(70 / 3)
    assert found == estimate([10.0, 20.0, 40.0])


def test_one_seed_has_no_interval_and_none_no_estimate():
    assert (estimate([5.0]).low, estimate([5.0]).value) == (None, 5.0)
    assert estimate([]) is None


CURVES = [([0.0, 10.0], [0.0, 10.0]), ([4.0, 8.0], [2.0, 6.0])]


def test_a_band_begins_where_all_curves_have_begun_and_keeps_the_last_values_that_are_held():
    found = band(CURVES, held=[False, True], points=7)
    assert found.x.tolist() == [4, 5, 6, 7, 8, 9, 10]
    assert found.value.tolist() == [3, 4, 5, 6, 7, 7.5, 8]
    assert found.low.tolist() == [2, 3, 4, 5, 6, 6, 6]
    assert found.high.tolist() == [4, 5, 6, 7, 8, 9, 10]


def test_a_band_ends_where_the_first_curve_ends_that_is_not_held():
    """A run that was killed at 20 % was drawn flat to the end."""
    found = band([*CURVES, ([0.0, 6.0], [0.0, 6.0])], held=[False, True, False], points=3)
    assert (found.x.tolist(), found.value.tolist(), found.count) == ([4, 5, 6], [10 / 3, 13 / 3, 16 / 3], 3)
    assert band([*CURVES, ([0.0, 3.0], [0.0, 6.0])], held=[True, True, False]).count == 0
    assert band([*CURVES, ([0.0, 3.0], [0.0, 6.0])], held=[True, True, True]).x[-1] == 10


def test_a_band_does_not_depend_on_the_order_of_the_points():
    """Two evaluators: the slow one reports an older policy later."""
    mixed = band([([1.0, 3.0, 2.0, 4.0], [10.0, 200.0, 100.0, 300.0])], held=[False], points=7)
    assert mixed.x.tolist() == [1, 1.5, 2, 2.5, 3, 3.5, 4]
    assert mixed.value.tolist() == [10, 55, 100, 150, 200, 250, 300]


def test_curves_without_points_are_left_out_of_a_band():
    assert band([([], [])], held=[False]).count == 0
    assert band([([], []), ([1.0, 2.0], [3.0, 5.0])], held=[False, False], points=2).value.tolist() == [3, 5]
