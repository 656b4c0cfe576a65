"""A3C's returns: advantages as they are where the newest policy acted, corrected where an older one did."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.algorithms.a3c import A3C
from common.algorithms.appraisal import appraise, steps
from common.algorithms.moments import Moments
from common.algorithms.returns import gae
from common.algorithms.settings.a3c import A3CSettings
from common.algorithms.vtrace import vtrace
from common.models.spec import ModelSettings

pytestmark = pytest.mark.pure


def test_lag_is_corrected_environment_by_environment(vector_env, make_sample):
    """The first column is fresh and has plain GAE; the second is two versions old and has V-trace, clipped at the setting."""
    settings = A3CSettings(gamma=0.9, gae_lambda=0.8, ratio_clip=1.2)
    algorithm = A3C(settings=settings, model=ModelSettings(hidden=(8,)), env=vector_env, seed=0)
    sample = make_sample(vector_env, reward=np.eye(4)[:, :2], log_prob=np.linspace(-3.0, -0.1, 8).reshape(4, 2))
    batch = algorithm.collate([sample])
    with torch.no_grad():
        seen = appraise(algorithm.model, batch, moments=Moments(), precision="fp32")
        found = algorithm.returns(batch, seen, torch.tensor([0, 2]))
    rollout = steps(batch, seen, clip_reward=False)
    plain = gae(**rollout, gamma=0.9, lambda_=0.8)
    clips = {"rho_clip": 1.2, "c_clip": 1.2, "pg_rho_clip": 1.2}
    corrected = vtrace(**rollout, log_ratio=seen.log_prob - batch.log_prob, gamma=0.9, lambda_=0.8, **clips)
    for got, fresh, old in zip(found, plain, corrected, strict=True):
        torch.testing.assert_close(got[:, 0], fresh[:, 0])
        torch.testing.assert_close(got[:, 1], old[:, 1])
        assert not torch.allclose(got[:, 1], fresh[:, 1])
