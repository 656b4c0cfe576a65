"""Acting by action values: greedy, exploring, and the first priorities of what was seen."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.algorithms import q_policy
from common.algorithms.api import Place
from common.algorithms.q_policy import EpsilonGreedyPolicy
from common.algorithms.settings.dqn import DQNSettings
from common.models import q, snapshot
from common.models.spec import ModelSettings

pytestmark = pytest.mark.pure

MODEL = ModelSettings(conv=((4, 4, 2),), hidden=(8,))
PRIORITIES = DQNSettings(prioritized=True, initial_priorities=True, n_step=2, gamma=0.5)


def net_for(env, settings):
    """A learner's network, whose values differ well from action to action."""
    net = q.build(MODEL, env, dueling=settings.dueling, seed=3)
    with torch.no_grad():
        for head in (net.action_stream[-1], net.value_stream[-1]):
            head.weight.mul_(300.0)
    return net


def build(env, settings=None, *, seed=0, num_envs=64, env_steps=0):
    """The learner's network, and a policy with its weights."""
    settings = settings or DQNSettings(epsilon_initial=0.5, epsilon=0.0, epsilon_env_steps=1_000)
    net = net_for(env, settings)
    place = Place(index=0, peers=1, num_envs=num_envs)
    policy = EpsilonGreedyPolicy(settings=settings, model=MODEL, env=env, precision="fp32", seed=seed, place=place)
    policy.load(4, snapshot.to_tensor(snapshot.flatten(net, "fp32")), env_steps=env_steps)
    return net, policy


def images(env, count=64):
    """Random stacks."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, *env.network_input_shape), dtype=torch.uint8, generator=generator)


def recorded_by_an_actor(sample):
    """A finished rollout: arrays of its own, and room for the priorities."""
    shape = sample.arrays["reward"].shape
    return {name: np.array(array) for name, array in sample.arrays.items()} | {"priority": np.empty(shape, np.float32)}


def test_greedy_takes_the_best_known_action_always(image_env):
    """The evaluator's greedy mode, whatever epsilon is."""
    net, policy = build(image_env)
    acted = policy.act(images(image_env), greedy=True)
    assert set(acted) == {"action"}
    assert torch.equal(acted["action"], net(images(image_env)).argmax(1))
    assert len(acted["action"].unique()) > 1


def test_epsilon_of_the_actions_are_drawn_from_all_alike(image_env):
    """Half of 64 x 100 actions are random, so that 3 of 8 differ from the best of four."""
    net, policy = build(image_env)
    best = net(images(image_env)).argmax(1)
    drawn = torch.stack([policy.act(images(image_env))["action"] for _ in range(100)])
    assert (drawn != best).double().mean().item() == pytest.approx(0.5 * 3 / 4, abs=0.03)
    other = drawn[drawn != best]
    assert torch.bincount(other, minlength=4).min() > 0


def test_a_snapshot_says_how_far_the_run_is(image_env):
    """Epsilon falls from load to load; at its end none of the actions is random."""
    net, policy = build(image_env, env_steps=1_000)
    assert policy.epsilon.tolist() == [0.0] * 64
    assert torch.equal(policy.act(images(image_env))["action"], net(images(image_env)).argmax(1))
    assert policy.version == 4


def test_each_environment_explores_by_its_own_epsilon(image_env):
    """The lowest rung acts greedily, the highest hardly ever."""
    settings = DQNSettings(exploration="ladder", epsilon=1.0, ladder_alpha=7.0)
    net, policy = build(image_env, settings, num_envs=64)
    policy.epsilon = torch.linspace(0.0, 1.0, 64)
    best = net(images(image_env)).argmax(1)
    differs = torch.stack([policy.act(images(image_env))["action"] != best for _ in range(200)]).double().mean(0)
    torch.testing.assert_close(differs, policy.epsilon.double() * 0.75, atol=0.12, rtol=0)


def test_the_seed_decides_the_actions(image_env):
    """Actors of one run draw from streams of their own; the same actor started again draws the same."""
    actions = [build(image_env, seed=seed)[1].act(images(image_env))["action"] for seed in (1, 1, 2)]
    assert torch.equal(actions[0], actions[1])
    assert not torch.equal(actions[0], actions[2])


def test_nothing_is_recorded_beside_the_action_unless_priorities_are_asked_for():
    """The switch is one of the run's settings, so that actor and learner agree on the schema."""
    assert q_policy.recorded(settings=DQNSettings(), length=5, num_envs=3) == ()
    assert q_policy.recorded(settings=DQNSettings(initial_priorities=True), length=5, num_envs=3) == ()
    (spec,) = q_policy.recorded(settings=PRIORITIES, length=5, num_envs=3)
    assert (spec.name, spec.dtype, spec.shape) == ("priority", "float32", (5, 3))


def test_a_rollout_without_priorities_is_sent_as_it_is(image_env, make_sample):
    """No copy, no array more."""
    _, policy = build(image_env)
    rollout = make_sample(image_env).arrays
    assert policy.experience(rollout) is rollout


def test_a_first_priority_is_the_error_of_the_window_by_the_weights_that_acted(vector_env, make_sample):
    """Two steps, gamma one half: written out for a rollout of three in which nothing ends."""
    net, policy = build(vector_env, PRIORITIES, num_envs=1)
    reward, action = np.array([[1.0], [2.0], [-1.0]]), np.array([[2], [0], [1]])
    sample = make_sample(vector_env, length=3, num_envs=1, reward=reward, action=action)
    rollout = recorded_by_an_actor(sample)
    sent = policy.experience(rollout)
    values = net(torch.tensor(sample.arrays["obs"][:, 0])).detach().numpy()
    best, taken = values.max(1), values[np.arange(3), action[:, 0]]
    expected = [1.0 + 1.0 + 0.25 * best[2] - taken[0], 2.0 - 0.5 + 0.25 * best[3] - taken[1], -1.0 + 0.5 * best[3] - taken[2]]
    np.testing.assert_allclose(sent["priority"][:, 0], np.abs(expected), rtol=1e-4)
    assert all(sent[name] is array for name, array in rollout.items() if name != "priority")


@pytest.mark.parametrize("stacked", [True, False])
def test_a_cut_episode_bootstraps_from_its_own_last_observation(image_env, vector_env, make_sample, stacked):
    """Same-step autoreset: the frame that is sent apart counts, the next episode's first does not."""
    env = image_env if stacked else vector_env
    _, policy = build(env, PRIORITIES, num_envs=2)
    ends, start = np.zeros((4, 2), bool), np.zeros((5, 2), bool)
    ends[3, 1] = start[4, 1] = True
    seen = []
    for first_of_next, last in ((0.0, 1.0), (9.0, 1.0), (0.0, 200.0)):
        obs = np.array(make_sample(env).arrays["obs"])
        obs[-1, 1] = first_of_next
        final = np.full((1, *env.observation_shape), last)
        sample = make_sample(env, obs=obs, truncated=ends, start=start, final_obs=final, final_index=[7])
        seen.append(policy.experience(recorded_by_an_actor(sample))["priority"])
    assert np.array_equal(seen[0], seen[1])
    assert (seen[0] != seen[2])[2:, 1].all()


def test_clipped_rewards_make_clipped_errors(vector_env, make_sample):
    """What the learner trains on decides what is surprising."""
    settings = PRIORITIES.model_copy(update={"clip_reward": True})
    seen = []
    for scale in (1.0, 50.0):
        _, policy = build(vector_env, settings, num_envs=2)
        sample = make_sample(vector_env, reward=np.full((4, 2), scale))
        seen.append(policy.experience(recorded_by_an_actor(sample))["priority"])
    assert np.array_equal(seen[0], seen[1])


def test_a_bfloat16_actor_acts_by_its_rounded_weights(image_env):
    """Near the learner's values; heads in float32."""
    net = net_for(image_env, DQNSettings())
    place = Place(index=0, peers=1, num_envs=64)
    policy = EpsilonGreedyPolicy(settings=DQNSettings(), model=MODEL, env=image_env, precision="bf16", seed=0, place=place)
    policy.load(0, snapshot.to_tensor(snapshot.flatten(net, "bf16")), env_steps=0)
    same = policy.act(images(image_env), greedy=True)["action"] == net(images(image_env)).argmax(1)
    assert same.double().mean() > 0.9


def test_another_networks_snapshot_has_another_layout(image_env):
    """Dueling or not is part of what two peers compare before they exchange parameters."""
    place = Place(index=0, peers=1, num_envs=1)
    layouts = {
        EpsilonGreedyPolicy(
            settings=DQNSettings(dueling=dueling), model=MODEL, env=image_env, precision="fp32", seed=0, place=place
        ).layout
        for dueling in (True, False)
    }
    assert len(layouts) == 2
