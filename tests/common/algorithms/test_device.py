"""Training elsewhere than on the CPU: nothing of an update stays behind, and no gradient step waits for the one before.

There is no second device on every machine, but `meta` is one everywhere: its tensors have shapes and no values, and an operation
that mixes them with the CPU's is refused as it would be on a GPU. What a program reads back (`item`) is 0 here. So this shows
where everything is, not what comes out.
"""

from __future__ import annotations

import sys
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
import torch.fx.experimental._config
from torch.utils._python_dispatch import TorchDispatchMode

from common.algorithms.api import RunProgress
from common.algorithms.batch import collate, stacked
from common.algorithms.registry import build_algorithm
from common.algorithms.settings import (
    A3CSettings,
    DQNSettings,
    ImpalaSettings,
    PPOSettings,
    PQNSettings,
    SACSettings,
    TD3Settings,
)
from common.envs.stacking import stack
from common.models.spec import ModelSettings
from common.protocol.events import WorkerKey

WORKER = WorkerKey(name="a", incarnation=1)
pytestmark = pytest.mark.pure

META, ATEN = torch.device("meta"), torch.ops.aten
MODEL = ModelSettings(conv=((4, 4, 2),), hidden=(8,), normalize_observation=True)
SMALL = {"replay_capacity": 1_000, "warmup": 0, "minibatch": 4, "samples_per_insert": 1.0}
DISCRETE = [
    PPOSettings(minibatch=4, epochs=2),
    ImpalaSettings(normalize_value=True),
    A3CSettings(optimizer="adam"),
    PQNSettings(minibatch=4, epochs=2),
    DQNSettings(**SMALL, target_every=1),
]
CONTINUOUS = [TD3Settings(**SMALL, policy_delay=1), SACSettings(**SMALL)]


@pytest.fixture(autouse=True)
def _values(monkeypatch):
    """Replace the methods that read values, which tensors of `meta` have none of."""
    adam = sys.modules[torch.optim.Adam.__module__]
    monkeypatch.setattr(adam, "_device_dtype_check_for_fused", lambda *_: None)  # it knows real devices only
    _made_up(monkeypatch, "item", lambda tensor: 0.0 if tensor.is_floating_point() else 1)
    _made_up(monkeypatch, "tolist", lambda tensor: np.zeros(tuple(tensor.shape)).tolist())
    _made_up(monkeypatch, "cpu", lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype))
    with torch.fx.experimental._config.patch(meta_nonzero_assume_all_nonzero=True):
        yield


def _made_up(monkeypatch, name, value):
    """Replace a method of tensors without values."""
    real = getattr(torch.Tensor, name)
    monkeypatch.setattr(torch.Tensor, name, lambda tensor: value(tensor) if tensor.is_meta else real(tensor))


def moved(settings, env, make_sample):
    """A learner on `meta` that was updated there."""
    algorithm = build_algorithm(settings, model=MODEL, env=env, seed=0, device=META)
    algorithm.calibrate(torch.zeros((3, *env.observation_shape)))
    for seq in range(2):
        sample = replace(make_sample(env, seed=seq, length=8), worker=WORKER, seq=seq)
        result = algorithm.update(algorithm.ingest([sample]), RunProgress(env_steps=0, env_steps_planned=100, version=seq))
        assert result.metrics["nonfinite_steps"] == 0.0
        assert "grad_norm" in result.metrics or "critic_loss" in result.metrics
    return algorithm


@pytest.mark.parametrize("settings", DISCRETE, ids=lambda settings: settings.name)
def test_all_of_an_update_is_where_the_networks_are(image_env, make_sample, settings):
    """A tensor made on the CPU in the middle of a loss would end a run on a GPU at its first update."""
    algorithm = moved(settings, image_env, make_sample)
    assert {parameter.device.type for parameter in algorithm.model.parameters()} == {"meta"}


@pytest.mark.parametrize("settings", CONTINUOUS, ids=lambda settings: settings.name)
def test_so_it_is_for_continuous_actions(continuous_env, make_sample, settings):
    """Bounds, noise, temperature and both optimizers."""
    moved(settings, continuous_env, make_sample)


class Reads(TorchDispatchMode):
    """Counts the operations that read values on the host, which waits for a GPU to finish all that it was given."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        masked = function is ATEN.index.Tensor and any(index is not None and index.dtype == torch.bool for index in args[1])
        self.count += masked or function in (ATEN._local_scalar_dense.default, ATEN.nonzero.default)
        return function(*args, **kwargs or {})


MORE_STEPS = [
    (PPOSettings(minibatch=4, epochs=1), {"epochs": 4}),
    (DQNSettings(**SMALL, target_every=1), {"samples_per_insert": 4.0}),
    *((settings, {"samples_per_insert": 4.0}) for settings in CONTINUOUS),
]


@pytest.mark.parametrize(("settings", "more"), MORE_STEPS, ids=lambda value: getattr(value, "name", ""))
def test_four_times_as_many_gradient_steps_read_no_more_values(vector_env, continuous_env, make_sample, settings, more):
    """On the CPU, where values can be read: a loop that reads one at each step leaves a GPU idle after each."""
    env = vector_env if settings.name in {"ppo", "dqn"} else continuous_env
    reads = []
    for each in (settings, settings.model_copy(update=more)):
        algorithm = build_algorithm(each, model=MODEL, env=env, seed=0)
        batch = algorithm.ingest([replace(make_sample(env, length=8), worker=WORKER, seq=0)])
        with Reads() as counted:
            result = algorithm.update(batch, RunProgress(env_steps=0, env_steps_planned=100, version=0))
        reads.append((counted.count, result.metrics.get("gradient_steps")))
    assert reads[0][0] == reads[1][0]
    assert reads[0][1] is None or reads[1][1] == 4 * reads[0][1]


@pytest.mark.parametrize("frame", [(3,), (4, 5), (2, 4, 5)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_stacks_made_on_a_device_are_those_of_the_actor(frame, size):
    """Frames of random bytes, and starts so many that several lie in one stack."""
    rng = np.random.default_rng(size)
    frames = rng.integers(1, 256, (9 + size - 1, 6, *frame), dtype=np.uint8)
    start = rng.random((9, 6)) < 0.4
    wanted = stack(frames, start)
    found = stacked(torch.from_numpy(frames), torch.from_numpy(start))
    assert np.array_equal(found.numpy(), wanted.reshape(found.shape))
    assert found.dtype == torch.uint8


def test_a_batch_made_on_a_device_has_the_shapes_and_types_of_one_made_on_the_cpu(image_env, make_sample):
    ended = {"final_index": [3, 5], "final_obs": np.ones((2, *image_env.observation_shape))}
    sample = make_sample(image_env, **ended)
    here, there = (collate([sample, sample], image_env, device) for device in (torch.device("cpu"), META))
    for field in fields(here):
        on_cpu, on_device = getattr(here, field.name), getattr(there, field.name)
        assert (on_device.shape, on_device.dtype, on_device.device) == (on_cpu.shape, on_cpu.dtype, META)


def test_a_tensor_that_stays_behind_is_noticed(image_env, make_sample):
    """The test above must be able to fail."""
    algorithm = build_algorithm(ImpalaSettings(), model=MODEL, env=image_env, seed=0)
    algorithm.model.to(META)  # and not the batch
    with pytest.raises(RuntimeError, match="device"):
        algorithm.update(algorithm.ingest([make_sample(image_env)]), RunProgress(env_steps=0, env_steps_planned=100, version=0))
