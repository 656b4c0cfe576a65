"""Training elsewhere than on the CPU: nothing of an update stays behind.

There is no second device on every machine, but `meta` is one everywhere: its tensors have shapes and no values, and an operation
that mixes them with the CPU's is refused as it would be on a GPU. What a program reads back (`item`) is 0 here. So this shows
where everything is, not what comes out.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.fx.experimental._config

from common.algorithms.api import RunProgress
from common.algorithms.registry import build_algorithm
from common.algorithms.settings import A3CSettings, DQNSettings, ImpalaSettings, PPOSettings, TD3Settings
from common.models.spec import ModelSettings
from common.protocol.events import WorkerKey

WORKER = WorkerKey(name="a", incarnation=1)
pytestmark = pytest.mark.pure

META = torch.device("meta")
MODEL = ModelSettings(conv=((4, 4, 2),), hidden=(8,), normalize_observation=True)
SMALL = {"replay_capacity": 1_000, "warmup": 0, "minibatch": 4, "samples_per_insert": 1.0}
DISCRETE = [
    PPOSettings(minibatch=4, epochs=2),
    ImpalaSettings(normalize_value=True),
    A3CSettings(optimizer="adam"),
    DQNSettings(**SMALL, target_every=1),
]


@pytest.fixture(autouse=True)
def _values(monkeypatch):
    """Replace the methods that read values, which tensors of `meta` have none of."""
    adam = sys.modules[torch.optim.Adam.__module__]
    monkeypatch.setattr(adam, "_device_dtype_check_for_fused", lambda *_: None)  # it knows real devices only
    _made_up(monkeypatch, "item", lambda tensor: 0.0 if tensor.is_floating_point() else 1)
    _made_up(monkeypatch, "tolist", lambda tensor: np.zeros(tuple(tensor.shape)).tolist())
    _made_up(monkeypatch, "cpu", lambda tensor: torch.zeros(tensor.shape))
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
        result = algorithm.update(algorithm.collate([sample]), RunProgress(env_steps=0, env_steps_planned=100, version=seq))
        assert result.metrics["nonfinite_steps"] == 0.0
        assert "grad_norm" in result.metrics or "critic_loss" in result.metrics
    return algorithm


@pytest.mark.parametrize("settings", DISCRETE, ids=lambda settings: settings.name)
def test_all_of_an_update_is_where_the_networks_are(image_env, make_sample, settings):
    """A tensor made on the CPU in the middle of a loss would end a run on a GPU at its first update."""
    algorithm = moved(settings, image_env, make_sample)
    assert {parameter.device.type for parameter in algorithm.model.parameters()} == {"meta"}


def test_so_it_is_for_continuous_actions(continuous_env, make_sample):
    """Bounds, noise and both optimizers."""
    moved(TD3Settings(**SMALL, policy_delay=1), continuous_env, make_sample)


def test_a_tensor_that_stays_behind_is_noticed(image_env, make_sample):
    """The test above must be able to fail."""
    algorithm = build_algorithm(ImpalaSettings(), model=MODEL, env=image_env, seed=0)
    algorithm.model.to(META)  # and not the batch
    with pytest.raises(RuntimeError, match="device"):
        algorithm.update(algorithm.collate([make_sample(image_env)]), RunProgress(env_steps=0, env_steps_planned=100, version=0))
