"""Learning rates and entropy bonus over a run."""

from __future__ import annotations

import pytest

from common.algorithms import schedules
from common.algorithms.api import Progress
from common.algorithms.settings.dqn import DQNSettings
from common.algorithms.settings.impala import ImpalaSettings

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(("env_steps", "rate"), [(0, 1e-3), (250, 7.5e-4), (1000, 0.0), (1200, 0.0)])
def test_the_linear_rate_falls_to_0_at_the_planned_end_and_stays(env_steps, rate):
    """The last batch of a run often goes beyond the budget."""
    progress = Progress(env_steps=env_steps, env_steps_planned=1000, version=3)
    settings = DQNSettings(learning_rate=1e-3, lr_schedule="linear")
    assert schedules.learning_rate(settings, progress) == pytest.approx(rate)


@pytest.mark.parametrize(("env_steps", "rate"), [(0, 1e-3), (200, 6e-4), (400, 2e-4), (900, 2e-4)])
def test_the_linear_rate_can_end_early_at_a_floor(env_steps, rate):
    """A budget far longer than the run should need: the rate must not wait for it, nor fall to nothing."""
    progress = Progress(env_steps=env_steps, env_steps_planned=1000, version=3)
    settings = DQNSettings(learning_rate=1e-3, lr_schedule="linear", lr_final=2e-4, lr_env_steps=400)
    assert schedules.learning_rate(settings, progress) == pytest.approx(rate)


def test_a_rate_without_a_schedule_stays():
    """Where the schedule would have ended counts only for one that falls."""
    progress = Progress(env_steps=900, env_steps_planned=1000, version=3)
    assert schedules.learning_rate(DQNSettings(learning_rate=1e-3, lr_final=2e-4), progress) == 1e-3


@pytest.mark.parametrize(("env_steps", "bonus"), [(0, 0.01), (100, 0.0075), (400, 0.0), (900, 0.0)])
def test_the_entropy_bonus_falls_in_a_straight_line_and_stays(env_steps, bonus):
    """However long the run goes on."""
    settings = ImpalaSettings(entropy_coef=0.01, entropy_env_steps=400)
    assert schedules.entropy_coef(settings, env_steps=env_steps) == pytest.approx(bonus)


def test_the_entropy_bonus_may_end_elsewhere_or_stay():
    """It ends at what the settings say, above or below; without a schedule it is the same everywhere."""
    settings = ImpalaSettings(entropy_coef=0.01, entropy_final=0.03, entropy_env_steps=400)
    assert schedules.entropy_coef(settings, env_steps=100) == pytest.approx(0.015)
    assert schedules.entropy_coef(ImpalaSettings(entropy_coef=0.01), env_steps=900) == 0.01


@pytest.mark.parametrize(("kl", "rate"), [(0.021, 2e-4), (0.019, 3e-4), (0.01, 3e-4), (0.006, 3e-4), (0.004, 4.5e-4)])
def test_the_adaptive_rate_moves_only_outside_half_to_twice_the_target(kl, rate):
    """Target 0.01: too far, twice nearly, on it, half nearly, too little."""
    assert schedules.kl_adaptive(3e-4, kl=kl, target=0.01) == pytest.approx(rate)


def test_the_adaptive_rate_stays_within_its_bounds():
    """A policy that does not react at all, or to everything."""
    assert schedules.kl_adaptive(9e-3, kl=0.0, target=0.01) == schedules.HIGHEST_RATE
    assert schedules.kl_adaptive(1.2e-6, kl=1.0, target=0.01) == schedules.LOWEST_RATE


def test_on_a_policy_whose_kl_grows_with_the_rate_it_settles_near_the_target():
    """Closed loop: KL = (100 * rate)^2, as for a natural step; from far above and far below."""
    for rate in (1e-5, 9e-3):
        for _ in range(40):
            rate = schedules.kl_adaptive(rate, kl=(100 * rate) ** 2, target=0.01)  # noqa: PLW2901 - the loop under test
        assert 0.005 <= (100 * rate) ** 2 <= 0.02
