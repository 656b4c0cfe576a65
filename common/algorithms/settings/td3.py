"""Settings of twin delayed deterministic policy gradients (`common.algorithms.td3`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from common.algorithms.settings.base import Scale
from common.algorithms.settings.replay import ReplaySection


class TD3Settings(ReplaySection):
    """Section `algorithm` of the configuration, for `name: td3`. Noise is told in halves of an action's range."""

    name: Literal["td3"] = Field(default="td3", description="twin delayed deterministic policy gradient, continuous actions")
    learning_rate: float = Field(default=3e-4, gt=0.0, le=1.0, description="of both optimizers, Adam")
    replay_capacity: int = Field(
        default=1_000_000, ge=1, description="env steps kept, over all environments; the oldest make room. Allocated at the start"
    )
    warmup: int = Field(default=10_000, ge=0, description="env steps inserted before the first gradient step")
    minibatch: int = Field(default=256, ge=1, le=65_536, description="transitions drawn for one gradient step")
    samples_per_insert: float = Field(
        default=256.0,
        gt=0.0,
        le=100_000.0,
        description="times an env step is trained on, on average; equal to minibatch: one gradient step per env step",
    )
    policy_delay: int = Field(default=2, ge=1, description="gradient steps of the critics per step of the actor and the targets")
    target_rate: float = Field(default=0.005, gt=0.0, le=1.0, description="how far the targets move each time (Polyak, tau)")
    target_noise: float = Field(default=0.2, ge=0.0, description="deviation of the noise on the target's action")
    target_noise_clip: float = Field(default=0.5, ge=0.0, description="that noise goes no further than this")
    random_env_steps: int = Field(
        default=10_000, ge=0, description="env steps of the run with actions drawn from all alike, before the policy acts"
    )
    exploration_noise: float = Field(default=0.1, ge=0.0, description="deviation of the noise on the actors' actions")
    exploration_spread: float = Field(
        default=1.0,
        ge=1.0,
        description="above 1 environments differ: from exploration_noise over this to exploration_noise times this",
    )

    def conflicts(self, scale: Scale) -> Iterator[str]:
        """The policy must get to act."""
        yield from super().conflicts(scale)
        if self.random_env_steps >= scale.env_steps:
            yield (
                f"algorithm.random_env_steps: found {self.random_env_steps}, wanted less than {scale.env_steps} = "
                "target.env_steps: the policy would never act"
            )
