"""What every algorithm with a memory refuses of the run it is in."""

import pytest

from common.algorithms.settings.base import Scale
from common.algorithms.settings.replay import ReplaySection

pytestmark = pytest.mark.pure

SCALE = Scale(length=16, num_envs=4, batch=1, credits=2, max_policy_lag=20, actors=2, env_steps=100_000)


def problems(scale=SCALE, **settings):
    """The sentences."""
    return list(ReplaySection(name="any", **settings).conflicts(scale))


def test_the_defaults_are_a_run_that_works():
    """A small run with two actors."""
    assert problems() == []


def test_a_minibatch_must_fit_into_the_memory():
    """It is drawn from it."""
    (problem,) = problems(replay_capacity=64, warmup=0, minibatch=65)
    assert problem.startswith("algorithm.minibatch: found 65, wanted at most 64 = algorithm.replay_capacity")


def test_a_warm_up_must_fit_into_the_memory():
    """What it inserted first would be gone before it ends."""
    (problem,) = problems(replay_capacity=1_000, warmup=1_001)
    assert problem.startswith("algorithm.warmup: found 1001, wanted at most 1000 = algorithm.replay_capacity")


def test_an_insert_must_fit_into_the_memory():
    """Messages larger than what is kept of them."""
    (problem,) = problems(SCALE._replace(length=512), replay_capacity=2_000)
    assert problem.startswith("algorithm.replay_capacity: found 2000, wanted at least 2048 = learner.batch 1 x rollout.length")


@pytest.mark.parametrize(("warmup", "ratio"), [(99_990, 3.1), (100_000, 8.0), (0, 0.0003)])
def test_a_run_must_pay_for_at_least_one_gradient_step(warmup, ratio):
    """A warm-up as long as the budget, or a ratio so small that the run ends first."""
    (problem,) = problems(warmup=warmup, samples_per_insert=ratio)
    assert problem.startswith(f"algorithm.samples_per_insert: found {ratio:g}, wanted more")
    assert f"algorithm.warmup {warmup}" in problem


def test_messages_must_not_become_stale_while_they_wait():
    """The learner is slower than its actors by design: credits x actors messages wait, each for one update."""
    (problem,) = problems(SCALE._replace(actors=11))
    assert problem.startswith("learner.max_policy_lag: found 20, wanted at least 22 = learner.credits x actor.count")
    assert problems(SCALE._replace(actors=10)) == []
    assert problems(SCALE._replace(actors=11, batch=2)) == []


def test_a_first_minibatch_must_have_enough_to_be_drawn_from():
    """1,024 transitions of the 138 that are there would show each of them some eight times."""
    (problem,) = problems(warmup=10, minibatch=1_024)
    assert problem.startswith("algorithm.warmup: found 10, wanted at least 1024 = algorithm.minibatch")
    assert "drawn from 138 env steps" in problem
    assert problems(warmup=1_024, minibatch=1_024) == problems(warmup=0, minibatch=64) == []
    assert problems(warmup=0, minibatch=1_024, samples_per_insert=1.0) == []


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
