"""IMPALA (Espeholt et al. 2018, arXiv:1802.01561): the learner's side. One pass over long unrolls, corrected by V-trace."""

from __future__ import annotations

from torch import Tensor

from common.algorithms.appraisal import Appraisal, steps
from common.algorithms.batch import Batch
from common.algorithms.returns import Returns
from common.algorithms.settings.impala import ImpalaSettings
from common.algorithms.single_pass import SinglePass
from common.algorithms.vtrace import vtrace


class Impala(SinglePass):
    """`common.algorithms.api.Algorithm` for actor-critic networks, whatever the policy lag."""

    _settings: ImpalaSettings

    def returns(self, batch: Batch, seen: Appraisal, lag: Tensor) -> Returns:
        """V-trace by the recorded probabilities of every env step; they say more than the lag."""
        del lag
        settings = self._settings
        return vtrace(
            **steps(batch, seen, clip_reward=settings.clip_reward),
            log_ratio=seen.log_prob - batch.log_prob,
            gamma=settings.gamma,
            lambda_=settings.gae_lambda,
            rho_clip=settings.rho_clip,
            c_clip=settings.c_clip,
            pg_rho_clip=settings.pg_rho_clip,
        )
