"""Settings of IMPALA (`common.algorithms.impala`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from common.algorithms.settings.actor_critic import SinglePassSection
from common.algorithms.settings.base import Scale


class ImpalaSettings(SinglePassSection):
    """Section `algorithm` of the configuration, for `name: impala`."""

    name: Literal["impala"] = Field(default="impala", description="importance-weighted actor-learner: V-trace, one pass")
    learning_rate: float = Field(default=6e-4, gt=0.0, le=1.0, description="of the optimizer; where a schedule starts")
    gae_lambda: float = Field(default=1.0, ge=0.0, le=1.0, description="lambda of V-trace: 1 is the paper's")
    optimizer: Literal["adam", "rmsprop"] = Field(
        default="rmsprop", description="adam, or rmsprop as TensorFlow computes it: epsilon inside the root, first steps small"
    )
    rho_clip: float | None = Field(
        default=1.0, ge=0.0, description="most that a step's probability ratio weighs in value targets (rho-bar); null: no limit"
    )
    c_clip: float | None = Field(
        default=1.0, ge=0.0, description="most that it carries later surprises back (c-bar); null: no limit"
    )
    pg_rho_clip: float | None = Field(
        default=1.0, ge=0.0, description="most that it weighs in the policy gradient; null: no limit"
    )
    normalize_value: bool = Field(
        default=False, description="bring value targets to mean 0 and deviation 1, by the statistics of the whole run"
    )

    def conflicts(self, scale: Scale) -> Iterator[str]:
        """What the paper assumes of its clips."""
        yield from super().conflicts(scale)
        if self.rho_clip is not None and (self.c_clip is None or self.c_clip > self.rho_clip):
            yield (
                f"algorithm.c_clip: found {'null' if self.c_clip is None else self.c_clip}, wanted at most {self.rho_clip} = "
                "algorithm.rho_clip: V-trace is a contraction only then"
            )
