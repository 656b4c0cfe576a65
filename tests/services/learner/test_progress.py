"""The estimate of progress and time left."""

import math

import pytest

from common.config.sections import TargetSettings
from common.observability.learner_stats import Progress
from services.learner.progress import ProgressEstimator

pytestmark = pytest.mark.pure


def at(estimator, elapsed, trained, mean=None, *, rate=1000.0, **target):
    """The progress at one moment of a run to 18 points within a million env steps."""
    settings = TargetSettings(**{"mean100": 18.0, "env_steps": 1_000_000} | target)
    return estimator.update(elapsed, settings, env_steps=trained, rate=rate, mean=mean)


def test_before_anything_is_known_nothing_is_estimated():
    assert at(ProgressEstimator(), 0.0, 0, rate=0.0) == Progress(0.0, None)


def test_the_budget_gives_the_time_as_soon_as_there_is_a_rate():
    """Fifteen seconds of CartPole are over before a trend of the mean is known."""
    assert at(ProgressEstimator(), 0.5, 500, env_steps=15_000) == Progress(500 / 15_000, 14.5)


def test_a_rising_mean_gives_the_time_to_the_target():
    """A tenth of a point a second, ten points to go: some hundred seconds, far less than the budget allows."""
    estimator = ProgressEstimator()
    for step in range(30):
        found = at(estimator, 10.0 * step, 1000 * step, -21.0 + step)
    assert found.seconds_left == pytest.approx(100.0)
    assert found.fraction == pytest.approx(29 / 39)


def test_noise_is_no_trend():
    """A mean that swings by a point every minute rises half of the time; eleven points are missing."""
    estimator = ProgressEstimator()
    for second in range(1, 600):
        found = at(estimator, float(second), 1000 * second, 7.0 + math.sin(second / 60 * math.tau))
        assert found.seconds_left == 1000.0 - second


def test_a_short_trend_leaves_the_budget():
    """Ten minutes after the start half a minute may show any slope."""
    estimator = ProgressEstimator()
    for second in range(600, 630):
        assert at(estimator, float(second), 600_000, -21.0 + second - 600).seconds_left == 400.0


def test_the_trend_of_a_long_run_is_over_a_fifth_of_it():
    """Six points an hour, and a point up and down every ten minutes."""
    estimator = ProgressEstimator()
    for second in range(0, 36_001, 10):
        mean = -12.0 + second / 600 + math.sin(second / 600 * math.tau)
        found = at(estimator, float(second), 1000, mean, rate=0.02, mean100=54.0)
    assert found.seconds_left == pytest.approx(3600.0, rel=0.1)


def test_a_trend_is_extrapolated_to_three_times_its_span():
    """A fiftieth of a point a second, over two minutes: six minutes further it counts."""
    estimator, left = ProgressEstimator(), {}
    for second in range(0, 1000, 2):
        left[second] = at(estimator, float(second), 1000, second / 50, rate=0.02).seconds_left
    assert left[500] == 49_950_000.0
    assert left[560] == pytest.approx(340.0)


def test_a_trend_without_new_points_ends():
    estimator = ProgressEstimator()
    for second in range(0, 200, 2):
        found = at(estimator, float(second), 1000, second / 20)
    assert found.seconds_left == pytest.approx(162.0, abs=1.0)
    assert at(estimator, 980.0, 1000).seconds_left == 999.0


def test_a_falling_mean_leaves_the_budget():
    estimator = ProgressEstimator()
    for step in range(20):
        found = at(estimator, 10.0 * step, 10_000 * step, 10.0 - step)
    assert found == Progress(0.19, 810.0)


def test_a_resumed_run_has_come_as_far_as_before():
    """Also before an episode ends, and from the lowest mean on, which is not that at the moment of the resume."""
    before = ProgressEstimator()
    found = [at(before, 10.0 * step, 1000 * step, mean).fraction for step, mean in enumerate((-21.0, 10.0))]
    after = ProgressEstimator(mean=before.mean, lowest=before.lowest)
    assert [at(after, 30.0, 1000, mean).fraction for mean in (None, 10.0)] == [found[-1]] * 2
    assert found[-1] > 0.5


def test_a_budget_of_time_is_the_nearer_end():
    assert at(ProgressEstimator(), 75.0, 1000, wall_seconds=100.0) == Progress(0.75, 25.0)


def test_at_the_target_the_run_is_at_its_end():
    assert at(ProgressEstimator(), 1.0, 1000, 18.5).fraction == 1.0


def test_while_the_environments_of_a_restarted_actor_have_ended_no_episode_the_last_mean_counts():
    estimator = ProgressEstimator()
    for step in range(30):
        found = at(estimator, 10.0 * step, 1000 * step, -21.0 + step)
    assert at(estimator, 300.0, 30_000) == found
    assert at(estimator, 300.0, 970_000).seconds_left == 30.0, "the budget is the nearer end now"


def test_two_readings_of_one_moment_are_no_trend():
    estimator = ProgressEstimator()
    for step in range(20):
        found = at(estimator, 50.0, 100_000, 3.0 + step / 10)
    assert found.seconds_left == 900.0
