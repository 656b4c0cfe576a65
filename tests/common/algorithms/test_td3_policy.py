"""Exploration of TD3's actors: at random first, then by noise, and always within the bounds."""

import pytest
import torch

from common.algorithms.api import WorkerContext
from common.algorithms.settings import TD3Settings
from common.algorithms.td3 import NoisyPolicy
from common.errors import ConfigError
from common.models import snapshot
from common.models.nets import build_td3_actor
from common.models.spec import ModelSettings

pytestmark = pytest.mark.pure

MODEL = ModelSettings(hidden=(8,))
LOW, HIGH = torch.tensor([-1.0, 0.0]), torch.tensor([3.0, 10.0])  # of `continuous_env`


def build(env, *, env_steps=10_000, training=True, num_envs=4, seed=0, **settings):
    """A policy with the weights of a fresh actor, of a run that is `env_steps` far."""
    context = WorkerContext(index=0, workers=1, num_envs=num_envs, training=training)
    policy = NoisyPolicy(settings=TD3Settings(**settings), model=MODEL, env=env, precision="fp32", seed=seed, context=context)
    load(policy, env, env_steps=env_steps)
    return policy


def load(policy, env, *, env_steps):
    """A snapshot arrives."""
    policy.load(0, snapshot.to_tensor(snapshot.flatten(build_td3_actor(MODEL, env), "fp32")), env_steps=env_steps)


def actions(policy, number=500, **how):
    """Its actions on the same four observations, [number, 4, 2]."""
    observation = torch.randn(4, 2, generator=torch.Generator().manual_seed(1))
    return torch.stack([policy.act(observation, **how)["action"] for _ in range(number)])


def test_until_the_run_is_far_enough_all_actions_are_equally_likely(continuous_env):
    """Uniform over the bounds, which are not centred on 0; from `random_env_steps` on the policy acts."""
    policy = build(continuous_env, env_steps=99, random_env_steps=100)
    drawn = ((actions(policy) - LOW) / (HIGH - LOW)).flatten(0, 1)
    for component in drawn.T:
        assert torch.histc(component, bins=4, min=0.0, max=1.0).min() > 0.22 * len(component)
    load(policy, continuous_env, env_steps=100)
    assert actions(policy).std(dim=0).max() < 0.15 * 5.0


def test_an_evaluator_never_acts_at_random(continuous_env):
    """It shows the policy of the moment, with the noise of training or without, even during the random phase."""
    policy = build(continuous_env, env_steps=0, random_env_steps=100, training=False)
    assert actions(policy).std(dim=0).max() < 0.15 * 5.0


def test_greedy_actions_are_the_actors_own_scaled_to_the_bounds(continuous_env):
    """No noise, not even in the random phase: a fresh actor stays near the middle."""
    policy = build(continuous_env, env_steps=0)
    greedy = actions(policy, 2, greedy=True)
    assert torch.equal(greedy[0], greedy[1])
    assert torch.allclose(greedy[0], ((LOW + HIGH) / 2).expand(4, 2), atol=0.5)


def test_noise_has_the_deviation_that_was_asked_for_in_halves_of_the_range(continuous_env):
    """0.1 of ranges 4 and 10: 0.2 and 0.5."""
    spread = actions(build(continuous_env, exploration_noise=0.1)).std(dim=0).mean(dim=0)
    assert spread.tolist() == pytest.approx([0.2, 0.5], rel=0.1)


def test_no_noise_leaves_the_bounds(continuous_env):
    """The recorded action is the one of the environment, which thus must not have to clip."""
    taken = actions(build(continuous_env, exploration_noise=5.0))
    assert (taken >= LOW).all()
    assert (taken <= HIGH).all()
    assert (taken == HIGH).any()


def test_a_seed_fixes_the_noise(continuous_env):
    """Actors of one run differ by their seed, and a run repeats."""
    one, same, other = (actions(build(continuous_env, seed=seed), 3) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_discrete_actions_are_refused(vector_env):
    """As by the learner."""
    with pytest.raises(ConfigError, match="needs continuous actions: found 3 discrete actions"):
        build(vector_env)
