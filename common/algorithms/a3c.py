"""Asynchronous advantage actor-critic by data: actors send experience, the learner takes one step for each batch.

Mnih et al. 2016 (arXiv:1602.01783), with generalised advantages for n-step returns, of which gae_lambda = 1 are the paper's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.algorithms.appraisal import Appraisal, steps
from common.algorithms.batch import Batch
from common.algorithms.returns import Returns
from common.algorithms.settings.a3c import A3CSettings
from common.algorithms.single_pass import SinglePass
from common.algorithms.vtrace import vtrace


class A3C(SinglePass):
    """`common.algorithms.api.Algorithm` for actor-critic networks."""

    _settings: A3CSettings

    def returns(self, batch: Batch, seen: Appraisal, lag: Tensor) -> Returns:
        """GAE for what the newest policy acted; the same with clipped probability ratios, V-trace, for what an older one did."""
        settings = self._settings
        return vtrace(
            **steps(batch, seen, clip_reward=settings.clip_reward),
            log_ratio=torch.where(lag > 0, seen.log_prob - batch.log_prob, 0.0),
            gamma=settings.gamma,
            lambda_=settings.gae_lambda,
            rho_clip=settings.ratio_clip,
            c_clip=settings.ratio_clip,
            pg_rho_clip=settings.ratio_clip,
        )
