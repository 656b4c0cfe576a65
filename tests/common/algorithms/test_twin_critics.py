"""The parts that TD3 and SAC share: losses against numbers worked out by hand, refused shapes, actors that begin at random."""

import pytest
import torch

from common.algorithms.api import WorkerContext
from common.algorithms.registry import ALGORITHMS, build_algorithm, build_policy
from common.algorithms.twin_critics import clipped_double_q, critic_loss
from common.errors import ConfigError, InternalError
from common.models import snapshot
from common.models.spec import ModelSettings

pytestmark = pytest.mark.pure

MODEL = ModelSettings(hidden=(8,))
LOW, HIGH = torch.tensor([-1.0, 0.0]), torch.tensor([3.0, 10.0])  # of `continuous_env`
both = pytest.mark.parametrize("name", ["td3", "sac"])


# --- losses ---


def test_the_smaller_of_both_values_counts_row_by_row():
    """Not the critic that is smaller on average."""
    assert clipped_double_q(torch.tensor([[1.0, 5.0, -3.0], [2.0, 4.0, -2.0]])).tolist() == [1.0, 4.0, -3.0]


@pytest.mark.parametrize("shape", [(3,), (1, 3), (3, 2), (2, 3, 1)])
def test_values_that_are_not_of_two_critics_are_refused(shape):
    """[N, 2] would give one number for all rows of a critic, in silence."""
    with pytest.raises(InternalError, match=r"wanted \[2, N\]"):
        clipped_double_q(torch.zeros(shape))


def test_both_critics_are_trained_towards_the_target():
    """By hand: errors (1, 3) and (0, 2), so 5 + 2; the gradient of each value is 2 error / N."""
    values = torch.tensor([[2.0, 4.0], [1.0, 3.0]], requires_grad=True)
    loss = critic_loss(values, target=torch.tensor([1.0, 1.0]))
    assert loss.item() == pytest.approx((1.0 + 9.0) / 2 + (0.0 + 4.0) / 2)
    assert torch.autograd.grad(loss, values)[0].tolist() == [[1.0, 3.0], [0.0, 2.0]]


@pytest.mark.parametrize("shape", [(3, 1), (1,), (2, 3)])
def test_a_target_of_another_shape_is_refused(shape):
    """(N,) against (N, 1) would broadcast to (N, N)."""
    with pytest.raises(InternalError, match=r"wanted \(3,\), \[N\]"):
        critic_loss(torch.zeros(2, 3), target=torch.zeros(shape))


# --- acting ---


def build(name, env, *, env_steps=0, training=True, seed=0, **settings):
    """A policy in a run of this many env steps."""
    context = WorkerContext(index=0, workers=1, num_envs=4, training=training)
    section = ALGORITHMS[name].settings(**settings)
    policy = build_policy(section, model=MODEL, env=env, precision="fp32", seed=seed, context=context)
    load(policy, env_steps=env_steps)
    return policy


def load(policy, *, env_steps):
    """A snapshot arrives; SAC's deviations are small, e^-3 of a half of the range, as TD3's noise is."""
    with torch.no_grad():
        policy.network.head.bias[2:] = -3.0
    policy.load(0, snapshot.to_tensor(snapshot.flatten(policy.network, "fp32")), env_steps=env_steps)


def actions(policy, number=500, **how):
    """Its actions on the same four observations, [number, 4, 2]."""
    observation = torch.randn(4, 2, generator=torch.Generator().manual_seed(1))
    return torch.stack([policy.act(observation, **how)["action"] for _ in range(number)])


@both
def test_until_the_run_is_far_enough_all_actions_are_equally_likely(continuous_env, name):
    """Uniform over the bounds, which are not centred on 0; from `random_env_steps` on the policy acts."""
    policy = build(name, continuous_env, env_steps=99, random_env_steps=100)
    drawn = ((actions(policy) - LOW) / (HIGH - LOW)).flatten(0, 1)
    for component in drawn.T:
        assert torch.histc(component, bins=4, min=0.0, max=1.0).min() > 0.22 * len(component)
    load(policy, env_steps=100)
    assert actions(policy).std(dim=0).max() < 0.15 * 5.0


@both
def test_an_evaluator_never_acts_at_random(continuous_env, name):
    """It shows the policy of the moment, with the noise of training or without, even during the random phase."""
    policy = build(name, continuous_env, random_env_steps=100, training=False)
    assert actions(policy).std(dim=0).max() < 0.15 * 5.0


@both
def test_greedy_actions_are_the_actors_own_scaled_to_the_bounds(continuous_env, name):
    """No noise, not even in the random phase."""
    policy = build(name, continuous_env)
    greedy = actions(policy, 2, greedy=True)
    assert torch.equal(greedy[0], greedy[1])
    chosen = policy.network(torch.randn(4, 2, generator=torch.Generator().manual_seed(1)))
    own = chosen if name == "td3" else chosen.median()
    assert torch.allclose(greedy[0], LOW + (own + 1) / 2 * (HIGH - LOW))


@both
@pytest.mark.parametrize("env_steps", [0, 10_000])
def test_a_seed_fixes_the_actions(continuous_env, name, env_steps):
    """Actors of one run differ by their seed, and a run repeats; at random and by the policy."""
    one, same, other = (actions(build(name, continuous_env, seed=seed, env_steps=env_steps), 3) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@both
def test_discrete_actions_are_refused_by_the_policy(vector_env, name):
    """As by the learner."""
    with pytest.raises(ConfigError, match=f"{name} needs continuous actions: found 3 discrete actions"):
        build(name, vector_env)


@both
def test_noise_is_of_another_stream_than_the_weights(name, continuous_env):
    algorithm = build_algorithm(ALGORITHMS[name].settings(), model=MODEL, env=continuous_env, seed=7, length=8)
    assert algorithm._generator.initial_seed() != 7
