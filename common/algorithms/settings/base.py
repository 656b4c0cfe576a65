"""What the settings of all algorithms have in common, and what they must agree with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field

from common.models.spec import Precision


class Scale(NamedTuple):
    """The size of a run, as far as an algorithm's settings must fit it."""

    length: int  # T: env steps of each environment in one trajectory
    num_envs: int  # B: environments of each actor
    batch: int  # experience messages per update
    credits: int  # experience messages that each actor may have under way
    max_policy_lag: int  # versions; experience that is older is dropped
    actors: int  # that the run expects; 0: unknown
    env_steps: int  # the run's budget

    @property
    def environments(self) -> int:
        """Of all actors that the run expects."""
        return self.actors * self.num_envs

    @property
    def message_env_steps(self) -> int:
        """Rows [T, B] of one trajectory; reset rows among them are not trained on."""
        return self.length * self.num_envs

    @property
    def batch_env_steps(self) -> int:
        """Rows of one batch."""
        return self.batch * self.message_env_steps

    @property
    def waiting(self) -> int:
        """Updates that a message may wait for: how far behind it is when all actors are ahead of the learner."""
        under_way = max(self.credits * self.actors, self.batch)  # a window is widened where few actors must fill a batch
        return -(-under_way // self.batch)

    @property
    def batch_words(self) -> str:
        """How many rows a batch has and why, for a user who must change one of the settings."""
        product = f"learner.batch {self.batch} x rollout.length {self.length} x env.num_envs {self.num_envs}"
        return f"{self.batch_env_steps} = {product}"


class AlgorithmSection(BaseModel):
    """Base of the sections, which `name` tells apart. A user's own is named `package.module:ENTRY`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(description="which algorithm; your own: package.module:ENTRY")
    gamma: float = Field(default=0.99, ge=0.0, le=1.0, description="discount per env step")
    learning_rate: float = Field(default=2.5e-4, gt=0.0, le=1.0, description="of the optimizer; where a schedule starts")
    lr_schedule: Literal["constant", "linear"] = Field(default="constant", description="linear: down to lr_final")
    lr_final: float = Field(default=0.0, ge=0.0, le=1.0, description="linear: where the learning rate ends, and stays")
    lr_env_steps: int = Field(
        default=0, ge=0, description="linear: env steps until lr_final is reached; 0: all of target.env_steps"
    )
    learning_rate_scaling: Literal["none", "linear", "sqrt"] = Field(
        default="none", description="times environments / learning_rate_envs, or the root of that; environments of all actors"
    )
    learning_rate_envs: int = Field(default=16, ge=1, description="linear, sqrt: environments that learning_rate was tuned for")
    clip_reward: bool = Field(default=False, description="train on the sign of the reward (returns are always reported raw)")
    precision: Precision = Field(
        default="fp32", description="arithmetic of training; bf16 where the processor has it, else fp32; weights stay float32"
    )

    def conflicts(self, scale: Scale) -> Iterator[str]:
        """Sentences on settings that cannot work with a run of this scale, each beginning with its dotted key."""
        if self.learning_rate_scaling != "none" and scale.actors == 0:
            yield (
                f"algorithm.learning_rate_scaling: found {self.learning_rate_scaling}, wanted none where actor.count is 0: "
                "nobody knows how many environments there will be"
            )
        if (rate := self.scaled(scale).learning_rate) > 1.0:
            yield (
                f"algorithm.learning_rate: found {rate:g} = {self.learning_rate:g} scaled to {scale.environments} environments, "
                "wanted at most 1"
            )

    def scaled(self, scale: Scale) -> Self:
        """These settings with the learning rate of a run of this scale, scaled already.

        Linear in the number of environments, which sets how much is learned from at once (Krizhevsky 2014, arXiv:1404.5997;
        Goyal et al. 2017, arXiv:1706.02677), or in its square root, which keeps the variance of a step (Hoffer et al. 2017,
        arXiv:1705.08741).
        """
        if self.learning_rate_scaling == "none":
            return self
        ratio = scale.environments / self.learning_rate_envs
        return self._with_rates(ratio if self.learning_rate_scaling == "linear" else math.sqrt(ratio))

    def _with_rates(self, factor: float) -> Self:
        """A schedule keeps its shape."""
        rates = {"learning_rate": self.learning_rate * factor, "lr_final": self.lr_final * factor}
        return self.model_copy(update=rates | {"learning_rate_scaling": "none"})
