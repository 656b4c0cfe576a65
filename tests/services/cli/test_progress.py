"""How far, and how long still."""

import pytest

from services.cli.progress import Progress
from services.cli.status import RunStatus, Target

pytestmark = pytest.mark.pure


def at(wall, steps, mean, *, target=18.0, budget=1_000_000, pace=1000.0):
    """A status of a run at one moment."""
    goal = Target(mean100=target, env_steps=budget)
    return RunStatus(wall_seconds=wall, env_steps=steps, mean100=mean, env_steps_per_second=pace, target=goal)


def test_before_anything_is_known_nothing_is_claimed():
    """The first second of a run: no episodes, no pace."""
    estimate = Progress().update(RunStatus())
    assert (estimate.fraction, estimate.seconds_left) == (0.0, None)


def test_without_a_trend_the_budget_tells_the_time():
    """Pong in its first minute: the score does not move, the pace is known."""
    estimate = Progress().update(at(60.0, 250_000, -21.0))
    assert estimate.fraction == 0.25
    assert estimate.seconds_left == 750.0


def test_a_rising_score_tells_the_time_to_the_target():
    """One point every ten seconds, ten points to go: some hundred seconds, far less than the budget allows."""
    progress = Progress()
    for step in range(30):
        estimate = progress.update(at(10.0 * step, 1000 * step, -21.0 + step))
    assert estimate.seconds_left == pytest.approx(100.0)
    assert estimate.fraction == pytest.approx(29 / 39)


def test_a_falling_score_makes_no_promise_of_the_target():
    """A collapse in the middle of a run: only the budget is certain."""
    progress = Progress()
    for step in range(10):
        estimate = progress.update(at(10.0 * step, 10_000 * step, 10.0 - step))
    assert estimate.seconds_left == (1_000_000 - 90_000) / 1000.0


def test_at_the_target_the_bar_is_full():
    """The last status of a run that solved."""
    progress = Progress()
    progress.update(at(0.0, 0, 18.5))
    assert progress.update(at(1.0, 1000, 18.5)).fraction == 1.0


def test_two_readings_of_one_moment_are_no_trend():
    """The learner is away and its last status is seen again and again: the estimate stands, nothing divides by zero."""
    progress = Progress()
    first = progress.update(at(50.0, 100_000, 3.0))
    assert progress.update(at(50.0, 100_000, 4.0)).seconds_left == first.seconds_left
