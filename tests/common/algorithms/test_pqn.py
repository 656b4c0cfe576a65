"""PQN: whole updates against a textbook, exploration within masks, and what is refused."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from common.algorithms.action_values import EpsilonGreedyPolicy
from common.algorithms.api import WorkerContext
from common.algorithms.pqn import PQN
from common.algorithms.settings import PQNSettings
from common.algorithms.trajectories import batch_outputs
from common.envs.make import make
from common.envs.spec import EnvSettings
from common.errors import ConfigError
from common.models import snapshot
from common.models.spec import ModelSettings
from tests.common.algorithms.conftest import spread, weights
from tests.common.algorithms.test_memory import WIDTHS, F, H, T, at, episodes, messages, rollouts

pytestmark = pytest.mark.pure

MODES = pytest.mark.parametrize("mode", ["next_step", "same_step"])


def model(cell):
    """A small network, with layer normalisation."""
    return ModelSettings(hidden=(F,), activation="tanh", layer_norm=True, recurrent=cell, recurrent_size=H)


def build(env, cell=None, *, seed=0, **settings):
    """A learner whose weights are no longer the first ones, by which all actions are nearly alike."""
    algorithm = PQN(settings=PQNSettings(**settings), model=model(cell), env=env, seed=seed)
    spread(algorithm.model)
    return algorithm


class Textbook(nn.Module):
    """The same network of torch's own layers, called for one episode after the other."""

    def __init__(self, cell, net):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(2, F), nn.LayerNorm(F), nn.Tanh())
        self.cell = {"lstm": nn.LSTM, "gru": nn.GRU}[cell](F, H) if cell else None
        self.head = nn.Linear(H if cell else F, 3)
        with torch.no_grad():
            for own, other in zip(self.parameters(), net.parameters(), strict=True):
                own.copy_(other)

    def forward(self, observation, state):
        """Observations [L, 2] of one episode and its first state [S] → Q [L, 3]."""
        features = self.trunk(observation)
        if self.cell is not None:
            state = state.view(1, -1)
            if isinstance(self.cell, nn.LSTM):
                state = tuple(part.contiguous() for part in state.split(H, dim=1))
            features, _ = self.cell(features, state)
        return self.head(features)


def textbook_returns(net, arrays, b, gamma, lambda_):
    """Q(lambda) returns [T] of environment `b`, episode by episode, backwards."""
    returns = np.zeros(T)
    for rows, seen, state in episodes(arrays, b):
        with torch.no_grad():
            greedy = net(seen, state).double().numpy().max(axis=1)
        later = None  # the return of the row behind
        for t in reversed(range(rows.start, rows.stop)):
            if not arrays["valid"][t, b]:
                later = None
                continue
            following = greedy[t - rows.start + 1] if t - rows.start + 1 < len(greedy) else 0.0
            if arrays["terminated"][t, b]:
                following = 0.0
            elif later is not None and not arrays["truncated"][t, b]:
                following = lambda_ * later + (1 - lambda_) * following
            later = returns[t] = arrays["reward"][t, b] + gamma * following
    return returns


def textbook_update(net, sent, settings, *, seed, whole):
    """PQN as algorithm 1 of the paper has it, with minibatches of single rows, or of whole environments."""
    places = [(message.arrays, b) for message in sent for b in range(message.arrays["reward"].shape[1])]
    targets = [textbook_returns(net, arrays, b, settings.gamma, settings.q_lambda) for arrays, b in places]
    optimizer = torch.optim.RAdam(net.parameters(), lr=settings.learning_rate)
    generator = torch.Generator().manual_seed(seed)
    steps = round(sum(message.env_steps for message in sent) / settings.minibatch)
    valid = [(t, number) for t in range(T) for number, (arrays, b) in enumerate(places) if arrays["valid"][t, b]]
    drawn = [[(t, number) for t in range(T)] for number in range(len(places))] if whole else [[row] for row in valid]
    for _ in range(settings.epochs):
        for chosen in torch.randperm(len(drawn), generator=generator).tensor_split(steps):
            rows, losses = {row for number in chosen.tolist() for row in drawn[number]} & set(valid), []
            for number, (arrays, b) in enumerate(places):
                for part, seen, state in episodes(arrays, b):
                    values = net(seen, state)
                    for t in range(part.start, part.stop):
                        if (t, number) in rows:
                            error = values[t - part.start, arrays["action"][t, b]] - targets[number][t]
                            losses.append(0.5 * error.square())
            optimizer.zero_grad()
            (sum(losses) / len(rows)).backward()
            nn.utils.clip_grad_norm_(net.parameters(), settings.max_grad_norm)
            optimizer.step()


@pytest.mark.parametrize("cell", [None, "lstm", "gru"])
@MODES
def test_a_whole_update_is_that_of_a_textbook(vector_env, make_sample, cell, mode):
    """Episodes that terminate and are truncated, reset rows, states that are not zero, gradients that are cut."""
    algorithm = build(
        vector_env, cell, seed=5, minibatch=20, epochs=4, max_grad_norm=0.3, learning_rate=1e-2, gamma=0.9, q_lambda=0.4
    )
    before, wanted = copy.deepcopy(algorithm.model), Textbook(cell, algorithm.model)
    sent = messages(vector_env, algorithm._state_size, mode, make_sample)
    result = algorithm.update(algorithm.ingest(sent), at())
    textbook_update(wanted, sent, algorithm._settings, seed=5, whole=cell is not None)
    assert result.metrics["grad_norm"] > 0.3
    assert (result.metrics.get("memory_error", 0) > 0.01) == (cell is not None)
    assert result.samples == sum(message.env_steps for message in sent) == sum(WIDTHS) * T - (mode == "next_step") * 4
    trained = zip(algorithm.model.named_parameters(), before.parameters(), wanted.parameters(), strict=True)
    for (name, found), old, new in trained:
        assert (found - old).abs().max() > 1e-3, name
        torch.testing.assert_close(found.detach(), new.detach(), rtol=0, atol=1e-6, msg=name)


@MODES
def test_masks_hold_in_exploration_and_in_returns(mode):
    """No action is drawn that was forbidden, and the value of what follows is the largest of an allowed action."""
    kwargs = {"actions": "discrete", "mask": "leaf"}
    env = EnvSettings(entry_point="common.envs.probes:mixed_action", num_envs=4, autoreset=mode, kwargs=kwargs, action_mask=True)
    built = {"settings": PQNSettings(epsilon_initial=0.5), "model": ModelSettings(hidden=(F,), conv=()), "env": make(env).spec}
    algorithm, context = PQN(**built, seed=0), WorkerContext(index=0, workers=1, num_envs=4)
    spread(algorithm.model)
    policy = EpsilonGreedyPolicy(**built, precision="fp32", seed=1, context=context)
    policy.load(0, snapshot.to_tensor(weights(algorithm)), env_steps=0)
    batch = algorithm.ingest([next(rollouts(env, policy, state_size=0, seed=3))])
    net, seen = algorithm.model, batch.observation[:-1].flatten(0, 1)
    allowed = net.allowed(seen)
    taken = allowed.gather(1, batch.action.flatten().unsqueeze(1)).squeeze(1)
    assert taken[batch.valid.flatten()].all()
    assert not allowed.all()
    outputs = batch_outputs(net, batch, precision="fp32")
    with torch.no_grad():
        raw = net.action_stream(net.trunk(seen, torch.float32))
    best = raw.masked_fill(~allowed, -torch.inf).amax(1)
    torch.testing.assert_close(torch.cat([output.value.amax(1) for output in outputs.rows]).detach(), best)
    assert (best < raw.amax(1)).any()
    last = seen.clone()  # of an episode: what is allowed there does not matter, and its value does
    last[:, net._masks._columns[-1]] = 0
    torch.testing.assert_close(net(last).value, raw)


@pytest.mark.parametrize("steps", [0, 3])
def test_an_update_that_is_stopped_leaves_out_the_steps_to_come(vector_env, make_sample, steps):
    algorithm, asked = build(vector_env, minibatch=4, epochs=50), iter(range(1_000_000))
    batch = algorithm.ingest([make_sample(vector_env, length=16)])
    result = algorithm.update(batch, at(), lambda: next(asked) >= steps)
    taken = [int(state["step"]) for state in algorithm.state_dict()["optimizer"]["radam"].values()]
    assert set(taken) == ({steps} if steps else set())
    assert ("loss" in result.metrics) == (steps > 0)


def test_the_lag_and_the_exploration_of_the_actors_are_reported(vector_env, make_sample):
    algorithm = build(vector_env, minibatch=4, epsilon_env_steps=10)
    samples = [make_sample(vector_env, version=-2), make_sample(vector_env, version=-4)]
    metrics = algorithm.update(algorithm.ingest(samples), replace(at(), env_steps=5)).metrics
    assert (metrics["policy_lag_mean"], metrics["epsilon"]) == (3.0, pytest.approx(0.505))


def test_actions_that_cannot_be_counted_are_refused(continuous_env):
    with pytest.raises(ConfigError, match=r"pqn cannot choose .*found .*\(2,\), wanted one of n actions; .*td3"):
        build(continuous_env)
