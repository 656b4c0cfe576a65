"""IMPALA (Espeholt et al. 2018, arXiv:1802.01561): one gradient step on long unrolls, corrected by V-trace.

The loss and the step are those of `common.algorithms.a3c`.
"""

from __future__ import annotations

from common.algorithms.a3c import SinglePassLearner
from common.algorithms.api import Entry
from common.algorithms.batch import Batch
from common.algorithms.on_policy import ActorCriticPolicy, NetworkOutputs, recorded_log_prob, return_inputs
from common.algorithms.returns import Returns, vtrace
from common.algorithms.settings import ImpalaSettings


class Impala(SinglePassLearner):
    """`common.algorithms.api.Algorithm` for actor-critic networks, at any policy lag."""

    _settings: ImpalaSettings

    def returns(self, batch: Batch, outputs: NetworkOutputs) -> Returns:
        """V-trace by the recorded probabilities of every env step, which are more exact than the lag."""
        settings = self._settings
        return vtrace(
            **return_inputs(batch, outputs, clip_reward=settings.clip_reward),
            log_ratio=outputs.log_prob - batch.log_prob,
            gamma=settings.gamma,
            lambda_=settings.gae_lambda,
            rho_clip=settings.rho_clip,
            c_clip=settings.c_clip,
            pg_rho_clip=settings.pg_rho_clip,
        )


ENTRY = Entry(settings=ImpalaSettings, algorithm=Impala, policy=ActorCriticPolicy, recorded=recorded_log_prob)
