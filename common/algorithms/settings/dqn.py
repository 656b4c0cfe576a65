"""Settings of deep Q-learning (`common.algorithms.dqn`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from common.algorithms.settings.base import Scale
from common.algorithms.settings.replay import ReplaySection


class DQNSettings(ReplaySection):
    """Section `algorithm` of the configuration, for `name: dqn`."""

    name: Literal["dqn"] = Field(default="dqn", description="deep Q-learning with replay")
    double: bool = Field(default=True, description="the online network selects the next action, the target network rates it")
    dueling: bool = Field(
        default=True, description="state value and advantages in streams of their own, each a last hidden layer"
    )
    n_step: int = Field(default=3, ge=1, le=64, description="env steps of reward before a value stands for the rest")
    prioritized: bool = Field(default=False, description="draw transitions by how wrong they were, not all alike")
    priority_alpha: float = Field(
        default=0.6, ge=0.0, le=1.0, description="prioritized: 0 draws uniformly, 1 by the error itself"
    )
    priority_beta: float = Field(
        default=0.4, ge=0.0, le=1.0, description="prioritized: how much of the bias is corrected at the start; 1 at the end"
    )
    initial_priorities: bool = Field(
        default=False, description="prioritized: actors send the error of each new env step; else it counts as the largest so far"
    )
    huber: float | None = Field(default=1.0, gt=0.0, description="errors beyond this count linearly; none: all squared")
    max_grad_norm: float = Field(default=10.0, gt=0.0, description="gradients are scaled down to this L2 norm")
    adam_eps: float = Field(default=1.5e-4, gt=0.0, description="epsilon of Adam: damps steps on tiny gradients")
    target_every: int = Field(
        default=1_000, ge=1, description="gradient steps between two copies of the network to the target network"
    )
    target_rate: float = Field(
        default=1.0, gt=0.0, le=1.0, description="how much of it is copied; below 1 (Polyak averaging) set target_every to 1"
    )
    average_rate: float = Field(
        default=1.0,
        gt=0.0,
        le=1.0,
        description="actors get a running average of the network, which moves this much each gradient step; 1: the network",
    )
    exploration: Literal["annealed", "ladder"] = Field(
        default="annealed",
        description="annealed: epsilon falls in a straight line, the same everywhere; ladder: fixed, from epsilon downwards, one "
        "for each environment",
    )
    epsilon_initial: float = Field(
        default=1.0, ge=0.0, le=1.0, description="annealed: probability of a random action at the start"
    )
    epsilon: float = Field(
        default=0.02, ge=0.0, le=1.0, description="annealed: where it ends and stays; ladder: its largest (Ape-X: 0.4)"
    )
    epsilon_env_steps: int = Field(default=100_000, ge=0, description="annealed: env steps until epsilon is reached")
    ladder_alpha: float = Field(default=7.0, ge=0.0, description="ladder: the lowest rung is epsilon to the power 1 + this")

    def conflicts(self, scale: Scale) -> Iterator[str]:
        """Priorities are for who draws by them."""
        yield from super().conflicts(scale)
        if self.prioritized:
            return
        for key in ("priority_alpha", "priority_beta", "initial_priorities"):
            found = getattr(self, key)
            if found != (unused := type(self).model_fields[key].default):
                yield (
                    f"algorithm.{key}: found {json.dumps(found)}, wanted {json.dumps(unused)}, the default, where "
                    "algorithm.prioritized is false: transitions are then drawn all alike; set it to true"
                )
