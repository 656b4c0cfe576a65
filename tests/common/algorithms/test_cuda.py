"""Training on a GPU: the same weights as on the CPU, to rounding. `test_device.py` shows on any machine where the tensors are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from common.algorithms.api import RunProgress
from common.algorithms.registry import build_algorithm
from tests.common.algorithms.conftest import weights
from tests.common.algorithms.test_device import CONTINUOUS, DISCRETE, MODEL, WORKER

pytestmark = [pytest.mark.pure, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch sees")]


@pytest.fixture(autouse=True)
def _whole_precision(monkeypatch):
    """TF32, cuDNN's default, keeps ten bits of a float32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def trained(settings, env, make_sample, device):
    """The weights after three updates on the same random rollouts, and what the last one reported."""
    algorithm = build_algorithm(settings, model=MODEL, env=env, seed=0, device=torch.device(device), length=8)
    for seq in range(3):
        sample = replace(make_sample(env, seed=seq, length=8, reward=np.ones((8, 2))), worker=WORKER, seq=seq)
        result = algorithm.update(algorithm.ingest([sample]), RunProgress(env_steps=0, env_steps_planned=100, version=seq))
    return weights(algorithm), result.metrics


def require_equal(settings, env, make_sample):
    on_cpu, wanted = trained(settings, env, make_sample, "cpu")
    on_gpu, found = trained(settings, env, make_sample, "cuda")
    unchanged, _ = trained(settings.model_copy(update={"learning_rate": 0.0}), env, make_sample, "cpu")
    assert np.abs(on_cpu - unchanged).max() > 1e-4  # something was learned
    np.testing.assert_allclose(on_gpu, on_cpu, rtol=1e-3, atol=1e-5)
    assert found == pytest.approx(wanted, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("settings", DISCRETE, ids=lambda settings: settings.name)
def test_three_updates_on_images_equal_those_on_the_cpu(image_env, make_sample, settings):
    require_equal(settings, image_env, make_sample)


@pytest.mark.parametrize("settings", CONTINUOUS, ids=lambda settings: settings.name)
def test_three_updates_on_continuous_actions_equal_those_on_the_cpu(continuous_env, make_sample, settings):
    require_equal(settings, continuous_env, make_sample)
