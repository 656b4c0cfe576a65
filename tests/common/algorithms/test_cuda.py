"""Training on a GPU: the same weights as on the CPU, to rounding. `test_device.py` shows on any machine where the tensors are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from common.algorithms.api import RunProgress
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
from common.models.spec import ModelSettings
from common.protocol.events import WorkerKey
from tests.common.algorithms.conftest import weights

WORKER = WorkerKey(name="a", incarnation=1)
pytestmark = [pytest.mark.pure, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch sees")]

MODEL = ModelSettings(conv=((4, 4, 2),), hidden=(8,), normalize_observation=True)
SMALL = {"replay_capacity": 1_000, "warmup": 0, "minibatch": 4, "samples_per_insert": 1.0}
IMAGES = [
    PPOSettings(minibatch=4, epochs=2, normalize_value=False),  # which alone would change published weights
    ImpalaSettings(normalize_value=True),
    A3CSettings(optimizer="adam"),
    PQNSettings(minibatch=4, epochs=2),
    DQNSettings(**SMALL, target_every=1),
]
VECTORS = [TD3Settings(**SMALL, policy_delay=1), SACSettings(**SMALL)]


@pytest.fixture(autouse=True)
def _whole_precision(monkeypatch):
    """TF32, cuDNN's default, keeps ten bits of a float32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def trained(settings, model, env, make_sample, device):
    """The weights after three updates on the same random rollouts, and what the last one reported."""
    algorithm = build_algorithm(settings, model=model, env=env, seed=0, device=torch.device(device), length=8)
    for seq in range(3):
        sample = replace(make_sample(env, seed=seq, length=8, reward=np.ones((8, 2))), worker=WORKER, seq=seq)
        result = algorithm.update(algorithm.ingest([sample]), RunProgress(env_steps=0, env_steps_planned=100, version=seq))
    return weights(algorithm), result.metrics


def require_equal(settings, model, env, make_sample):
    on_cpu, wanted = trained(settings, model, env, make_sample, "cpu")
    on_gpu, found = trained(settings, model, env, make_sample, "cuda")
    before = weights(build_algorithm(settings, model=model, env=env, seed=0, length=8))
    assert np.abs(on_cpu - before).max() > 1e-4  # something was learned
    np.testing.assert_allclose(on_gpu, on_cpu, rtol=1e-3, atol=1e-5)
    assert found == pytest.approx(wanted, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("settings", IMAGES, ids=lambda settings: settings.name)
def test_three_updates_on_images_equal_those_on_the_cpu(image_env, make_sample, settings):
    require_equal(settings, MODEL, image_env, make_sample)


@pytest.mark.parametrize("settings", VECTORS, ids=lambda settings: settings.name)
def test_three_updates_on_continuous_actions_equal_those_on_the_cpu(continuous_env, make_sample, settings):
    require_equal(settings, MODEL, continuous_env, make_sample)
