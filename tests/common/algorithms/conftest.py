"""Made-up rollouts, by the run's own schema."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from common.algorithms.on_policy import ActorCriticPolicy, recorded_log_prob
from common.algorithms.payload import trajectory_schema
from common.envs.spec import ActionSpec, EnvSpec
from common.models import snapshot
from common.models.spec import ModelSettings
from common.protocol.events import Experience, WorkerKey


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """As in the services: more threads than free cores make small networks a hundred times slower."""
    torch.set_num_threads(1)


@pytest.fixture
def image_env() -> EnvSpec:
    """Small images, stacks of three, four actions."""
    action = ActionSpec(choices=(4,), shape=())
    return EnvSpec(observation_shape=(10, 12), observation_dtype="uint8", action=action, frame_stack=3, frame_skip=1)


@pytest.fixture
def vector_env() -> EnvSpec:
    """Vectors of two numbers, no stack, three actions."""
    action = ActionSpec(choices=(3,), shape=())
    return EnvSpec(observation_shape=(2,), observation_dtype="float32", action=action, frame_stack=1, frame_skip=1)


@pytest.fixture
def continuous_env() -> EnvSpec:
    """Vectors of two numbers, no stack, actions of two components with bounds that are not centred on 0."""
    action = ActionSpec(shape=(2,), low=(-1.0, 0.0), high=(3.0, 10.0))
    return EnvSpec(observation_shape=(2,), observation_dtype="float32", action=action, frame_stack=1, frame_skip=1)


@pytest.fixture
def make_sample() -> Callable[..., Experience]:
    """A rollout as it comes from the wire: random frames, nothing ends, read-only memory; arrays to differ by keyword."""

    def make(env: EnvSpec, *, length: int = 4, num_envs: int = 2, version: int = 0, seed: int = 0, **given: Any) -> Experience:
        rng = np.random.default_rng(seed)
        sizes = {"length": length, "num_envs": num_envs}
        state_size = np.shape(given["memory"])[-1] if "memory" in given else 0
        arrays = {}
        for spec in trajectory_schema(env, **sizes, recorded=recorded_log_prob(**sizes), state_size=state_size):
            shape = [max(0, size) for size in spec.shape]
            arrays[spec.name] = np.zeros(shape, spec.dtype)
            if spec.name == "obs":
                arrays["obs"] = (rng.random(shape) * (255 if spec.dtype == "uint8" else 1)).astype(spec.dtype)
        arrays["valid"][:] = True
        arrays["log_prob"][:] = -np.log(max(1, env.action.n))
        for name, values in given.items():
            arrays[name] = np.array(values, arrays[name].dtype)
        for array in arrays.values():
            array.setflags(write=False)
        return Experience(version=version, env_steps=int(arrays["valid"].sum()), arrays=arrays)

    return make


def weights(algorithm: Any) -> np.ndarray:
    """All parameters, as published."""
    return snapshot.flatten(algorithm.model, "fp32")


def network_weights(net: torch.nn.Module) -> torch.Tensor:
    """All parameters as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def spread(net: torch.nn.Module, seed: int = 2) -> None:
    """Move all weights away from the first ones, by which all actions are nearly alike."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)


def random_play(
    env: EnvSpec, make_sample: Any, *, seq: int, reward: Callable[..., np.ndarray] | None = None, **shape: Any
) -> Experience:
    """A message of continuous actions from all over the range; random rewards, or what `reward(obs, action in -1..1)` gives."""
    rng = np.random.default_rng((seq, 1))  # apart from the observations, which come from `seq`
    sample = make_sample(env, seed=seq, **shape)
    unit = rng.uniform(-1.0, 1.0, sample.arrays["action"].shape)
    low, high = np.array(env.action.low), np.array(env.action.high)
    earned = rng.normal(size=unit.shape[:2]) if reward is None else reward(sample.arrays["obs"][:-1], unit)
    played = {"action": ((unit + 1) / 2 * (high - low) + low).astype(np.float32), "reward": earned.astype(np.float32)}
    return replace(sample, worker=WorkerKey(name="a", incarnation=1), seq=seq, arrays=dict(sample.arrays) | played)


def act_on(
    algorithm: Any, env: EnvSpec, sample: Experience, make_sample: Any, *, model: ModelSettings, seed: int = 0
) -> Experience:
    """The same rollout with the actions that the newest snapshot chooses, as an actor would send it."""
    policy = ActorCriticPolicy(model=model, env=env, precision="fp32", seed=seed)
    policy.load(0, snapshot.to_tensor(weights(algorithm)), env_steps=0)
    acted = [policy.act(observation) for observation in algorithm.ingest([sample]).observation[:-1]]
    arrays = {name: np.stack([step[name].numpy() for step in acted]) for name in ("action", "log_prob")}
    length, num_envs = sample.arrays["reward"].shape
    return make_sample(env, length=length, num_envs=num_envs, **(dict(sample.arrays) | arrays))


def images(env: EnvSpec, count: int = 64) -> torch.Tensor:
    """Random stacks."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, *env.network_input_shape), dtype=torch.uint8, generator=generator)
