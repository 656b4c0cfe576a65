"""Actor-critics with memory: whole updates against textbook ones, fresh data, and batches in which little or nothing is valid."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from common.algorithms.api import RunProgress, states
from common.algorithms.on_policy import ActorCriticPolicy, recorded_log_prob
from common.algorithms.payload import trajectory_schema
from common.algorithms.ppo import PPO
from common.algorithms.registry import ALGORITHMS, build_algorithm
from common.algorithms.settings import PPOSettings
from common.envs.make import make
from common.envs.spec import EnvSettings
from common.models import snapshot
from common.models.spec import ModelSettings
from common.protocol.events import Experience
from services.acting.rollout import Rollout
from tests.common.algorithms.conftest import spread

pytestmark = pytest.mark.pure

T, H, F = 12, 6, 8
WIDTHS = (3, 2)  # environments of the two messages of a batch
CELLS = pytest.mark.parametrize("cell", ["lstm", "gru"])
MODES = pytest.mark.parametrize("mode", ["next_step", "same_step"])
ENDS = {(2, 0): "truncated", (5, 0): "terminated", (7, 1): "truncated", (4, 3): "terminated", (T - 1, 4): "truncated"}


def at(version=0):
    """The beginning of a run."""
    return RunProgress(env_steps=0, env_steps_planned=1_000, version=version)


def model(cell):
    """A small network with memory."""
    return ModelSettings(hidden=(F,), activation="tanh", recurrent=cell, recurrent_size=H)


def messages(env, state_size, mode, make_sample):
    """Rollouts side by side, with `ENDS` in them; memories are not zero, and environment 2 begins an episode with its row 0."""
    rng, found, first = np.random.default_rng(3), [], 0
    for width in WIDTHS:
        ends = {(t, b - first): how for (t, b), how in ENDS.items() if first <= b < first + width}
        start, valid = np.zeros((T + 1, width), bool), np.ones((T, width), bool)
        kinds = {kind: np.zeros((T, width), bool) for kind in ("terminated", "truncated")}
        final_index = []
        for (t, b), kind in ends.items():
            kinds[kind][t, b] = True
            if mode == "same_step":
                start[t + 1, b] = True
                final_index += [t * width + b] if kind == "truncated" else []
            elif t + 1 < T:
                valid[t + 1, b], start[t + 2, b] = False, True
        if first <= 2 < first + width:
            start[0, 2 - first] = True
        given = {
            "obs": rng.normal(size=(T + 1, width, 2)),
            "start": start,
            "action": rng.integers(env.action.n, size=(T, width)),
            "reward": rng.normal(size=(T, width)),
            "valid": valid,
            "final_obs": rng.normal(size=(len(final_index), 2)),
            "final_index": final_index,
            "log_prob": rng.normal(-1.1, 0.2, size=(T, width)),
        } | ({"memory": rng.normal(size=(2, width, state_size))} if state_size else {})
        found.append(make_sample(env, length=T, num_envs=width, **given, **kinds))
        first += width
    return found


class Textbook(nn.Module):
    """The same network of torch's own layers, called for one episode after the other."""

    def __init__(self, cell, net):
        super().__init__()
        self.trunk, self.cell = nn.Linear(2, F), nn.LSTM(F, H) if cell == "lstm" else nn.GRU(F, H)
        self.policy, self.value = nn.Linear(H, 3), nn.Linear(H, 1)
        with torch.no_grad():
            for own, other in zip(self.parameters(), net.parameters(), strict=True):
                own.copy_(other)

    def forward(self, observation, state):
        """Observations [L, 2] of one episode and its first state [S] → log-probabilities [L, 3] and values [L]."""
        state = state.view(1, -1)
        if isinstance(self.cell, nn.LSTM):
            state = tuple(part.contiguous() for part in state.split(H, dim=1))
        outputs, _ = self.cell(torch.tanh(self.trunk(observation)), state)
        return self.policy(outputs).log_softmax(1), self.value(outputs).squeeze(1)


def episodes(arrays, b):
    """Each episode of environment `b`: its rows, its observations to the last one that was seen, and its first state."""
    start, final = arrays["start"][:, b], dict(zip(arrays["final_index"].tolist(), arrays["final_obs"], strict=True))
    width, memory = arrays["start"].shape[1], arrays.get("memory", np.zeros((2, arrays["start"].shape[1], 0), np.float32))
    begins = [0, *(t for t in range(1, T) if start[t])]
    for begin, end in zip(begins, [*begins[1:], T], strict=True):
        seen = list(arrays["obs"][begin:end, b])
        if (end - 1) * width + b in final:
            seen.append(final[(end - 1) * width + b])
        elif end == T and not start[T]:
            seen.append(arrays["obs"][T, b])
        state = np.zeros_like(memory[0, b]) if start[begin] else memory[0, b]
        yield slice(begin, end), torch.tensor(np.array(seen)), torch.tensor(state)


def textbook_gae(net, arrays, b, gamma, lambda_):
    """Advantages and targets [T] of environment `b`, episode by episode."""
    advantage, target = np.zeros(T), np.zeros(T)
    for rows, seen, state in episodes(arrays, b):
        with torch.no_grad():
            value = net(seen, state)[1].double().numpy()
        running = 0.0
        for t in reversed(range(rows.start, rows.stop)):
            if not arrays["valid"][t, b]:
                running = 0.0
                continue
            i = t - rows.start
            ended = arrays["terminated"][t, b] or arrays["truncated"][t, b]
            following = 0.0 if arrays["terminated"][t, b] else value[i + 1]
            delta = arrays["reward"][t, b] + gamma * following - value[i]
            running = delta + (0.0 if ended else gamma * lambda_ * running)
            advantage[t], target[t] = running, running + value[i]
    return advantage, target


def textbook_update(net, sent, settings, seed):
    """PPO as the paper has it (arXiv:1707.06347), with minibatches of whole environments."""
    places = [(message.arrays, b) for message in sent for b in range(message.arrays["reward"].shape[1])]
    estimates = [textbook_gae(net, arrays, b, settings.gamma, settings.gae_lambda) for arrays, b in places]
    optimizer = torch.optim.Adam(net.parameters(), lr=settings.learning_rate, eps=settings.adam_eps)
    generator = torch.Generator().manual_seed(seed)
    steps = round(sum(message.env_steps for message in sent) / settings.minibatch)
    for _ in range(settings.epochs):
        for chosen in torch.randperm(len(places), generator=generator).tensor_split(steps):
            parts = []
            for number in chosen.tolist():
                (arrays, b), (advantage, target) = places[number], estimates[number]
                for rows, seen, state in episodes(arrays, b):
                    log_probs, value = net(seen, state)
                    valid = torch.tensor(arrays["valid"][rows, b])
                    length = len(valid)
                    action = torch.tensor(arrays["action"][rows, b])
                    given = (torch.tensor(array[rows]).float() for array in (arrays["log_prob"][:, b], advantage, target))
                    log_prob = log_probs[torch.arange(length), action]
                    entropy = -(log_probs.exp() * log_probs).sum(1)[:length]
                    parts.append([each[valid] for each in (log_prob, entropy, value[:length], *given)])
            log_prob, entropy, value, old, advantage, target = (torch.cat(part) for part in zip(*parts, strict=True))
            deviation = max(advantage.std(correction=0).item(), settings.least_advantage_std)
            advantage = (advantage - advantage.mean()) / deviation
            ratio = (log_prob - old).exp()
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - settings.clip, 1 + settings.clip) * advantage)
            loss = -surrogate.mean() + settings.value_coef * 0.5 * (value - target).square().mean()
            optimizer.zero_grad()
            (loss - settings.entropy_coef * entropy.mean()).backward()
            nn.utils.clip_grad_norm_(net.parameters(), settings.max_grad_norm)
            optimizer.step()


@pytest.mark.parametrize(("cell", "clip"), [("lstm", 0.1), ("gru", 0.3)])
@MODES
def test_a_whole_update_is_that_of_a_textbook(vector_env, make_sample, cell, mode, clip):
    """Resets inside, truncated episodes, states that are not zero; minibatches of whole environments, clipped ratios."""
    loss = {"gamma": 0.9, "gae_lambda": 0.8, "value_coef": 0.3, "entropy_coef": 0.02, "least_advantage_std": 1.1}
    steps = {"minibatch": 20, "epochs": 3, "max_grad_norm": 0.3, "learning_rate": 1e-3}
    settings = PPOSettings(clip=clip, normalize_value=False, **loss, **steps)
    algorithm = PPO(settings=settings, model=model(cell), env=vector_env, seed=5)
    spread(algorithm.model)
    before, wanted = copy.deepcopy(algorithm.model), Textbook(cell, algorithm.model)
    sent = messages(vector_env, algorithm._state_size, mode, make_sample)
    result = algorithm.update(algorithm.ingest(sent), at())
    textbook_update(wanted, sent, settings, seed=5)
    assert 0.1 < result.metrics["clip_fraction"] < 0.9
    assert result.samples == sum(message.env_steps for message in sent) == sum(WIDTHS) * T - (mode == "next_step") * 4
    trained = zip(algorithm.model.named_parameters(), before.parameters(), wanted.parameters(), strict=True)
    for (name, found), old, new in trained:
        assert (found - old).abs().max() > 1e-3, name
        torch.testing.assert_close(found.detach(), new.detach(), rtol=0, atol=1e-6, msg=name)


def rollouts(settings, policy, *, state_size, seed):
    """Rollouts of an environment without end, as an actor records them; the memory goes on from one to the next."""
    environment = make(settings)
    sizes = {"length": T, "num_envs": settings.num_envs}
    schema = trajectory_schema(environment.spec, **sizes, recorded=recorded_log_prob(**sizes), state_size=state_size)
    rollout = Rollout(schema, environment.reset(seed))
    while True:
        for t in range(T):
            policy.begin_episodes(torch.from_numpy(rollout.start(t)))
            acted = {name: values.numpy() for name, values in policy.act(torch.from_numpy(rollout.observation)).items()}
            action = acted.pop("action")
            rollout.record(t, action, acted, environment.step(action))
        arrays, env_steps = rollout.finish(states(policy)), rollout.env_steps
        rollout.begin_next()
        yield Experience(version=policy.version, env_steps=env_steps, arrays=arrays)


@pytest.mark.parametrize("name", ["ppo", "impala", "a3c"])
@CELLS
@MODES
def test_on_fresh_data_ratio_and_state_are_those_of_the_actors(name, cell, mode):
    """Update after update, in the middle of episodes: the first minibatch has ratio 1 to 1e-5, and recomputed states agree."""
    env = EnvSettings(entry_point="common.envs.probes:counting", num_envs=4, autoreset=mode, kwargs={"lengths": (7, 2, 17)})
    spec = make(env).spec
    settings = ALGORITHMS[name].settings(learning_rate=1e-2, **({"minibatch": 16, "epochs": 2} if name == "ppo" else {}))
    algorithm = build_algorithm(settings, model=model(cell), env=spec, seed=0)
    spread(algorithm.model)
    policy = ActorCriticPolicy(model=model(cell), env=spec, precision="fp32", seed=1)
    policy.load(0, snapshot.to_tensor(snapshot.flatten(algorithm.model, "fp32")), env_steps=0)
    sent, before = rollouts(env, policy, state_size=model(cell).state_size, seed=3), policy.memory
    for version in range(4):
        message = next(sent)
        assert version == 0 or message.arrays["memory"][0].any()
        assert (message.arrays["memory"][1] != message.arrays["memory"][0]).any()
        metrics = algorithm.update(algorithm.ingest([message]), at(version)).metrics
        assert metrics["first_ratio_error"] < 1e-5
        assert metrics["memory_error"] < 1e-5
        before = snapshot.flatten(algorithm.model, "fp32")
        policy.load(version + 1, snapshot.to_tensor(before), env_steps=0)


@CELLS
def test_an_observation_that_is_not_finite_does_not_outlast_its_step(cell, vector_env):
    """In the memory it would be in all messages until the episode ends, and the learner refuses each; others keep theirs."""
    policy = ActorCriticPolicy(model=model(cell), env=vector_env, precision="fp32", seed=1)
    seen = torch.ones(2, *vector_env.observation_shape)
    policy.begin_episodes(torch.ones(2, dtype=torch.bool))
    policy.act(seen)
    kept, spoilt = policy.memory[1].clone(), seen.clone()
    spoilt[0] = torch.nan
    policy.act(spoilt)
    assert (policy.memory[0] == 0).all()
    assert policy.memory[1].isfinite().all()
    assert not torch.equal(policy.memory[1], kept)
    policy.act(seen)
    assert policy.memory.isfinite().all()
    assert policy.memory.any(dim=1).all()


def test_states_of_older_weights_are_seen_in_the_metrics(vector_env, make_sample):
    """Half of what the newest weights compute: an error of 1, in units of the actors' own."""
    algorithm = PPO(settings=PPOSettings(minibatch=4, epochs=1), model=model("gru"), env=vector_env, seed=0)
    (sent,) = messages(vector_env, H, "next_step", make_sample)[:1]
    batch = algorithm.ingest([sent])
    with torch.no_grad():
        _, _, states = algorithm.model(batch.observation[:-1].flatten(0, 1), batch.past)
    batch.memory[1] = states[-WIDTHS[0] :] / 2
    assert algorithm.update(batch, at()).metrics["memory_error"] == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["ppo", "impala", "a3c"])
@CELLS
def test_rows_of_an_environment_that_is_away_are_not_trained_on(vector_env, make_sample, name, cell):
    """One of two environments has no valid row, and makes no minibatch; a batch without valid rows changes nothing."""
    settings = ALGORITHMS[name].settings(**({"minibatch": 4, "epochs": 1} if name == "ppo" else {}))
    weights = []
    for junk in (0.0, 5.0):
        algorithm = build_algorithm(settings, model=model(cell), env=vector_env, seed=0)
        (sent,) = messages(vector_env, algorithm._state_size, "same_step", make_sample)[1:]
        arrays = {key: np.array(values) for key, values in sent.arrays.items()}
        arrays["valid"][:, 1] = False
        arrays["obs"][:, 1] += junk
        arrays["reward"][:, 1] += junk
        arrays["memory"][0, 1] += junk
        away = make_sample(vector_env, length=T, num_envs=2, **arrays)
        result = algorithm.update(algorithm.ingest([away]), at())
        assert result.samples == T
        assert result.metrics["nonfinite_steps"] == 0
        weights.append(snapshot.flatten(algorithm.model, "fp32"))
        arrays["valid"][:] = False
        result = algorithm.update(algorithm.ingest([make_sample(vector_env, length=T, num_envs=2, **arrays)]), at())
        assert result.samples == 0
        assert np.array_equal(snapshot.flatten(algorithm.model, "fp32"), weights[-1])
    assert np.array_equal(*weights)


def test_more_minibatches_than_environments_are_one_for_each(vector_env, make_sample):
    """24 env steps in minibatches of 2, but of two environments: two whole ones an epoch."""
    algorithm, seen = PPO(settings=PPOSettings(minibatch=2, epochs=3), model=model("lstm"), env=vector_env, seed=0), []
    step = algorithm._step
    algorithm._step = lambda part, *more: seen.append(len(part.rows.advantage)) or step(part, *more)
    (sent,) = messages(vector_env, 2 * H, "same_step", make_sample)[1:]
    algorithm.update(algorithm.ingest([sent]), at())
    assert seen == [T] * 6
