"""IMPALA (Espeholt et al. 2018, arXiv:1802.01561): one gradient step on long unrolls, corrected by V-trace.

Returns, loss and step are those of `common.algorithms.a3c`.
"""

from __future__ import annotations

from common.algorithms.a3c import SinglePassLearner
from common.algorithms.api import Entry
from common.algorithms.on_policy import ActorCriticPolicy, recorded_log_prob
from common.algorithms.settings import ImpalaSettings


class Impala(SinglePassLearner):
    """`common.algorithms.api.Algorithm` for actor-critic networks, at any policy lag."""

    _settings: ImpalaSettings

    def _clips(self) -> tuple[float | None, float | None, float | None]:
        return self._settings.rho_clip, self._settings.c_clip, self._settings.pg_rho_clip


ENTRY = Entry(settings=ImpalaSettings, algorithm=Impala, policy=ActorCriticPolicy, recorded=recorded_log_prob)
