"""What all algorithms that learn from a replay memory have in common."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pydantic import Field

from common.algorithms.settings.base import AlgorithmSection, Scale


class ReplaySection(AlgorithmSection):
    """Base of the sections `algorithm` of algorithms that train on samples of what was inserted before."""

    replay_capacity: int = Field(
        default=100_000, ge=1, description="env steps kept, over all environments; the oldest make room. Allocated at the start"
    )
    warmup: int = Field(default=1_000, ge=0, description="env steps inserted before the first gradient step")
    minibatch: int = Field(default=32, ge=1, le=65_536, description="transitions drawn for one gradient step")
    samples_per_insert: float = Field(
        default=8.0,
        gt=0.0,
        le=100_000.0,
        description="times an env step is trained on, on average: gradient steps per env step x minibatch; held at any speed",
    )

    n_step: int = Field(default=1, ge=1, le=64, description="env steps of reward before a value stands for the rest")

    def conflicts(self, scale: Scale) -> Iterator[str]:
        """What the memory, the run and its messages must be able to hold of one another."""
        yield from super().conflicts(scale)
        yield from self._window_conflicts(scale)
        if self.minibatch > self.replay_capacity:
            yield (
                f"algorithm.minibatch: found {self.minibatch}, wanted at most {self.replay_capacity} = "
                "algorithm.replay_capacity: it is drawn from that many env steps"
            )
        if self.warmup > self.replay_capacity:
            yield (
                f"algorithm.warmup: found {self.warmup}, wanted at most {self.replay_capacity} = "
                "algorithm.replay_capacity: the memory never holds more"
            )
        first = self.warmup + math.ceil(self.minibatch / self.samples_per_insert)  # env steps that pay for the first minibatch
        if max(first, scale.batch_env_steps) < self.minibatch <= self.replay_capacity:
            yield (
                f"algorithm.warmup: found {self.warmup}, wanted at least {self.minibatch} = algorithm.minibatch: the first one "
                f"would be drawn from {max(first, scale.batch_env_steps)} env steps, most of them several times"
            )
        if scale.batch_env_steps > self.replay_capacity:
            yield (
                f"algorithm.replay_capacity: found {self.replay_capacity}, wanted at least {scale.batch_words}: "
                "that many are inserted at once"
            )
        paid = self.samples_per_insert * (scale.env_steps - self.warmup)
        if paid < self.minibatch:
            yield (
                f"algorithm.samples_per_insert: found {self.samples_per_insert:g}, wanted more: target.env_steps "
                f"{scale.env_steps} less algorithm.warmup {self.warmup} pay for {max(0.0, paid):g} samples, and one gradient "
                f"step takes algorithm.minibatch {self.minibatch}"
            )
        if scale.waiting > scale.max_policy_lag:
            yield (
                f"learner.max_policy_lag: found {scale.max_policy_lag}, wanted at least {scale.waiting} = learner.credits x "
                "actor.count / learner.batch: messages wait while the gradient steps that earlier ones paid for are taken, "
                "and those that are dropped as stale would pay for none"
            )

    def _window_conflicts(self, scale: Scale) -> Iterator[str]:
        """A window of n steps must be complete soon, and fit into what the memory holds of one environment."""
        if self.n_step > scale.length:
            yield (
                f"algorithm.n_step: found {self.n_step}, wanted at most {scale.length} = rollout.length: "
                "a window would be complete only several messages after it began"
            )
        streams = scale.num_envs * max(1, scale.actors)
        if (self.n_step + 1) * streams > self.replay_capacity:
            yield (
                f"algorithm.n_step: found {self.n_step}, wanted less than {self.replay_capacity / streams:g} = "
                f"algorithm.replay_capacity / {streams} environments: a window lies in the memory of one environment"
            )
