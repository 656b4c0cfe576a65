"""Settings of DQN that cannot work with the run they are in."""

import pytest
from pydantic import ValidationError

from common.algorithms.settings.base import Scale
from common.algorithms.settings.dqn import DQNSettings

pytestmark = pytest.mark.pure

SCALE = Scale(length=16, num_envs=4, batch=1, credits=2, max_policy_lag=20, actors=2, env_steps=100_000)


def problems(scale=SCALE, **settings):
    """The sentences."""
    return list(DQNSettings(**settings).conflicts(scale))


def test_the_defaults_are_a_run_that_works():
    """And so is each switch by itself."""
    assert problems() == []
    for switch in ("double", "dueling", "prioritized"):
        assert problems(**{switch: True}) == problems(**{switch: False}) == []


@pytest.mark.parametrize("setting", [{"priority_alpha": 0.9}, {"priority_beta": 1.0}, {"initial_priorities": True}])
def test_priorities_that_nobody_would_draw_by_are_refused(setting):
    """The exponent was tuned for an hour, and the switch was off."""
    (problem,) = problems(**setting)
    (key,) = setting
    assert problem.startswith(f"algorithm.{key}: found ")
    assert "algorithm.prioritized is false" in problem
    assert problems(prioritized=True, **setting) == []


def test_what_all_algorithms_with_a_memory_refuse_is_refused_here_too():
    """A minibatch larger than the memory."""
    (problem,) = problems(replay_capacity=1_000, warmup=0, minibatch=1_001)
    assert problem.startswith("algorithm.minibatch: found 1001, wanted at most 1000")


@pytest.mark.parametrize(
    "wrong",
    [{"n_step": 0}, {"priority_alpha": 1.5}, {"epsilon": -0.1}, {"target_rate": 0.0}, {"huber": 0.0}, {"exploration": "x"}],
)
def test_a_value_outside_its_range_is_refused(wrong):
    """One by one, by name."""
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        DQNSettings(**wrong)
