"""The learner's side of DQN: a chain with known values, the target network and metrics."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from common.algorithms.action_values import EpsilonGreedyPolicy
from common.algorithms.api import RunProgress, WorkerContext
from common.algorithms.dqn import DQN
from common.algorithms.settings import DQNSettings
from common.envs.spec import ActionSpec, EnvSpec
from common.errors import ConfigError
from common.models.spec import ModelSettings
from common.protocol.events import Experience, WorkerKey
from tests.common.algorithms.conftest import network_weights, spread

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


def test_actors_get_an_average_of_the_network_where_that_is_asked(vector_env, make_sample):
    """By hand: after one step it has gone a quarter of the way from the first weights; it survives a resume."""
    plain, averaged = (build(vector_env, learning_rate=1e-2, average_rate=rate) for rate in (1.0, 0.25))
    first = network_weights(averaged.model).clone()
    for algorithm in (plain, averaged):
        train(algorithm, random_play(vector_env, make_sample))
    assert not torch.equal(network_weights(plain.model), first)
    assert torch.allclose(network_weights(averaged.model), first + 0.25 * (network_weights(plain.model) - first), atol=1e-7)
    resumed = build(vector_env, seed=1, average_rate=0.25)
    resumed.load_state_dict(averaged.state_dict())
    assert torch.equal(network_weights(resumed.model), network_weights(averaged.model))
    resumed.load_state_dict(plain.state_dict())
    assert torch.equal(network_weights(resumed.model), network_weights(plain.model))


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
    found = algorithm.model(torch.eye(STATES))[0].detach().numpy()
    np.testing.assert_allclose(found, known_values(), atol=0.06)
    assert result.metrics["td_abs"] < 0.05


def test_windows_of_several_steps_lead_to_the_same_values_where_play_is_good(make_sample):
    """Three steps of reward before the bootstrap: on-policy, they agree with one-step values."""
    recipe = {"gamma": GAMMA, "learning_rate": 5e-3, "minibatch": 64, "samples_per_insert": 10, "target_every": 20}
    algorithm, chain = build(CHAIN, **(recipe | {"n_step": 3})), Chain(make_sample, right=1.0)
    for _ in range(20):
        train(algorithm, chain.play())
    found = algorithm.model(torch.eye(STATES))[0].detach().numpy()[:, 1]
    np.testing.assert_allclose(found, known_values()[:, 1], atol=0.06)


# --- the gradient step and the target network ---


def test_the_target_network_follows_every_so_many_gradient_steps(vector_env, make_sample):
    """Hard copies: it stands still in between."""
    algorithm = build(vector_env, target_every=3)
    equal = []
    for seq in range(6):
        train(algorithm, random_play(vector_env, make_sample, seq=seq))
        equal.append(torch.equal(network_weights(algorithm._target), network_weights(algorithm.model)))
    assert equal == [False, False, True, False, False, True]


def test_the_target_network_can_follow_slowly(vector_env, make_sample):
    """Polyak averaging: after each step a tenth of the way."""
    algorithm = build(vector_env, target_every=1, target_rate=0.1, learning_rate=1e-2)
    before = network_weights(algorithm._target)
    train(algorithm, random_play(vector_env, make_sample))
    torch.testing.assert_close(network_weights(algorithm._target), 0.9 * before + 0.1 * network_weights(algorithm.model))
    assert not torch.equal(before, network_weights(algorithm._target))


def test_only_the_online_network_is_published_and_trained(vector_env, make_sample):
    """The published parameters have the layout of one network, and the target's weights get no gradient."""
    algorithm = build(vector_env, target_every=100)
    before = network_weights(algorithm._target)
    train(algorithm, random_play(vector_env, make_sample))
    assert torch.equal(before, network_weights(algorithm._target))
    assert not torch.equal(before, network_weights(algorithm.model))
    assert not any(parameter.requires_grad for parameter in algorithm._target.parameters())


def test_both_networks_see_through_the_same_normalisation(image_env):
    """Example frames come before the first update; the target would else rate what it never saw."""
    algorithm = build(image_env, model=MODEL.model_copy(update={"normalize_observation": True}))
    algorithm.calibrate(torch.randint(0, 256, (20, 10, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(network_weights(algorithm._target), network_weights(algorithm.model))
    assert algorithm._target.trunk.normalisation.divisor.item() > 1.0


@pytest.mark.parametrize(("double", "huber", "norm"), [(True, None, 1e9), (False, None, 1e9), (True, 0.5, 0.1)])
def test_a_gradient_step_is_the_textbook_one(vector_env, make_sample, double, huber, norm):
    """The target network rates the action that the online network selects (`double`), or its own best one.

    The epsilon of Adam is so large that it does not hide the size of a gradient.
    """
    recipe = {"adam_eps": 1.0, "learning_rate": 1.0, "max_grad_norm": norm, "gamma": GAMMA}
    algorithm = build(vector_env, double=double, huber=huber, **recipe)
    spread(algorithm.model, seed=1)
    spread(algorithm._target, seed=2)
    net, target = copy.deepcopy(algorithm.model), copy.deepcopy(algorithm._target)
    algorithm.ingest([random_play(vector_env, make_sample, seq=seq, terminated=np.eye(4)[:, :2]) for seq in range(4)])
    rows = algorithm._replay.sample(64, np.random.default_rng(0))
    algorithm._gradient_step(rows)

    arrays = (rows.observation, rows.next_observation, rows.reward, rows.discount)
    observation, following, reward, discount = map(torch.from_numpy, arrays)
    rated, selected = target(following)[0], net(following)[0].argmax(1)
    assert 0 < (selected == rated.argmax(1)).sum() < 64
    value = rated[range(64), selected if double else rated.argmax(1)]
    error = net(observation)[0][range(64), rows.action] - (reward + discount * value)
    loss = 0.5 * error**2
    if huber is not None:
        loss = torch.where(error.abs() < huber, loss, huber * (error.abs() - 0.5 * huber))
    loss.mean().backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), norm)
    torch.optim.Adam(net.parameters(), lr=1.0, eps=1.0).step()
    torch.testing.assert_close(network_weights(algorithm.model), network_weights(net), rtol=0, atol=1e-6)


# --- metrics and rewards ---


def test_the_exploration_of_the_actors_is_reported(vector_env, make_sample):
    """By the env steps of the run."""
    algorithm = build(vector_env, epsilon_initial=1.0, epsilon=0.0, epsilon_env_steps=1000)
    sample = random_play(vector_env, make_sample)
    assert train(algorithm, sample, env_steps=250).metrics["epsilon"] == pytest.approx(0.75)


def test_actions_that_cannot_be_counted_are_refused_before_anything_is_allocated(continuous_env):
    """`name: dqn` on the pendulum: one line that says what would do."""
    with pytest.raises(ConfigError, match=r"dqn cannot choose .*found .*\(2,\), wanted one of n actions; .*td3"):
        build(continuous_env, replay_capacity=10**15)


# --- memory ---

LSTM = ModelSettings(hidden=(8,), recurrent="lstm", recurrent_size=5)
ROLLOUT, BURN_IN, N_STEP = 6, 2, 2


def remembering(env, model=LSTM, **settings):
    """A learner of sequences: rollouts of 6 rows by 2 environments. Its step is nearly linear in the gradient."""
    recipe = {"adam_eps": 1.0, "learning_rate": 1.0, "max_grad_norm": 1e9, "huber": None, "dueling": False, "gamma": GAMMA}
    sizes = {"minibatch": 2 * ROLLOUT, "burn_in": BURN_IN, "n_step": N_STEP}
    return DQN(settings=DQNSettings(**(SMALL | recipe | sizes | settings)), model=model, env=env, seed=0, length=ROLLOUT)


def memories(env, make_sample, *, seq, model=LSTM):
    """A message with states, starts and ends drawn at random."""
    rng, shape = np.random.default_rng(seq), (ROLLOUT, 2)
    play = {
        "action": rng.integers(0, env.action.n, shape),
        "reward": rng.normal(size=shape),
        "terminated": rng.random(shape) < 0.2,
    }
    play["valid"] = ~np.concatenate([np.zeros((1, 2), bool), play["terminated"][:-1]])  # a reset row follows an end
    play["terminated"] &= play["valid"]
    play["start"] = np.concatenate([np.zeros((2, 2), bool), play["terminated"][:-1]])
    sample = make_sample(env, seed=seq, length=ROLLOUT, **play)
    states = rng.normal(size=(2, 2, model.state_size)).astype(np.float32)
    return replace(sample, worker=WORKER, seq=seq, arrays=dict(sample.arrays) | {"memory": states})


def textbook_values(net, observation, start, state, *, burn_in):
    """Q [M+1, n] of one sequence by the cell alone, row after row; what comes before the burn-in's end has no gradient."""
    h, c = state.split(5)
    values = []
    for row, (seen, begins) in enumerate(zip(observation, start, strict=True)):
        if row == burn_in:
            h, c = h.detach(), c.detach()
        h, c = (torch.zeros_like(h), torch.zeros_like(c)) if begins else (h, c)
        h, c = net.recurrent.cell(net.trunk(seen[None], torch.float32), (h.view(1, -1), c.view(1, -1)))
        values.append(net.action_stream(h)[0])
    return torch.stack(values)


def test_a_gradient_step_with_memory_is_the_textbook_one(vector_env, make_sample):
    """Kapturowski et al. 2019: stored state, burn-in without gradient, n-step double targets inside the sequence."""
    learner = remembering(vector_env)
    other = remembering(vector_env)
    with torch.no_grad():
        for parameter in learner._target.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    samples = [memories(vector_env, make_sample, seq=seq) for seq in range(4)]
    for sample in samples:
        learner.ingest([sample])
    rows = learner._replay.sample(2 * ROLLOUT, np.random.default_rng(0))
    assert rows.start[1:].any()
    target = copy.deepcopy(learner._target)
    measured = learner._gradient_step(rows)

    net, losses = other.model, []
    for i in range(2):
        given = torch.from_numpy(rows.observation[:, i]), rows.start[:, i], torch.from_numpy(rows.memory[i])
        values, old = textbook_values(net, *given, burn_in=BURN_IN), textbook_values(target, *given, burn_in=0).detach()
        for k in np.flatnonzero(rows.index % 2 == i):
            best = values[rows.following[k] // 2].detach().argmax()
            wanted = rows.reward[k] + rows.discount[k] * old[rows.following[k] // 2][best]
            losses.append(0.5 * (values[rows.index[k] // 2][rows.action[k]] - wanted) ** 2)
    torch.stack(losses).mean().backward()
    torch.optim.Adam(net.parameters(), lr=1.0, eps=1.0).step()
    torch.testing.assert_close(network_weights(learner.model), network_weights(net), rtol=0, atol=1e-6)
    assert not torch.equal(network_weights(net), network_weights(remembering(vector_env).model))
    assert measured["memory_error"] > 0


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_stored_states_of_the_newest_weights_have_no_error(vector_env, make_sample, cell):
    """Metric `memory_error`: the states of an actor that acts by the learner's own weights are those that it recomputes."""
    model = ModelSettings(hidden=(8,), recurrent=cell, recurrent_size=5)
    learner = remembering(vector_env, model, learning_rate=1e-9)
    settings, context = DQNSettings(dueling=False), WorkerContext(index=0, workers=1, num_envs=2)
    policy = EpsilonGreedyPolicy(settings=settings, model=model, env=vector_env, precision="fp32", seed=0, context=context)
    policy.load(0, network_weights(learner.model), env_steps=0)
    state = np.zeros((2, model.state_size), np.float32)
    for seq in range(3):
        sample = memories(vector_env, make_sample, seq=seq, model=model)
        obs = sample.arrays["obs"]
        for t in range(ROLLOUT):
            policy.begin_episodes(torch.tensor(sample.arrays["start"][t]))
            policy.act(torch.tensor(obs[t]))
        states = np.stack([state, policy.memory.numpy()])
        learner.ingest([replace(sample, arrays=dict(sample.arrays) | {"memory": states})])
        state = states[1]
    assert state.any()
    assert learner._gradient_step(learner._replay.sample(4 * ROLLOUT, np.random.default_rng(0)))["memory_error"] < 1e-6


def test_a_sequence_of_rows_that_are_no_env_steps_trains_nothing(vector_env, make_sample):
    """As of an env worker that is away: no metric of nothing, no step that counts as one that was not finite, no change."""
    learner = remembering(vector_env, minibatch=ROLLOUT, samples_per_insert=1.0)
    before = network_weights(learner.model).clone()
    for seq in range(3):
        sample = memories(vector_env, make_sample, seq=seq)
        result = train(learner, replace(sample, arrays=dict(sample.arrays) | {"valid": np.zeros((ROLLOUT, 2), bool)}))
    assert result.metrics["samples_per_insert"] > 0
    assert (result.metrics["nonfinite_steps"], result.metrics["gradient_steps"]) == (0, 0)
    assert not {"loss", "window_env_steps", "memory_error"} & result.metrics.keys()
    assert torch.equal(network_weights(learner.model), before)
