"""The learner's side of DQN: a chain with known values, the target network and metrics."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from common.algorithms.api import RunProgress
from common.algorithms.dqn import DQN
from common.algorithms.settings import DQNSettings
from common.envs.spec import ActionSpec, EnvSpec
from common.errors import ConfigError
from common.models.spec import ModelSettings
from common.protocol.events import Experience, WorkerKey

WORKER = WorkerKey(name="a", incarnation=1)
pytestmark = pytest.mark.pure

MODEL = ModelSettings(conv=((4, 4, 2),), hidden=(32,))
SMALL = {"replay_capacity": 4_000, "warmup": 0, "minibatch": 4, "samples_per_insert": 0.5, "n_step": 1, "adam_eps": 1e-8}


def build(env, *, seed=0, model=MODEL, **settings):
    """A learner that takes one gradient step on 4 transitions per message of 8 env steps, unless said otherwise."""
    return DQN(settings=DQNSettings(**(SMALL | settings)), model=model, env=env, seed=seed)


def train(algorithm, *samples, env_steps=0):
    """One update, as the learner's loop does it."""
    return algorithm.update(algorithm.ingest(samples), RunProgress(env_steps=env_steps, env_steps_planned=1000, version=0))


def random_play(env, make_sample, *, seq=0, **given):
    """A message of 4 x 2 env steps with random actions and rewards."""
    rng = np.random.default_rng(seq)
    play = {"action": rng.integers(0, env.action.n, (4, 2)), "reward": rng.normal(size=(4, 2))}
    return replace(make_sample(env, seed=seq, **(play | given)), worker=WORKER, seq=seq)


def weights(net):
    """All parameters as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def test_actors_get_an_average_of_the_network_where_that_is_asked(vector_env, make_sample):
    """By hand: after one step it has gone a quarter of the way from the first weights; it survives a resume."""
    plain, averaged = (build(vector_env, learning_rate=1e-2, average_rate=rate) for rate in (1.0, 0.25))
    first = weights(averaged.model).clone()
    for algorithm in (plain, averaged):
        train(algorithm, random_play(vector_env, make_sample))
    assert not torch.equal(weights(plain.model), first)
    assert torch.allclose(weights(averaged.model), first + 0.25 * (weights(plain.model) - first), atol=1e-7)
    resumed = build(vector_env, seed=1, average_rate=0.25)
    resumed.load_state_dict(averaged.state_dict())
    assert torch.equal(weights(resumed.model), weights(averaged.model))
    resumed.load_state_dict(plain.state_dict())
    assert torch.equal(weights(resumed.model), weights(plain.model))


# --- a chain with known values ---

STATES, GAMMA, STEP = 5, 0.8, -0.1
CHAIN = EnvSpec(
    observation_shape=(STATES,),
    observation_dtype="float32",
    action=ActionSpec(choices=(2,), shape=()),
    frame_stack=1,
    frame_skip=1,
)


def moved(state, action):
    """Action 1 goes right, 0 goes left, against a wall at the left end. Right of the last state the episode ends with 1."""
    over = action == 1 and state == STATES - 1
    return (state if over else min(max(state + 2 * action - 1, 0), STATES - 1)), (1.0 if over else STEP), over


def known_values():
    """Q* [states, actions] by value iteration."""
    q = np.zeros((STATES, 2))
    for _ in range(200):
        for state in range(STATES):
            for action in (0, 1):
                after, reward, over = moved(state, action)
                q[state, action] = reward + (0.0 if over else GAMMA * q[after].max())
    return q


class Chain:
    """Random play on the chain by one environment after another, in messages, with next-step autoreset."""

    def __init__(self, make_sample, *, num_envs=8, right=0.5):
        """`right` is how often action 1 is taken."""
        self._make, self._rng, self._right, self._seq = make_sample, np.random.default_rng(0), right, 0
        self._state, self._over = np.zeros(num_envs, int), np.zeros(num_envs, bool)

    def play(self, length=32) -> Experience:
        """The next message."""
        num_envs = len(self._state)
        arrays = {name: np.zeros((length, num_envs)) for name in ("action", "reward", "terminated", "valid")}
        obs, start = np.zeros((length + 1, num_envs, STATES)), np.zeros((length + 1, num_envs), bool)
        for t in range(length):
            obs[t, range(num_envs), self._state] = 1.0
            for b in range(num_envs):
                if self._over[b]:  # the row of the reset
                    self._state[b], self._over[b], start[t + 1, b] = 0, False, True
                    continue
                action = int(self._rng.random() < self._right)
                self._state[b], reward, self._over[b] = moved(self._state[b], action)
                arrays["action"][t, b], arrays["reward"][t, b] = action, reward
                arrays["terminated"][t, b], arrays["valid"][t, b] = self._over[b], True
        obs[length, range(num_envs), self._state] = 1.0
        sample = self._make(CHAIN, length=length, num_envs=num_envs, obs=obs, start=start, **arrays)
        self._seq += 1
        return replace(sample, worker=WORKER, seq=self._seq)


@pytest.mark.parametrize(
    "switches",
    [
        {"double": False, "dueling": False},
        {"double": True, "dueling": False},
        {"double": True, "dueling": True},
        {"double": True, "dueling": True, "target_every": 1, "target_rate": 0.1, "huber": None},
        {"double": True, "dueling": True, "precision": "bf16"},
    ],
    ids=["plain", "double", "dueling", "polyak, squared", "bf16"],
)
def test_it_learns_the_values_of_a_chain_from_random_play(make_sample, switches):
    """Off-policy: whatever acted, the values are those of the best actions, found by value iteration."""
    recipe = {"gamma": GAMMA, "learning_rate": 5e-3, "minibatch": 64, "samples_per_insert": 10, "target_every": 20}
    algorithm, chain = build(CHAIN, **(recipe | switches)), Chain(make_sample)
    for _ in range(20):
        result = train(algorithm, chain.play())
    found = algorithm.model(torch.eye(STATES)).detach().numpy()
    np.testing.assert_allclose(found, known_values(), atol=0.06)
    assert result.metrics["td_abs"] < 0.05


def test_windows_of_several_steps_lead_to_the_same_values_where_play_is_good(make_sample):
    """Three steps of reward before the bootstrap: on-policy, they agree with one-step values."""
    recipe = {"gamma": GAMMA, "learning_rate": 5e-3, "minibatch": 64, "samples_per_insert": 10, "target_every": 20}
    algorithm, chain = build(CHAIN, **(recipe | {"n_step": 3})), Chain(make_sample, right=1.0)
    for _ in range(20):
        train(algorithm, chain.play())
    found = algorithm.model(torch.eye(STATES)).detach().numpy()[:, 1]
    np.testing.assert_allclose(found, known_values()[:, 1], atol=0.06)


# --- the target network ---


def test_the_target_network_follows_every_so_many_gradient_steps(vector_env, make_sample):
    """Hard copies: it stands still in between."""
    algorithm = build(vector_env, target_every=3)
    equal = []
    for seq in range(6):
        train(algorithm, random_play(vector_env, make_sample, seq=seq))
        equal.append(torch.equal(weights(algorithm._target), weights(algorithm.model)))
    assert equal == [False, False, True, False, False, True]


def test_the_target_network_can_follow_slowly(vector_env, make_sample):
    """Polyak averaging: after each step a tenth of the way."""
    algorithm = build(vector_env, target_every=1, target_rate=0.1, learning_rate=1e-2)
    before = weights(algorithm._target)
    train(algorithm, random_play(vector_env, make_sample))
    torch.testing.assert_close(weights(algorithm._target), 0.9 * before + 0.1 * weights(algorithm.model))
    assert not torch.equal(before, weights(algorithm._target))


def test_only_the_online_network_is_published_and_trained(vector_env, make_sample):
    """The published parameters have the layout of one network, and the target's weights get no gradient."""
    algorithm = build(vector_env, target_every=100)
    before = weights(algorithm._target)
    train(algorithm, random_play(vector_env, make_sample))
    assert torch.equal(before, weights(algorithm._target))
    assert not torch.equal(before, weights(algorithm.model))
    assert not any(parameter.requires_grad for parameter in algorithm._target.parameters())


def test_both_networks_see_through_the_same_normalisation(image_env):
    """Example frames come before the first update; the target would else rate what it never saw."""
    algorithm = build(image_env, model=MODEL.model_copy(update={"normalize_observation": True}))
    algorithm.calibrate(torch.randint(0, 256, (20, 10, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(weights(algorithm._target), weights(algorithm.model))
    assert algorithm._target.trunk.normalisation.divisor.item() > 1.0


# --- metrics and rewards ---


def test_the_exploration_of_the_actors_is_reported(vector_env, make_sample):
    """By the env steps of the run."""
    algorithm = build(vector_env, epsilon_initial=1.0, epsilon=0.0, epsilon_env_steps=1000)
    sample = random_play(vector_env, make_sample)
    assert train(algorithm, sample, env_steps=250).metrics["epsilon"] == pytest.approx(0.75)


def test_with_clipped_rewards_only_the_sign_counts(vector_env, make_sample):
    """Breakout's bricks of 1, 4 and 7 points."""
    outcomes = []
    for clip, scale in ((True, 1.0), (True, 7.0), (False, 7.0)):
        algorithm = build(vector_env, clip_reward=clip, huber=None, adam_eps=1.0)
        train(algorithm, random_play(vector_env, make_sample, reward=np.full((4, 2), scale)))
        outcomes.append(weights(algorithm.model))
    assert torch.equal(outcomes[0], outcomes[1])
    assert not torch.equal(outcomes[0], outcomes[2])


def test_actions_that_cannot_be_counted_are_refused_before_anything_is_allocated(continuous_env):
    """`name: dqn` on the pendulum: one line that says what would do."""
    with pytest.raises(ConfigError, match=r"dqn cannot choose .*found .*\(2,\), wanted one of n actions; .*td3"):
        build(continuous_env, replay_capacity=10**15)
