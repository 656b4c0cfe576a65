"""IMPALA (Espeholt et al. 2018, arXiv:1802.01561): one gradient step on long unrolls, corrected by V-trace.

Returns, loss and step are those of `common.algorithms.a3c`, with clips of its own.
"""

from __future__ import annotations

from common.algorithms.a3c import SinglePassLearner
from common.algorithms.api import Entry
from common.algorithms.on_policy import ActorCriticPolicy, recorded_log_prob
from common.algorithms.settings import ImpalaSettings

ENTRY = Entry(settings=ImpalaSettings, algorithm=SinglePassLearner, policy=ActorCriticPolicy, recorded=recorded_log_prob)
