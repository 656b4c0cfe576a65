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
    for switch in ("double", "dueling", "prioritized", "initial_priorities"):
        assert problems(**{switch: True}) == problems(**{switch: False}) == []


def test_a_window_longer_than_a_rollout_is_refused():
    """It would be complete only several messages later."""
    (problem,) = problems(n_step=20)
    assert problem.startswith("algorithm.n_step: found 20, wanted at most 16 = rollout.length")
    assert problems(n_step=16) == []


def test_a_window_longer_than_the_memory_of_one_environment_is_refused():
    """64 env steps shared by 8 environments are 8 for each."""
    (problem,) = problems(n_step=8, replay_capacity=64, minibatch=8, warmup=0)
    assert problem.startswith("algorithm.n_step: found 8, wanted less than 8 = algorithm.replay_capacity / 8 environments")
    assert problems(n_step=7, replay_capacity=64, minibatch=8, warmup=0) == []


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
