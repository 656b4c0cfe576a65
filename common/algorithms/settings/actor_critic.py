"""What the settings of the actor-critic algorithms have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from common.algorithms.settings.base import AlgorithmSection, Scale


class ActorCriticSection(AlgorithmSection):
    """Base of the sections of algorithms that learn a policy and its value."""

    gae_lambda: float = Field(
        default=0.95, ge=0.0, le=1.0, description="how far rewards are trusted over values: 0 one step, 1 the whole episode"
    )
    value_coef: float = Field(default=0.5, ge=0.0, description="weight of the value loss")
    entropy_coef: float = Field(default=0.01, ge=0.0, description="weight of the entropy bonus, per nat; where it starts")
    entropy_final: float = Field(default=0.0, ge=0.0, description="where that weight ends, and stays")
    entropy_env_steps: int = Field(
        default=0, ge=0, description="env steps until entropy_final is reached in a straight line; 0: it stays at entropy_coef"
    )
    max_grad_norm: float = Field(default=0.5, gt=0.0, description="gradients are scaled down to this L2 norm")
    normalize_advantage: bool = Field(default=False, description="bring the advantages of each loss to mean 0 and deviation 1")
    least_advantage_std: float = Field(
        default=0.0,
        ge=0.0,
        description="normalize_advantage: a deviation below this counts as this, so that what makes no difference stays small",
    )

    def conflicts(self, scale: Scale) -> Iterator[str]:
        """A floor is for who divides by what stands on it, an end for who moves."""
        yield from super().conflicts(scale)
        if self.entropy_final != 0.0 and self.entropy_env_steps == 0:
            yield (
                f"algorithm.entropy_final: found {self.entropy_final}, wanted 0.0 where algorithm.entropy_env_steps is 0: "
                "the bonus then stays as it is; say after how many env steps it ends"
            )
        if self.least_advantage_std > 0.0 and not self.normalize_advantage:
            yield (
                f"algorithm.least_advantage_std: found {self.least_advantage_std}, wanted 0.0 where "
                "algorithm.normalize_advantage is false: advantages are then used as they are; set it to true"
            )


class SinglePassSection(ActorCriticSection):
    """Base of the sections of algorithms that take one gradient step for each batch; losses are means over its env steps."""

    optimizer: Literal["adam", "rmsprop"] = Field(
        default="adam", description="adam, or rmsprop as TensorFlow computes it: epsilon inside the root, first steps small"
    )
    optimizer_eps: float = Field(
        default=1e-5, gt=0.0, description="epsilon of the optimizer, part of the recipe: damps steps on tiny gradients"
    )

    def conflicts(self, scale: Scale) -> Iterator[str]:
        """One env step alone has no deviation."""
        yield from super().conflicts(scale)
        if self.normalize_advantage and self._loss_env_steps(scale) == 1:
            yield (
                "algorithm.normalize_advantage: found true, wanted false where a loss is over 1 env step "
                "(rollout.length x env.num_envs): one advantage alone would always count 0"
            )

    def _loss_env_steps(self, scale: Scale) -> int:
        return scale.batch_env_steps
