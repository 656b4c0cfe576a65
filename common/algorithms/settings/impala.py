"""Settings of IMPALA (`common.algorithms.impala`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from common.algorithms.settings.base import AlgorithmSection


class ImpalaSettings(AlgorithmSection):
    """Section `algorithm` of the configuration, for `name: impala`."""

    name: Literal["impala"] = Field(default="impala", description="importance-weighted actor-learner")
