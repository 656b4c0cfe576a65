"""The contract of every registered algorithm: both sides fit together, runs resume bit for bit, bad numbers do no harm."""

from __future__ import annotations

import copy
import sys
from itertools import product
from typing import Literal, get_args, get_origin

import numpy as np
import pytest
import torch

from common.algorithms.api import HasRandomState, HasReplay, RunProgress, SavesReplay, WorkerContext
from common.algorithms.registry import ALGORITHMS, build_algorithm, build_payload, build_policy, rollout_schema
from common.config.schema import Settings
from common.envs.stacking import stack
from common.errors import ResourceError
from common.models import snapshot
from common.models.spec import ModelSettings
from common.protocol.content import check_schema
from common.protocol.events import Experience, WorkerKey
from tests.support.recording import recorded, unread

WORKER = WorkerKey(name="a", incarnation=1)
pytestmark = pytest.mark.pure

T, B = 8, 2  # env steps of a rollout, environments
MODEL = ModelSettings(hidden=(16,), normalize_observation=True)
NETWORKS = ("parameters", "target", "targets", "average")  # of a learner's state
CONTEXT = WorkerContext(index=0, workers=1, num_envs=B)
REPLAY = {"replay_capacity": 4_000, "warmup": 0, "minibatch": 4, "samples_per_insert": 1.0}
VARIANTS = {
    "ppo": ("ppo", {"minibatch": 8, "epochs": 2}),
    "ppo, adaptive rate": ("ppo", {"minibatch": 8, "epochs": 2, "lr_schedule": "kl_adaptive", "learning_rate": 1e-3}),
    "impala": ("impala", {"normalize_value": True}),
    "a3c": ("a3c", {"normalize_value": True}),
    "a3c-grad": ("a3c-grad", {}),
    "pqn": ("pqn", {"minibatch": 8, "epochs": 2}),
    "dqn": ("dqn", REPLAY | {"target_every": 3}),
    "dqn, averaged": ("dqn", REPLAY | {"average_rate": 0.5}),
    "td3": ("td3", REPLAY | {"random_env_steps": 0}),
    "sac": ("sac", REPLAY | {"random_env_steps": 0}),
}


class Sides:
    """Learner and policy of one algorithm, and rollouts of random observations and rewards in which the policy acts."""

    def __init__(self, variant, envs):
        name, self.changed = VARIANTS[variant]
        self.env = envs["continuous" if name in {"td3", "sac"} else "vector"]
        self.entry = ALGORITHMS[name]
        self.model = MODEL.model_copy(update={"normalize_observation": name != "a3c-grad"})  # gradients carry no observations
        self.settings = self.entry.settings(**({"learning_rate": 1e-2} | self.changed))
        self.size = {"length": T, "num_envs": B}

    def learner(self, *, seed=0, hidden=(16,), **changed):
        settings = self.settings.model_copy(update=changed)
        model = self.model.model_copy(update={"hidden": hidden})
        normalizes = settings.name != "a3c-grad"
        algorithm = build_algorithm(settings, model=model, env=self.env, seed=seed, normalize_reward=normalizes)
        algorithm.calibrate(torch.rand(20, *self.env.observation_shape, generator=torch.Generator().manual_seed(7)))
        return algorithm

    def policy(self, algorithm, *, seed=0):
        policy = build_policy(self.settings, model=self.model, env=self.env, precision="fp32", seed=seed, context=CONTEXT)
        policy.load(0, torch.from_numpy(snapshot.flatten(algorithm.model, "fp32")), env_steps=0)
        return policy

    def play(self, policy, *, seq=0, **rows):
        """One experience message; `rows` replace arrays of the rollout before the policy makes the message of it."""
        rng = np.random.default_rng(seq)
        schema = rollout_schema(self.settings, model=self.model, env=self.env, **self.size)
        arrays = {spec.name: np.zeros([max(0, axis) for axis in spec.shape], spec.dtype) for spec in schema}
        arrays["obs"] = rng.random(arrays["obs"].shape).astype(np.float32)
        arrays["reward"] = rng.normal(size=(T, B)).astype(np.float32)
        arrays["valid"][:] = True
        for t, observation in enumerate(stack(arrays["obs"], arrays["start"])[:T]):
            for name, values in policy.act(torch.from_numpy(observation)).items():
                arrays[name][t] = values.numpy()
        arrays |= {name: np.broadcast_to(values, arrays[name].shape).astype(arrays[name].dtype) for name, values in rows.items()}
        return Experience(
            worker=WORKER, seq=seq, version=0, env_steps=int(arrays["valid"].sum()), arrays=dict(policy.experience(arrays))
        )


def train(algorithm, sample, *, env_steps=0):
    """One update at this point of a run of 1,000 env steps."""
    return algorithm.update(algorithm.ingest([sample]), RunProgress(env_steps=env_steps, env_steps_planned=1_000, version=0))


def train_and_observe(algorithm, sample):
    """As the learner's loop does, before it publishes the next version."""
    result = train(algorithm, sample)
    algorithm.observe([sample])
    return result


def weights(algorithm):
    """All parameters, as published."""
    return snapshot.flatten(algorithm.model, "fp32")


def copy_replay(source, target):
    """Fill the replay memory of `target` as a checkpoint with `checkpoint.replay` would."""
    if isinstance(source, SavesReplay):
        target.load_replay_state(copy.deepcopy(source.replay_state()))
        for one, other in zip(source.replay_segments(), target.replay_segments(), strict=True):
            for part, into in zip(one.parts, other.parts, strict=True):
                into[:] = part


def networks(algorithm):
    """All parameters of the trained networks, their targets and averages."""
    return leaves({key: state for key, state in algorithm.state_dict().items() if key in NETWORKS})


def leaves(state):
    """Every value of a nested state, tensors as bytes."""
    if isinstance(state, dict):
        return {key: leaves(value) for key, value in state.items()}
    return state.numpy().tobytes() if isinstance(state, torch.Tensor) else copy.deepcopy(state)


@pytest.fixture(params=VARIANTS)
def sides(request, vector_env, continuous_env):
    return Sides(request.param, {"vector": vector_env, "continuous": continuous_env})


def test_every_algorithm_is_in_the_contract():
    assert {name for name, _ in VARIANTS.values()} == set(ALGORITHMS)
    assert all(entry.settings().name == name for name, entry in ALGORITHMS.items())


# --- both sides ---


def test_the_policy_takes_the_parameters_that_the_learner_publishes(sides):
    learner = sides.learner()
    assert sides.policy(learner).layout == snapshot.ParameterLayout.of(learner.model).fingerprint


def test_the_messages_of_a_policy_are_those_that_the_learner_admits(sides):
    payload = build_payload(sides.settings, model=sides.model, env=sides.env, **sides.size)
    sample = sides.play(sides.policy(sides.learner()))
    check_schema(sample.arrays, payload.schema)
    sent = {"seq": 0, "version": 0, "env_steps": sample.env_steps, "env_steps_sent": sample.env_steps, "arrays": sample.arrays}
    payload.check(payload.message_type(**sent))


def test_a_restored_random_state_draws_the_same_actions(sides):
    policy = sides.policy(sides.learner())
    assert isinstance(policy, HasRandomState)
    state = policy.random_state()
    observation = torch.rand(B, 2, generator=torch.Generator().manual_seed(1))
    first = [policy.act(observation)["action"] for _ in range(3)]
    other = sides.policy(sides.learner(), seed=9)
    other.set_random_state(state)
    assert all(torch.equal(action, other.act(observation)["action"]) for action in first)


def test_an_update_does_not_import_the_compiler_of_torch(sides, monkeypatch):
    """It would take longer than to import torch, before the first update of each learner."""
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    learner = sides.learner()
    train(learner, sides.play(sides.policy(learner)))


# --- checkpoints ---


def test_a_resumed_run_makes_the_very_same_next_updates(sides):
    """Weights, optimizers, random state, statistics of observations and rewards, schedules and replay memory, bit for bit."""
    first, second = sides.learner(), sides.learner(seed=99)
    policy = sides.policy(first)
    for seq in range(3):
        train_and_observe(first, sides.play(policy, seq=seq))
    second.load_state_dict(first.state_dict())
    copy_replay(first, second)
    for seq in (3, 4):
        sample = sides.play(policy, seq=seq)
        assert train_and_observe(first, sample) == train_and_observe(second, sample)
    assert np.array_equal(weights(first), weights(second))
    assert leaves(first.state_dict()) == leaves(second.state_dict())


def test_a_run_that_has_not_trained_yet_can_be_resumed(sides):
    first, second = sides.learner(), sides.learner(seed=1)
    second.load_state_dict(first.state_dict())
    sample = sides.play(sides.policy(first))
    assert train(first, sample) == train(second, sample)
    assert np.array_equal(weights(first), weights(second))


def test_a_checkpoint_is_not_changed_by_training_on(sides):
    """Another thread writes it while the next update runs."""
    learner = sides.learner()
    policy = sides.policy(learner)
    train_and_observe(learner, sides.play(policy))
    state = learner.state_dict()
    before = leaves(state)
    train_and_observe(learner, sides.play(policy, seq=1))
    assert leaves(state) == before
    assert leaves(learner.state_dict()) != before


def test_a_checkpoint_of_another_network_is_refused_and_changes_nothing(sides):
    learner, other = sides.learner(), sides.learner(hidden=(8,))
    before = leaves(learner.state_dict())
    with pytest.raises(ResourceError, match=r"another network: found .*\[8.*wanted .*\[16") as raised:
        learner.load_state_dict(other.state_dict())
    assert "normalisation" not in str(raised.value)  # what is equal is not named
    assert leaves(learner.state_dict()) == before


def test_a_checkpoint_whose_last_network_does_not_fit_changes_no_other(sides):
    learner, other, narrow = sides.learner(), sides.learner(seed=99), sides.learner(hidden=(8,))
    state = other.state_dict()
    last = [name for name in ("parameters", "target", "targets", "average") if name in state][-1]
    state[last] = narrow.state_dict()[last]
    before = leaves(learner.state_dict())
    with pytest.raises(ResourceError, match="another network"):
        learner.load_state_dict(state)
    assert leaves(learner.state_dict()) == before


def test_the_normalisation_of_observations_is_not_trained_away_and_survives_a_resume(sides):
    """No gradient step moves it; a resumed learner has the same, and continues its statistics with the same."""
    first, second = sides.learner(), build_algorithm(sides.settings, model=sides.model, env=sides.env, seed=0)
    policy = sides.policy(first)

    def normalisation(learner):
        return {name: tensor.clone() for name, tensor in learner.model.named_parameters() if "normalisation" in name}

    before = normalisation(first)
    sample = sides.play(policy)
    train(first, sample)
    assert all(torch.equal(tensor, before[name]) for name, tensor in normalisation(first).items())
    second.load_state_dict(first.state_dict())
    for learner in (first, second):
        learner.observe([sample])
    after = normalisation(first)
    assert all(torch.equal(tensor, after[name]) for name, tensor in normalisation(second).items())
    if sides.model.normalize_observation:
        assert not any(torch.equal(tensor, before[name]) for name, tensor in after.items())


# --- updates ---


@pytest.mark.parametrize(
    ("sides", "array", "poison"),
    [
        *product(VARIANTS, ["reward", "obs"], [np.nan, np.inf]),
        *product(["ppo", "ppo, adaptive rate", "impala", "a3c"], ["log_prob"], [np.nan]),
    ],
    indirect=["sides"],
)
def test_numbers_that_are_not_finite_never_reach_the_weights(sides, array, poison):
    """The steps are left out and counted, and an on-policy learner trains on the next batch as if nothing had been."""
    learner = sides.learner()
    policy, before = sides.policy(learner), networks(learner)
    sample = sides.play(policy, **{array: poison})
    result = train(learner, sample)
    assert result.metrics["nonfinite_steps"] > 0
    assert not any("loss" in name for name in result.metrics)
    if array == "obs":
        learner.observe([sample])
    assert networks(learner) == before
    if not isinstance(learner, HasReplay):
        healed = train(learner, sides.play(policy, seq=1))
        assert healed.metrics["nonfinite_steps"] == 0
        assert all(np.isfinite(value) for value in healed.metrics.values())
        assert np.isfinite(weights(learner)).all()
        assert networks(learner) != before


def test_a_batch_of_nothing_but_reset_rows_trains_nothing(sides):
    learner = sides.learner()
    before = weights(learner)
    assert train(learner, sides.play(sides.policy(learner), valid=False)).samples == 0
    assert np.array_equal(weights(learner), before)


def test_a_linear_rate_follows_the_progress_of_the_run(sides):
    """At the planned end the rate is 0 and the weights of all networks stand still."""
    changed = {"lr_schedule": "linear", "learning_rate": 1e-3} | ({"average_rate": 1.0} if sides.settings.name == "dqn" else {})
    if hasattr(sides.settings, "normalize_value"):
        changed["normalize_value"] = False  # the units of values follow their targets at any rate
    learner = sides.learner(**changed)
    policy = sides.policy(learner)
    result = train(learner, sides.play(policy), env_steps=250)
    assert result.metrics["learning_rate"] == pytest.approx(7.5e-4)
    before = leaves(learner.state_dict()["parameters"])
    assert train(learner, sides.play(policy, seq=1), env_steps=1_000).metrics["learning_rate"] == 0.0
    assert leaves(learner.state_dict()["parameters"]) == before


def test_an_update_reports_the_env_steps_it_was_given(sides):
    learner = sides.learner()
    valid = np.ones((T, B), bool)
    valid[3, 1] = False
    assert train(learner, sides.play(sides.policy(learner), valid=valid)).samples == T * B - 1


# --- all settings ---


def variants(section):
    """The section, and with each value of each switch: of a choice, a truth value, null, and of a number that may be 0."""
    yield section
    for name, field in type(section).model_fields.items():
        values = [None] if type(None) in get_args(field.annotation) else []
        for kind in (field.annotation, *get_args(field.annotation)):
            values += {bool: [True, False]}.get(kind, get_args(kind) if get_origin(kind) is Literal else [])
        values += [0, 1] if any(getattr(mark, "ge", None) == 0 for mark in field.metadata) else []
        yield from (section.model_copy(update={name: value}) for value in values if name not in {"name", "warmup"})


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_setting_is_read_unless_it_is_declared_to_depend_on_another(name, vector_env, continuous_env):
    """A setting that nothing reads fails here, and one that is added for a schedule alone, without a condition."""
    sides = Sides(name, {"vector": vector_env, "continuous": continuous_env})
    reads = []
    for settings in variants(sides.settings):
        sides.settings, read = recorded(settings)
        learner = sides.learner()
        policy = sides.policy(learner)
        for step in range(2):
            train(learner, sides.play(policy, seq=step), env_steps=step)
        reads.append((Settings().model_copy(update={"algorithm": settings}), "algorithm", read))
    assert unread(reads) == set()
    assert len(reads) > 5
