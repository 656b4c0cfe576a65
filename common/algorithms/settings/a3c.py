"""Settings of A3C, by data (`common.algorithms.a3c`) and by gradients (`common.algorithms.a3c_grad`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from common.algorithms.settings.actor_critic import SinglePassSection
from common.algorithms.settings.base import Scale
from common.models.spec import Precision


class A3CSettings(SinglePassSection):
    """Section `algorithm` of the configuration, for `name: a3c`."""

    name: Literal["a3c"] = Field(default="a3c", description="asynchronous advantage actor-critic: actors send experience")
    learning_rate: float = Field(default=7e-4, gt=0.0, le=1.0, description="of the optimizer; where a schedule starts")
    ratio_clip: float = Field(
        default=1.0, ge=1.0, description="most that the probability ratio of an env step counts, where an older policy acted"
    )
    normalize_value: bool = Field(
        default=False, description="bring value targets to mean 0 and deviation 1, by the statistics of the whole run"
    )


class A3CGradSettings(SinglePassSection):
    """Section `algorithm` of the configuration, for `name: a3c-grad`."""

    name: Literal["a3c-grad"] = Field(
        default="a3c-grad", description="asynchronous advantage actor-critic: actors send gradients of their own experience"
    )
    learning_rate: float = Field(default=7e-4, gt=0.0, le=1.0, description="of the learner's optimizer, the only one")
    gradient_precision: Precision = Field(
        default="fp32", description="gradients on the wire; bf16 halves the bytes and rounds, the arithmetic is unchanged"
    )

    def _loss_env_steps(self, scale: Scale) -> int:
        return scale.message_env_steps
