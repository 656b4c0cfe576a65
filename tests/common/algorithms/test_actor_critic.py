"""What the learners of all actor-critic algorithms have in common: resumed to the bit, and never by halves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.algorithms.a3c import A3C
from common.algorithms.api import Progress
from common.algorithms.impala import Impala
from common.algorithms.ppo import PPO
from common.algorithms.settings.a3c import A3CSettings
from common.algorithms.settings.impala import ImpalaSettings
from common.algorithms.settings.ppo import PPOSettings
from common.errors import ResourceError
from common.models import snapshot
from common.models.spec import ModelSettings

pytestmark = pytest.mark.pure

MODEL = ModelSettings(conv=((4, 4, 2),), hidden=(16,))
SETTINGS = {PPO: PPOSettings, Impala: ImpalaSettings, A3C: A3CSettings}
ALL = pytest.mark.parametrize("kind", SETTINGS)


def build(kind, env, *, seed=0, model=MODEL, **settings):
    """A learner whose first step moves something."""
    return kind(settings=SETTINGS[kind](**{"learning_rate": 1e-2} | settings), model=model, env=env, seed=seed)


def train(algorithm, *samples, version=0, env_steps=0):
    """One update, as the learner's loop does it, in a run of 1000 env steps."""
    progress = Progress(env_steps=env_steps, env_steps_planned=1000, version=version)
    return algorithm.update(algorithm.collate(samples), progress)


def weights(algorithm):
    """All parameters, as published."""
    return snapshot.flatten(algorithm.model, "fp32")


@ALL
def test_a_resumed_run_makes_the_very_same_next_update(image_env, make_sample, kind):
    """Kill and resume from a checkpoint: weights, optimizer and statistics, bit for bit."""
    first, second = build(kind, image_env, normalize_value=True), build(kind, image_env, seed=99, normalize_value=True)
    for seed in range(3):
        train(first, make_sample(image_env, seed=seed, reward=np.eye(4)[:, :2] * seed))
    second.load_state_dict(first.state_dict())
    results = [train(one, make_sample(image_env, seed=7, reward=np.ones((4, 2)))) for one in (first, second)]
    assert results[0] == results[1]
    assert np.array_equal(weights(first), weights(second))


def test_a_checkpoint_of_another_optimizer_is_refused_and_changes_nothing(vector_env):
    """`--resume algorithm.optimizer=adam` of a run with rmsprop: its memory means something else."""
    algorithm, other = build(A3C, vector_env, optimizer="adam"), build(A3C, vector_env, seed=1, optimizer="rmsprop")
    before = weights(algorithm)
    with pytest.raises(ResourceError, match=r"another optimizer: found \['rmsprop'\], wanted \['adam'\]"):
        algorithm.load_state_dict(other.state_dict())
    assert np.array_equal(weights(algorithm), before)


@ALL
def test_a_linear_rate_follows_the_progress_of_the_run(vector_env, make_sample, kind):
    """At the planned end the rate is 0 and the weights stand still."""
    algorithm = build(kind, vector_env, learning_rate=1e-3, lr_schedule="linear")
    assert train(algorithm, make_sample(vector_env), env_steps=250).metrics["learning_rate"] == pytest.approx(7.5e-4)
    before = weights(algorithm)
    assert train(algorithm, make_sample(vector_env, seed=1), env_steps=1000).metrics["learning_rate"] == 0.0
    assert np.array_equal(weights(algorithm), before)


@ALL
def test_a_checkpoint_is_not_changed_by_training_on(vector_env, make_sample, kind):
    """It is written by another thread while the next update runs."""
    algorithm = build(kind, vector_env)
    train(algorithm, make_sample(vector_env))
    state = algorithm.state_dict()
    kept = {name: tensor.clone() for name, tensor in state["parameters"].items()}
    train(algorithm, make_sample(vector_env, seed=1, reward=np.ones((4, 2))))
    assert all(torch.equal(kept[name], tensor) for name, tensor in state["parameters"].items())


def test_a_run_may_be_resumed_by_another_algorithm_with_the_same_optimizer(vector_env, make_sample):
    """`--resume algorithm.name=a3c` of a PPO run with Adam: the same network, and its value statistics."""
    first, second = build(PPO, vector_env), build(A3C, vector_env, seed=1)
    train(first, make_sample(vector_env, reward=np.eye(4)[:, :2]))
    second.load_state_dict(first.state_dict())
    assert np.array_equal(weights(first), weights(second))
