"""Acting by action values: greedy and exploring, and the probability of exploration over a run."""

from __future__ import annotations

import pytest
import torch

from common.algorithms.action_values import EpsilonGreedyPolicy
from common.algorithms.api import WorkerContext
from common.algorithms.settings import DQNSettings
from common.models import nets, snapshot
from common.models.spec import ModelSettings
from tests.common.algorithms.conftest import images

pytestmark = pytest.mark.pure

MODEL = ModelSettings(conv=((4, 4, 2),), hidden=(8,))
LINE = DQNSettings(epsilon_initial=1.0, epsilon=0.1, epsilon_env_steps=1_000)


def net_for(env, settings):
    """A learner's network with values that differ well from action to action."""
    net = nets.build_q_network(MODEL, env, dueling=settings.dueling, seed=3)
    with torch.no_grad():
        for head in (net.action_stream[-1], net.value_stream[-1]):
            head.weight.mul_(300.0)
    return net


def build(env, settings=None, *, seed=0, env_steps=0, training=True):
    """The learner's network, and a policy with its weights."""
    settings = settings or DQNSettings(epsilon_initial=0.5, epsilon=0.0, epsilon_env_steps=1_000)
    net = net_for(env, settings)
    context = WorkerContext(index=0, workers=1, num_envs=64, training=training)
    policy = EpsilonGreedyPolicy(settings=settings, model=MODEL, env=env, precision="fp32", seed=seed, context=context)
    policy.load(4, snapshot.to_tensor(snapshot.flatten(net, "fp32")), env_steps=env_steps)
    return net, policy


def test_greedy_takes_the_best_known_action_always(image_env):
    """The evaluator's greedy mode, whatever epsilon is."""
    net, policy = build(image_env)
    acted = policy.act(images(image_env), greedy=True)
    assert set(acted) == {"action"}
    assert torch.equal(acted["action"], net(images(image_env))[0].argmax(1))
    assert len(acted["action"].unique()) > 1


def test_epsilon_of_the_actions_are_drawn_from_all_alike(image_env):
    """Half of 64 x 100 actions are random, so that 3 of 8 differ from the best of four."""
    net, policy = build(image_env)
    best = net(images(image_env))[0].argmax(1)
    drawn = torch.stack([policy.act(images(image_env))["action"] for _ in range(100)])
    assert (drawn != best).double().mean().item() == pytest.approx(0.5 * 3 / 4, abs=0.03)
    other = drawn[drawn != best]
    assert torch.bincount(other, minlength=4).min() > 0


def test_a_snapshot_says_how_far_the_run_is(image_env):
    """Epsilon falls from load to load; at its end none of the actions is random."""
    net, policy = build(image_env, env_steps=1_000)
    assert policy.epsilon == 0.0
    assert torch.equal(policy.act(images(image_env))["action"], net(images(image_env))[0].argmax(1))
    assert policy.version == 4


def test_the_seed_decides_the_actions(image_env):
    """Actors of one run draw from streams of their own; the same actor started again draws the same."""
    actions = [build(image_env, seed=seed)[1].act(images(image_env))["action"] for seed in (1, 1, 2)]
    assert torch.equal(actions[0], actions[1])
    assert not torch.equal(actions[0], actions[2])


def test_epsilon_falls_with_the_env_steps_of_the_run_and_then_stays(image_env):
    """By the snapshot's env steps, not by a clock of each actor: all explore alike."""
    found = [build(image_env, LINE, env_steps=at)[1].epsilon for at in (0, 500, 1_000, 9_000)]
    assert found == pytest.approx([1.0, 0.55, 0.1, 0.1])


def test_epsilon_that_falls_at_once_is_constant(image_env):
    """`epsilon_env_steps: 0`, from 0 env steps on."""
    assert build(image_env, DQNSettings(epsilon=0.05, epsilon_env_steps=0), env_steps=0)[1].epsilon == pytest.approx(0.05)


def test_an_evaluator_explores_as_at_the_end_of_training(image_env):
    """Its sampled episodes at the very first version show what that exploration costs, not what chance plays like."""
    assert build(image_env, LINE, training=False)[1].epsilon == 0.1


def test_a_bfloat16_actor_acts_by_its_rounded_weights(image_env):
    """Near the learner's values; heads in float32."""
    net = net_for(image_env, DQNSettings())
    context = WorkerContext(index=0, workers=1, num_envs=64)
    policy = EpsilonGreedyPolicy(settings=DQNSettings(), model=MODEL, env=image_env, precision="bf16", seed=0, context=context)
    policy.load(0, snapshot.to_tensor(snapshot.flatten(net, "bf16")), env_steps=0)
    same = policy.act(images(image_env), greedy=True)["action"] == net(images(image_env))[0].argmax(1)
    assert same.double().mean() > 0.9


def test_another_networks_snapshot_has_another_layout(image_env):
    """Dueling or not is part of what two processes compare before they exchange parameters."""
    context = WorkerContext(index=0, workers=1, num_envs=1)
    layouts = {
        EpsilonGreedyPolicy(
            settings=DQNSettings(dueling=dueling), model=MODEL, env=image_env, precision="fp32", seed=0, context=context
        ).layout
        for dueling in (True, False)
    }
    assert len(layouts) == 2
