"""Several ranks of a learner, each a thread: the gradient of N ranks is that of one rank with all their rows."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from common.algorithms.api import RunProgress, WorkerContext, begin_episodes
from common.algorithms.moments import Moments
from common.algorithms.ranks import ALONE, average_gradients
from common.algorithms.registry import ALGORITHMS, build_algorithm, build_policy, rollout_schema
from common.models import snapshot
from common.models.spec import ModelSettings
from common.protocol.events import Experience, WorkerKey
from common.replay.buffer import Transitions
from tests.ranks import on_every_rank

pytestmark = pytest.mark.pure

T = 8  # env steps of a rollout
WIDTHS = (3, 2, 1)  # environments of the three messages of an update
REPLAY = {"replay_capacity": 1_000, "warmup": 0, "minibatch": 4, "samples_per_insert": 1.0}
VARIANTS = {
    "ppo": ("ppo", {"minibatch": 4_096, "epochs": 3, "lr_schedule": "kl_adaptive", "normalize_value": True}),
    "impala": ("impala", {"normalize_value": True, "normalize_advantage": True}),
    "a3c": ("a3c", {"normalize_value": True}),
    "a3c-grad": ("a3c-grad", {}),
    "pqn": ("pqn", {"minibatch": 4_096, "epochs": 3}),
    "dqn": ("dqn", REPLAY),
    "td3": ("td3", REPLAY | {"random_env_steps": 0, "target_noise": 0.0, "policy_delay": 2}),
    "sac": ("sac", REPLAY | {"random_env_steps": 0}),
}
CONTINUOUS = {"td3", "sac"}
REMEMBERING = ("ppo", "impala", "a3c-grad", "pqn")
MEMORY = {f"{name} {cell}": (name, VARIANTS[name][1]) for name in REMEMBERING for cell in ("lstm", "gru")}
# One gradient step at the second update, which completes the first sequences.
SEQUENCES = {"replay_capacity": 2_000, "warmup": 0, "minibatch": T, "samples_per_insert": 0.26, "burn_in": 2}
MEMORY |= {f"dqn {cell}": ("dqn", SEQUENCES) for cell in ("lstm", "gru")}
VARIANTS |= MEMORY
PARTITIONS = {"two ranks": ((0, 1), (2,)), "one of three without actors": ((0,), (), (1, 2))}


class Run:
    """A learner of one algorithm, and updates of three messages, of which a rank trains on some."""

    def __init__(self, name, envs, ranks=ALONE, times=1):
        """`times` the minibatch of a rank, where the memory is sampled for as many ranks."""
        self.name, changed = VARIANTS[name]
        self.env = envs["continuous" if name in CONTINUOUS else "vector"]
        changed = {"learning_rate": 1e-3} | ({} if name in CONTINUOUS else {"max_grad_norm": 100.0}) | changed
        if "minibatch" in changed:
            changed["minibatch"] *= times
        self.settings = ALGORITHMS[self.name].settings(**changed)
        self.model = ModelSettings(hidden=(16,), normalize_observation=self.name != "a3c-grad", recurrent_size=8)
        if name in MEMORY:
            self.model = self.model.model_copy(update={"recurrent": name.split()[1]})
        self.built = {"model": self.model, "env": self.env}
        beside = {"ranks": ranks, "normalize_reward": self.name != "a3c-grad", "length": T}
        self.learner = build_algorithm(self.settings, **self.built, seed=0, **beside)
        self.learner.calibrate(torch.rand(20, *self.env.observation_shape, generator=torch.Generator().manual_seed(7)))
        self.ranks = ranks

    def messages(self, update):
        """The messages of one update, the same for every learner: acted by a policy of fixed weights."""
        with _making:
            key = self.name, self.model.recurrent, update
            if key not in _made:
                _made[key] = [self._message(10 * update + number, width) for number, width in enumerate(WIDTHS)]
        return [replace(message, arrays={**message.arrays}) for message in _made[key]]

    def _message(self, seed, width):
        size, rng = {"length": T, "num_envs": width}, np.random.default_rng(seed)
        context = WorkerContext(index=0, workers=1, num_envs=width)
        policy = build_policy(self.settings, **self.built, precision="fp32", seed=seed, context=context)
        policy.load(0, torch.linspace(-0.1, 0.1, snapshot.ParameterLayout.of(policy.network).size), env_steps=0)
        schema = rollout_schema(self.settings, model=self.model, env=self.env, **size)
        arrays = {spec.name: np.zeros([max(0, axis) for axis in spec.shape], spec.dtype) for spec in schema}
        arrays["obs"] = rng.random(arrays["obs"].shape).astype(np.float32)
        arrays["reward"] = rng.normal(size=(T, width)).astype(np.float32)
        arrays["valid"] = rng.random((T, width)) < 0.9
        if self.model.recurrent:
            arrays["start"] = rng.random((T + 1, width)) < 0.2
            arrays["memory"][0] = rng.normal(size=arrays["memory"][0].shape)
            policy.memory = torch.from_numpy(arrays["memory"][0].copy())
        for t in range(T):
            begin_episodes(policy, arrays["start"][t])
            for key, values in policy.act(torch.from_numpy(arrays["obs"][t])).items():
                arrays[key][t] = values.numpy()
        if self.model.recurrent:
            arrays["memory"][1] = policy.memory.numpy()
        steps = int(arrays["valid"].sum())
        worker = WorkerKey(name=f"w{seed % 10}", incarnation=1)
        return Experience(
            worker=worker, index=seed % 10, seq=seed // 10, version=0, env_steps=steps, arrays=dict(policy.experience(arrays))
        )

    def train(self, updates, mine, everyone):
        """Take `updates` updates on the messages `mine`, of those `everyone` trains on; return gradients, weights, statistics."""
        for update in range(updates):
            messages = self.messages(update)
            own = [messages[number] for number in mine]
            if hasattr(self.learner, "_replay") and self.model.recurrent:
                self._sample_all(update * sum(WIDTHS[number] for number in mine))
            elif hasattr(self.learner, "_replay"):
                self._sample(mine, everyone, np.random.default_rng(update))
            batch = self.learner.ingest(own)
            self.learner.update(batch, RunProgress(env_steps=0, env_steps_planned=1_000, version=0))
            if self.name != "a3c-grad":
                self.learner.observe(own)
        state = self.learner.state_dict()
        return self.gradients(), self.weights(), [state["observation_moments"], state["rewards"].get("moments")]

    def _sample(self, mine, everyone, rng):
        """Let the memory return rows that follow from the update and the message that a rank would have sampled them from."""
        drawn = {number: self._rows(rng) for number in everyone}
        parts = [drawn[number] for number in mine]

        def sample(count, _):
            rows = [np.concatenate([getattr(part, name) for part in parts] or [getattr(drawn[0], name)[:0]]) for name in FIELDS]
            return Transitions(**dict(zip(FIELDS, rows, strict=True)))

        self.learner._replay.sample = sample
        if self.name == "sac":  # the noise of a row follows from the row
            self.learner._noise = lambda action: torch.from_numpy(np.sin(1e3 * action))

    def _sample_all(self, count):
        """Let the memory return each of its `count` sequences once."""
        self.learner._settings = self.settings.model_copy(update={"minibatch": count * T})
        self.learner._rng = Everything(np.random.PCG64(0))

    def _rows(self, rng, count=4):
        env = self.env
        action = rng.integers(env.action.n, size=count) if env.action.discrete else rng.random((count, 2), np.float32)
        return Transitions(
            observation=rng.random((count, 2), np.float32),
            action=action,
            reward=rng.random(count, np.float32),
            env_steps=np.ones(count, np.int64),
            discount=np.full(count, 0.9, np.float32),
            next_observation=rng.random((count, 2), np.float32),
        )

    def _trained(self):
        module = self.learner._nets if self.name in CONTINUOUS else self.learner._model
        return [parameter for parameter in module.parameters() if parameter.requires_grad]

    def gradients(self):
        return torch.cat([each.grad.flatten() for each in self._trained() if each.grad is not None])

    def weights(self):
        return torch.cat([each.detach().flatten() for each in self._trained()])


class Everything(np.random.Generator):
    """Draws each number once."""

    def integers(self, high, *, size):
        assert high == size
        return np.arange(high)


_made: dict = {}
_making = threading.Lock()
FIELDS = ("observation", "action", "reward", "env_steps", "discount", "next_observation")


@pytest.fixture
def envs(vector_env, continuous_env):
    return {"vector": vector_env, "continuous": continuous_env}


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("name", VARIANTS)
def test_ranks_train_as_one_rank_with_all_rows(name, partition, envs):
    parts = PARTITIONS[partition]

    def on_rank(updates):
        return lambda ranks: Run(name, envs, ranks).train(updates, parts[ranks.index], range(3))

    for updates, most_gradient, most_weight in ((2 if name.startswith("dqn ") else 1, 1e-6, 1e-5), (6, None, 1e-5)):
        gradient, weight, moments = Run(name, envs, times=len(parts)).train(updates, range(3), range(3))
        found = on_every_rank(len(parts), on_rank(updates))
        assert weight.abs().sum() > 0
        assert gradient.abs().max() > 1e-4
        for own_gradient, own_weight, own_moments in found:
            torch.testing.assert_close(own_weight, found[0][1], rtol=0, atol=0)  # bit for bit
            torch.testing.assert_close(own_weight, weight, rtol=0, atol=most_weight)
            if most_gradient:
                torch.testing.assert_close(own_gradient, gradient, rtol=0, atol=most_gradient)
            for own, joint in zip(own_moments, moments, strict=True) if not name.startswith("a3c-grad") else []:
                assert own["count"] == joint["count"] > 0
                torch.testing.assert_close(own["mean"], joint["mean"], rtol=1e-12, atol=1e-12)
                torch.testing.assert_close(own["m2"], joint["m2"], rtol=1e-9, atol=0)


@pytest.mark.parametrize("parts", [((0, 1), ()), ((), (0,), (1, 2)), ((2,), (0, 1))])
def test_each_minibatch_of_whole_environments_has_rows_on_some_rank(envs, parts):
    """Also where a rank has no actors, or fewer environments than there are minibatches; those that are away do not count."""

    def work(ranks):
        run = Run("ppo lstm", envs, ranks)
        run.learner._settings = run.learner._settings.model_copy(update={"minibatch": 2, "epochs": 2})
        messages = [run.messages(0)[number] for number in parts[ranks.index]]
        for message in messages:
            if message.arrays["valid"].shape[1] > 1:
                message.arrays["valid"] = message.arrays["valid"] & np.array(
                    [False, *[True] * (message.arrays["valid"].shape[1] - 1)]
                )
        steps, step = [], run.learner._step
        run.learner._step = lambda part, *more: steps.append(len(part.chosen(part.rows.advantage))) or step(part, *more)
        result = run.learner.update(run.learner.ingest(messages), RunProgress(env_steps=0, env_steps_planned=9, version=0))
        return steps, result.metrics["nonfinite_steps"], run.weights()

    found = on_every_rank(len(parts), work)
    environments = sum(max(1, WIDTHS[number] - 1) for part in parts for number in part)
    rows = np.array([steps for steps, _, _ in found])
    assert rows.shape[1] == 2 * max(1, environments // len(parts))
    assert rows.sum(axis=0).all()
    for _, nonfinite, weights in found:
        assert nonfinite == 0
        assert torch.equal(weights, found[0][2])


@pytest.mark.parametrize("name", ["ppo", "impala", "pqn", "dqn", "sac"])
def test_a_step_that_is_not_finite_on_one_rank_is_left_out_on_all(name, envs):
    def work(ranks):
        run = Run(name, envs, ranks)
        before = run.weights()
        if hasattr(run.learner, "_replay"):
            run._sample((ranks.index,), range(2), np.random.default_rng(0))
            sample = run.learner._replay.sample
            run.learner._replay.sample = lambda *given: _with_reward(sample(*given), np.nan if ranks.index else 0.0)
        message = run.messages(0)[ranks.index]
        if ranks.index:
            message.arrays["reward"] = np.full_like(message.arrays["reward"], np.inf)
        result = run.learner.update(run.learner.ingest([message]), RunProgress(env_steps=0, env_steps_planned=9, version=0))
        return result.metrics["nonfinite_steps"], torch.equal(before, run.weights())

    first, second = on_every_rank(2, work)
    assert first == second
    assert first[0] > 0
    assert first[1]


@pytest.mark.parametrize("name", sorted(CONTINUOUS))
def test_each_rank_has_noise_of_its_own(name, envs):
    first, second = on_every_rank(2, lambda ranks: Run(name, envs, ranks).learner._noise(np.zeros((4, 2))))
    assert not torch.isclose(first, second).any()


def _with_reward(rows, value):
    rows.reward[:] = value
    return rows


def test_the_mean_gradient_weighs_ranks_by_their_rows():
    def work(ranks):
        weight = torch.nn.Parameter(torch.zeros(2))
        weight.grad = torch.tensor([1.0, 2.0]) if ranks.index else torch.tensor([5.0, float("nan")])
        rows = 3 * ranks.index  # the first rank has none: its gradient is not used
        loss = average_gradients([weight], torch.tensor(7.0 * ranks.index), rows=rows, ranks=ranks)
        return weight.grad.tolist(), loss.item()

    assert on_every_rank(2, work) == [([1.0, 2.0], 7.0)] * 2


def test_moments_over_ranks_are_those_of_all_numbers():
    numbers = torch.randn(30, dtype=torch.float64) * 3 + 1e6
    parts = (numbers[:20], numbers[:0], numbers[20:])
    for found in on_every_rank(3, lambda ranks: Moments.of(parts[ranks.index]).over(ranks)):
        wanted = Moments.of(numbers)
        assert found.count == 30
        assert found.mean.item() == pytest.approx(wanted.mean.item(), rel=1e-14)
        assert found.m2.item() == pytest.approx(wanted.m2.item(), rel=1e-9)
