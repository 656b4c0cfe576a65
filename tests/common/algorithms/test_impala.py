"""IMPALA's returns: V-trace with the clips of the settings, whatever the lag says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.algorithms.impala import ENTRY
from common.algorithms.moments import Moments
from common.algorithms.on_policy import network_outputs, return_inputs
from common.algorithms.returns import vtrace
from common.algorithms.settings import ImpalaSettings
from common.models.spec import ModelSettings

pytestmark = pytest.mark.pure

CLIPS = {"rho_clip": 1.5, "c_clip": 0.5, "pg_rho_clip": 1.2}


def test_returns_are_vtrace_by_the_recorded_probabilities(vector_env, make_sample):
    """Each clip at its own place, rewards clipped first where asked."""
    settings = ImpalaSettings(gamma=0.9, gae_lambda=0.8, clip_reward=True, **CLIPS)
    algorithm = ENTRY.algorithm(settings=settings, model=ModelSettings(hidden=(8,)), env=vector_env, seed=0)
    sample = make_sample(vector_env, reward=np.eye(4)[:, :2] * 5.0, log_prob=np.linspace(-3.0, -0.1, 8).reshape(4, 2))
    batch = algorithm.ingest([sample])
    with torch.no_grad():
        seen = network_outputs(algorithm.model, batch, moments=Moments(), precision="fp32")
        found = algorithm.returns(batch, seen)
    log_ratio = seen.log_prob - batch.log_prob
    assert log_ratio.exp().min() < min(CLIPS.values())
    assert log_ratio.exp().max() > max(CLIPS.values())
    wanted = vtrace(**return_inputs(batch, seen, clip_reward=True), log_ratio=log_ratio, gamma=0.9, lambda_=0.8, **CLIPS)
    assert torch.equal(found.advantage, wanted.advantage)
    assert torch.equal(found.target, wanted.target)
