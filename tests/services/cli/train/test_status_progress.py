"""The estimate of progress and time left."""

import pytest

from services.cli.train.status import ProgressEstimator, RunStatus, Target

pytestmark = pytest.mark.pure


def at(wall, steps, mean, *, target=18.0, budget=1_000_000, pace=1000.0):
    """A status of a run at one moment."""
    goal = Target(mean100=target, env_steps=budget)
    return RunStatus(
        wall_seconds=wall, env_steps=steps, mean100=mean, env_steps_per_second=pace, target=goal, learner_updates=steps // 1000
    )


def test_before_anything_is_known_nothing_is_claimed():
    """The first second of a run: no episodes, no pace."""
    estimate = ProgressEstimator().update(RunStatus())
    assert (estimate.fraction, estimate.seconds_left) == (0.0, None)


def test_without_a_trend_the_budget_gives_the_time():
    """Pong in its first minute: the score does not move, the pace is known."""
    progress = ProgressEstimator()
    progress.update(at(10.0, 1000, -21.0))
    estimate = progress.update(at(60.0, 250_000, -21.0))
    assert estimate.fraction == 0.25
    assert estimate.seconds_left == 750.0


def test_a_rising_score_gives_the_time_to_the_target():
    """One point every ten seconds, ten points to go: some hundred seconds, far less than the budget allows."""
    progress = ProgressEstimator()
    for step in range(30):
        estimate = progress.update(at(10.0 * step, 1000 * step, -21.0 + step))
    assert estimate.seconds_left == pytest.approx(100.0)
    assert estimate.fraction == pytest.approx(29 / 39)


def test_a_falling_score_makes_no_promise_of_the_target():
    """A collapse in the middle of a run: only the budget is certain."""
    progress = ProgressEstimator()
    for step in range(10):
        estimate = progress.update(at(10.0 * step, 10_000 * step, 10.0 - step))
    assert estimate.seconds_left == (1_000_000 - 90_000) / 1000.0


def test_at_the_target_the_bar_is_full():
    """The last status of a run that solved."""
    progress = ProgressEstimator()
    progress.update(at(0.0, 0, 18.5))
    assert progress.update(at(1.0, 1000, 18.5)).fraction == 1.0


def test_two_readings_of_one_moment_are_no_trend():
    """The learner is unreachable and its last status is seen again and again: the estimate stands, nothing divides by zero."""
    progress = ProgressEstimator()
    progress.update(at(10.0, 1000, 3.0))
    first = progress.update(at(50.0, 100_000, 3.0))
    assert first.seconds_left is not None
    assert progress.update(at(50.0, 100_000, 4.0)).seconds_left == first.seconds_left


def test_the_time_left_is_unknown_until_training_was_measured_for_a_while():
    """A slow start and a first update give a rate, and 17 hours for a run of five minutes."""
    progress = ProgressEstimator()
    estimates = [progress.update(at(wall, steps, None)) for wall, steps in ((20.0, 0), (50.0, 1000), (79.0, 30_000))]
    assert [estimate.seconds_left for estimate in estimates] == [None, None, None]
    assert progress.update(at(80.0, 31_000, None)).seconds_left == 969.0
