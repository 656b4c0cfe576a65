"""What the settings of all algorithms have in common, and what they must agree with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field


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
    """Base of the sections; each has a `name` of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    gamma: float = Field(default=0.99, ge=0.0, le=1.0, description="discount per env step")
    learning_rate: float = Field(default=2.5e-4, gt=0.0, le=1.0, description="of the optimizer; where a schedule starts")
    clip_reward: bool = Field(default=False, description="train on the sign of the reward (returns are always reported raw)")

    def conflicts(self, scale: Scale) -> Iterator[str]:
        """Sentences on settings that cannot work with a run of this scale, each beginning with its dotted key."""
        del scale
        yield from ()
