"""Settings of TD3 that cannot work with the run they are in."""

import pytest

from common.algorithms.settings.base import Scale
from common.algorithms.settings.td3 import TD3Settings

pytestmark = pytest.mark.pure

SCALE = Scale(length=8, num_envs=4, batch=1, credits=2, max_policy_lag=20, actors=1, env_steps=100_000)


def test_the_defaults_are_a_run_that_works():
    """The recipe of the paper: one gradient step per env step."""
    settings = TD3Settings()
    assert not list(settings.conflicts(SCALE))
    assert settings.samples_per_insert == settings.minibatch


def test_a_run_that_ends_before_its_policy_acts_is_refused():
    """A short trial with the random phase of a long run."""
    (problem,) = TD3Settings(random_env_steps=5_000, warmup=256).conflicts(SCALE._replace(env_steps=5_000))
    assert problem.startswith("algorithm.random_env_steps: found 5000, wanted less than 5000 = target.env_steps")


def test_what_all_algorithms_with_a_memory_refuse_is_refused_here_too():
    """A minibatch larger than the memory."""
    (problem,) = TD3Settings(replay_capacity=100, warmup=0, minibatch=256).conflicts(SCALE)
    assert problem.startswith("algorithm.minibatch: found 256, wanted at most 100")
