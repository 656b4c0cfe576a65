"""The noise of TD3: on the target's action and on the actors', always within the bounds."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.algorithms.api import WorkerContext
from common.algorithms.settings import TD3Settings
from common.algorithms.td3 import NoisyPolicy, smoothed_action
from common.errors import InternalError
from common.models import snapshot
from common.models.nets import DeterministicActor, build_actor
from common.models.spec import ModelSettings

pytestmark = pytest.mark.pure

MODEL = ModelSettings(hidden=(8,))
LOW, HIGH = torch.tensor([-1.0, 0.0]), torch.tensor([3.0, 10.0])  # of `continuous_env`


def build(env, *, env_steps=10_000, **settings):
    """A policy with the weights of a fresh actor, of a run that is `env_steps` far."""
    context = WorkerContext(index=0, workers=1, num_envs=4)
    policy = NoisyPolicy(settings=TD3Settings(**settings), model=MODEL, env=env, precision="fp32", seed=0, context=context)
    policy.load(0, snapshot.to_tensor(snapshot.flatten(build_actor(DeterministicActor, MODEL, env), "fp32")), env_steps=env_steps)
    return policy


def test_noise_is_clipped_before_it_is_added_and_the_sum_to_the_bounds():
    """By hand, c = 0.5: within, beyond c on both sides, and beyond the bounds of the action."""
    action = torch.tensor([[0.0, 0.0, 0.0, 0.9]])
    noise = torch.tensor([[0.3, 0.8, -2.0, 0.4]])
    assert torch.allclose(smoothed_action(action, noise, clip=0.5), torch.tensor([[0.3, 0.5, -0.5, 1.0]]))


@given(st.floats(-1.0, 1.0), st.floats(-10.0, 10.0), st.floats(0.0, 2.0))
def test_smoothing_never_moves_an_action_further_than_its_clip_nor_out_of_bounds(action, noise, clip):
    """Whatever is drawn."""
    moved = smoothed_action(torch.tensor([[action]]), torch.tensor([[noise]]), clip=clip).item()
    assert abs(moved) <= 1.0
    assert abs(moved - action) <= clip + 1e-6


def test_noise_for_all_rows_alike_is_refused():
    """[A] in place of [N, A] would broadcast: one draw for the whole minibatch, and nobody would see it."""
    with pytest.raises(InternalError, match=r"found \(2,\), wanted \(3, 2\)"):
        smoothed_action(torch.zeros(3, 2), torch.zeros(2), clip=0.5)


def actions(policy, number=500, **how):
    """Its actions on the same four observations, [number, 4, 2]."""
    observation = torch.randn(4, 2, generator=torch.Generator().manual_seed(1))
    return torch.stack([policy.act(observation, **how)["action"] for _ in range(number)])


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
