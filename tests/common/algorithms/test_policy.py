"""Acting: what is recorded belongs to the weights that acted."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from common.algorithms.policy import ActorCriticPolicy, recorded
from common.envs.spec import ActionSpec
from common.models import nets, snapshot
from common.models.spec import ModelSettings

pytestmark = pytest.mark.pure

MODEL = ModelSettings(conv=((4, 4, 2),), hidden=(8,))


def build(env, precision="fp32", seed=0):
    """A policy with weights of a learner, far enough from uniform to tell actions apart."""
    net = nets.build(MODEL, env, seed=3)
    with torch.no_grad():
        net.policy_head.weight.mul_(200.0)
    net.requires_grad_(requires_grad=False)
    policy = ActorCriticPolicy(model=MODEL, env=env, precision=precision, seed=seed)
    policy.load(4, snapshot.to_tensor(snapshot.flatten(net, precision)), env_steps=0)
    return net, policy


def images(env, count=64):
    """Random stacks."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, *env.network_input_shape), dtype=torch.uint8, generator=generator)


def test_the_log_probability_is_that_of_the_weights_that_acted(image_env):
    """Recorded by the actor, recomputed by the learner from the same snapshot: the ratio is 1."""
    net, policy = build(image_env)
    acted = policy.act(images(image_env))
    again = net(images(image_env)).policy.log_prob(acted["action"])
    torch.testing.assert_close(acted["log_prob"], again, atol=1e-5, rtol=0)
    assert policy.version == 4
    assert len(acted["action"].unique()) > 1


def test_in_bfloat16_the_recorded_numbers_are_those_of_the_rounded_weights(image_env):
    """A bf16 actor: near the learner's float32, and float32 on the wire."""
    net, policy = build(image_env, "bf16")
    acted = policy.act(images(image_env))
    again = net(images(image_env)).policy.log_prob(acted["action"])
    assert acted["log_prob"].dtype == torch.float32
    torch.testing.assert_close(acted["log_prob"], again, atol=5e-2, rtol=0)


def test_greedy_takes_the_likeliest_action(image_env):
    """The evaluator's greedy mode."""
    net, policy = build(image_env)
    acted = policy.act(images(image_env), greedy=True)
    assert torch.equal(acted["action"], net(images(image_env)).policy.log_probs.argmax(-1))


def test_the_seed_decides_the_actions(image_env):
    """Actors of one run draw from streams of their own; the same actor started again draws the same."""
    actions = [build(image_env, seed=seed)[1].act(images(image_env))["action"] for seed in (1, 1, 2)]
    assert torch.equal(actions[0], actions[1])
    assert not torch.equal(actions[0], actions[2])


def test_continuous_actions_are_recorded_unclipped(vector_env):
    """The bounds are the environment's affair: the log-probability is of what was drawn."""
    env = dataclasses.replace(vector_env, action=ActionSpec(n=0, shape=(2,), low=(-0.1, -0.1), high=(0.1, 0.1)))
    net, policy = build(env)
    observation = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    acted = policy.act(observation)
    assert acted["action"].abs().max() > 0.1
    torch.testing.assert_close(acted["log_prob"], net.policy(observation).log_prob(acted["action"]))


def test_what_is_recorded_has_the_declared_shape():
    """The schema's array for what `act` adds."""
    (spec,) = recorded(length=5, num_envs=3)
    assert (spec.name, spec.dtype, spec.shape) == ("log_prob", "float32", (5, 3))
