"""Settings of proximal policy optimisation (`common.algorithms.ppo`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import Field, model_validator

from common.algorithms.settings.actor_critic import ActorCriticSection
from common.algorithms.settings.base import Scale

LOWEST_RATE, HIGHEST_RATE = 1e-6, 1e-2
"""The bounds of `kl_adaptive`: outside them Adam does nothing, or harm."""


class PPOSettings(ActorCriticSection):
    """Section `algorithm` of the configuration, for `name: ppo`."""

    name: Literal["ppo"] = Field(default="ppo", description="proximal policy optimisation")
    epochs: int = Field(default=4, ge=1, le=100, description="passes over each batch")
    minibatch: int = Field(default=256, ge=2, description="env steps per gradient step (a batch is cut into nearly equal parts)")
    lr_schedule: Literal["constant", "linear", "kl_adaptive"] = Field(  # type: ignore[assignment]  # its update can measure one more
        default="constant",
        description="linear: down to lr_final; kl_adaptive: times or over 1.5, to stay near kl_target",
    )
    kl_target: float = Field(default=0.01, gt=0.0, description="kl_adaptive: wanted KL divergence of one update, nats")
    clip: float = Field(default=0.2, gt=0.0, lt=1.0, description="how far from 1 the probability ratio still counts (epsilon)")
    adam_eps: float = Field(
        default=1e-5, gt=0.0, description="epsilon of Adam, part of the recipe: damps steps on tiny gradients"
    )
    normalize_advantage: bool = Field(
        default=True, description="bring the advantages of each minibatch to mean 0 and deviation 1"
    )
    normalize_value: bool = Field(
        default=True, description="bring value targets to mean 0 and deviation 1, by the statistics of the whole run"
    )
    plain_ratio_lag: int = Field(
        default=2,
        ge=0,
        description="policy lag (versions) above which the clip is centred on the newest policy, not on the actor's",
    )

    @model_validator(mode="after")
    def _adaptive_rate_starts_inside(self) -> Self:
        low, high = LOWEST_RATE, HIGHEST_RATE
        if self.lr_schedule == "kl_adaptive" and not low <= self.learning_rate <= high:
            text = f"learning_rate {self.learning_rate} is outside {low}..{high}, where kl_adaptive would move it at once"
            raise ValueError(text)
        return self

    def conflicts(self, scale: Scale) -> Iterator[str]:
        """A minibatch is cut out of one batch."""
        yield from super().conflicts(scale)
        if self.minibatch > scale.batch_env_steps:
            yield (
                f"algorithm.minibatch: found {self.minibatch}, wanted at most {scale.batch_words}: "
                "a minibatch is cut out of one batch"
            )
