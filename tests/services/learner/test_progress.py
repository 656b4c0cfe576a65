"""The estimate of progress and time left."""

import pytest

from common.config.schema import Settings
from services.learner.progress import Progress, ProgressEstimator

pytestmark = pytest.mark.pure


def estimator(**target):
    """The estimator of a run to 18 points within a million env steps."""
    return ProgressEstimator(Settings(target={"mean100": 18.0, "env_steps": 1_000_000} | target))


def at(progress, elapsed, env_steps, mean=None, *, updates=None, rate=1000.0):
    """The progress at one moment, by default after an update for each 1,000 env steps."""
    return progress.update(
        elapsed, env_steps=env_steps, updates=env_steps // 1000 if updates is None else updates, rate=rate, mean=mean
    )


def test_before_anything_is_known_nothing_is_estimated():
    assert at(estimator(), 0.0, 0, rate=0.0) == Progress(0.0, None)


def test_the_budget_gives_the_time_from_the_fourth_update_on():
    """Fifteen seconds of CartPole: three updates after the first one take less than one of them."""
    progress = estimator(env_steps=15_000)
    assert [at(progress, 0.1 * updates, 1000 * updates).seconds_left for updates in range(5)] == [None, None, None, None, 11.0]


def test_the_updates_before_a_resume_do_not_count():
    progress = estimator()
    assert at(progress, 100.0, 500_000, updates=500).seconds_left is None
    assert at(progress, 101.0, 503_000, updates=503).seconds_left is None
    assert at(progress, 102.0, 504_000, updates=504) == Progress(0.504, 496.0)


def test_a_rising_mean_gives_the_time_to_the_target():
    """A tenth of a point a second, ten points to go: some hundred seconds, far less than the budget allows."""
    progress = estimator()
    for step in range(30):
        found = at(progress, 10.0 * step, 1000 * step, -21.0 + step)
    assert found.seconds_left == pytest.approx(100.0)
    assert found.fraction == pytest.approx(29 / 39)


def test_a_falling_mean_leaves_the_budget():
    progress = estimator()
    for step in range(20):
        found = at(progress, 10.0 * step, 10_000 * step, 10.0 - step)
    assert found == Progress(0.19, 810.0)


def test_a_budget_of_time_is_the_nearer_end():
    assert at(estimator(wall_seconds=100.0), 75.0, 1000, updates=1) == Progress(0.75, 25.0)


def test_at_the_target_the_run_is_at_its_end():
    assert at(estimator(), 1.0, 1000, 18.5) == Progress(1.0, None)


def test_two_readings_of_one_moment_are_no_trend():
    progress = estimator()
    for step in range(20):
        found = at(progress, 50.0, 100_000, 3.0 + step / 10)
    assert found.seconds_left is None
