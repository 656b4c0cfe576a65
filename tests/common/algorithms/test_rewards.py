"""The running deviation of the discounted return, by which a learner divides rewards (`env.normalize_reward`)."""

from __future__ import annotations

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

from common.algorithms.api import RunProgress
from common.algorithms.ranks import ALONE
from common.algorithms.registry import ALGORITHMS, build_algorithm
from common.algorithms.rewards import RewardStatistics
from common.models import snapshot
from common.models.spec import ModelSettings
from common.protocol.events import WorkerKey

pytestmark = pytest.mark.pure

GAMMA = 0.9


@pytest.fixture
def message(vector_env, make_sample):
    """Makes a message of one actor, by its number and slot; arrays to differ by keyword."""

    def make(seq=0, *, slot=0, length=4, num_envs=1, **given):
        sample = make_sample(vector_env, length=length, num_envs=num_envs, **given)
        return replace(sample, worker=WorkerKey(name=f"w{slot}", incarnation=1), index=slot, seq=seq)

    return make


def statistics():
    return RewardStatistics(enabled=True, gamma=GAMMA, ranks=ALONE)


def returns(rewards):
    """The discounted returns of one episode, by definition."""
    return [sum(GAMMA ** (t - s) * rewards[s] for s in range(t + 1)) for t in range(len(rewards))]


class Recorded(gymnasium.Env):
    """Endless, with rewards that were drawn before."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, rewards):
        self.rewards = iter(rewards)

    def reset(self, *, seed=None, options=None):  # noqa: ARG002
        return np.zeros(1, np.float32), {}

    def step(self, _):
        return np.zeros(1, np.float32), float(next(self.rewards)), False, False, {}


def test_the_deviation_of_an_episode_is_that_of_gymnasium(message):
    """Over trajectories. Only there: gymnasium adds the reward of an episode's end to a return of 0, and goes on after it."""
    rewards = np.random.default_rng(0).normal(0.2, 1.0, 1_000).astype(np.float32)
    wrapped = gymnasium.wrappers.NormalizeReward(Recorded(rewards), gamma=GAMMA)
    wrapped.reset()
    scaled = [wrapped.step(0)[1] for _ in rewards]
    found = statistics()
    for seq, part in enumerate(rewards.reshape(10, 100, 1)):
        found.add([message(seq, length=100, reward=part)])
    std = found.metrics["reward_std"]
    assert std == pytest.approx(float(np.sqrt(wrapped.return_rms.var)), rel=1e-6)
    assert std == pytest.approx(np.std(returns(rewards.tolist()), ddof=0), rel=1e-9)
    assert found.scaled(rewards[-1:])[0] == pytest.approx(scaled[-1], rel=1e-6)


def test_returns_begin_again_with_each_episode_and_rows_without_a_reward_do_not_count(message):
    """Two environments: an end, its reset row, a start; a missing row, a reward that is not finite, a truncation, a lost life."""
    reward = np.array([[1, 2], [3, 4], [0, np.nan], [5, 6], [7, 8], [9, 0], [10, 11]], np.float32)
    flags = {name: np.zeros((7, 2), bool) for name in ("terminated", "truncated")}
    start, valid = np.zeros((8, 2), bool), np.ones((7, 2), bool)
    flags["terminated"][1, 0] = start[3, 0] = True
    valid[2, 0] = valid[5, 1] = False
    flags["truncated"][4, 0] = start[5, 0] = True  # same_step
    flags["terminated"][3, 1] = True  # a lost life: no start follows
    start[7, 0] = True  # and no end before it
    found = statistics()
    found.add([message(0, length=7, num_envs=2, reward=reward, valid=valid, start=start, **flags)])
    found.add([message(1, length=1, num_envs=2, reward=[[20, 30]])])
    episodes = [[1, 3], [5, 7], [9, 10], [20], [2, 4], [6], [8], [11, 30]]
    wanted = [each for episode in episodes for each in returns(episode)]
    assert found.state_dict()["moments"]["count"] == len(wanted)
    assert found.metrics["reward_std"] == pytest.approx(np.std(wanted), rel=1e-12)


@pytest.mark.parametrize(
    ("second", "goes_on"),
    [
        ({}, True),
        ({"seq": 2}, False),  # one was dropped
        ({"worker": WorkerKey(name="w0", incarnation=2)}, False),
        ({"index": 1}, False),
    ],
)
def test_a_return_goes_on_in_the_next_message_of_the_same_actor_alone(message, second, goes_on):
    """Also when the state was saved between both, and messages of another slot came between them."""
    first, found = statistics(), statistics()
    first.add([message(0, reward=[[1], [2], [3], [4]]), message(0, slot=7, reward=[[0], [0], [0], [1]])])
    found.load_state_dict(first.state_dict())
    found.add([replace(message(1, reward=[[5], [6], [7], [8]]), **second)])
    parts = [[1, 2, 3, 4, 5, 6, 7, 8]] if goes_on else [[1, 2, 3, 4], [5, 6, 7, 8]]
    wanted = [each for part in [*parts, [0, 0, 0, 1]] for each in returns(part)]
    assert found.metrics["reward_std"] == pytest.approx(np.std(wanted), rel=1e-12)


def test_returns_that_do_not_differ_leave_rewards_as_they_are(message):
    found = statistics()
    assert found.scaled(torch.tensor([3.0])).tolist() == [3.0]
    found.add([message(0, length=1, num_envs=3, reward=[[5, 5, 5]])])
    assert found.scaled(torch.tensor([3.0])).tolist() == [3.0]


REPLAY = {"replay_capacity": 1_000, "warmup": 0, "minibatch": 4, "samples_per_insert": 1.0}
EPOCHS = {"minibatch": 8}
LEARNERS = {"ppo": EPOCHS, "impala": {}, "a3c": {}, "pqn": EPOCHS, "dqn": REPLAY | {"n_step": 2}, "td3": REPLAY, "sac": REPLAY}


@pytest.fixture
def trained(vector_env, continuous_env, make_sample):
    """Trains an algorithm on three messages with rewards times `scale`; its weights and the deviation of the returns."""

    def train(name, scale, *, normalize=False, clip=False):
        env = continuous_env if name in {"td3", "sac"} else vector_env
        settings = ALGORITHMS[name].settings(gamma=GAMMA, clip_reward=clip, **LEARNERS[name])
        learner = build_algorithm(settings, model=ModelSettings(hidden=(8,)), env=env, seed=0, normalize_reward=normalize)
        for seq in range(3):
            reward = scale * np.random.default_rng(seq).normal(size=(8, 2)).astype(np.float32)
            sample = replace(make_sample(env, length=8, seed=seq, reward=reward), seq=seq)
            result = learner.update(learner.ingest([sample]), RunProgress(env_steps=0, env_steps_planned=100, version=0))
            std = result.metrics.get("reward_std", 0.0)
        return np.concatenate(
            [snapshot.flatten(net, "fp32") for net in vars(learner).values() if isinstance(net, nn.Module)]
        ), std

    return train


@pytest.mark.parametrize("name", LEARNERS)
def test_the_scale_of_rewards_makes_no_difference_to_what_is_learned(trained, name):
    """Rewards times 8,192, a power of 2, train the same weights bit for bit, and other weights without the setting."""
    (weights, std), (large, large_std) = trained(name, 1.0, normalize=True), trained(name, 8192.0, normalize=True)
    assert large_std == 8192.0 * std > 0
    assert np.array_equal(weights, large)
    raw, none = trained(name, 8192.0)
    assert none == 0.0
    assert not np.array_equal(raw, weights)


@pytest.mark.parametrize("name", LEARNERS)
def test_with_clipped_rewards_only_the_sign_counts(trained, name):
    """Breakout's bricks of 1, 4 and 7 points."""
    (ones, _), (sevens, _), (raw, _) = trained(name, 1.0, clip=True), trained(name, 7.0, clip=True), trained(name, 1.0)
    assert np.array_equal(ones, sevens)
    assert not np.array_equal(ones, raw)
