"""Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347): settings and the learner's side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from common.algorithms.api import Progress, Sample, UpdateResult
from common.envs.spec import EnvSpec
from common.models.spec import ModelSettings


class PPOSettings(BaseModel):
    """Section `algorithm` of the configuration, for `name: ppo`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Literal["ppo"] = Field(default="ppo", description="proximal policy optimisation")
    gamma: float = Field(default=0.99, ge=0.0, le=1.0, description="discount per env step")
    gae_lambda: float = Field(default=0.95, ge=0.0, le=1.0, description="lambda of generalised advantage estimation")
    epochs: int = Field(default=4, ge=1, le=100, description="passes over each batch")
    minibatch: int = Field(default=256, ge=2, description="env steps per gradient step (a batch is cut into nearly equal parts)")
    learning_rate: float = Field(default=2.5e-4, gt=0.0, le=1.0, description="of Adam; for kl_adaptive: where it starts")
    lr_schedule: Literal["constant", "linear", "kl_adaptive"] = Field(
        default="constant",
        description="linear: to 0 at the end of the run's env steps; kl_adaptive: times or divided by 1.5 to stay near kl_target",
    )
    kl_target: float = Field(default=0.01, gt=0.0, description="kl_adaptive: wanted KL divergence of one update, nats")
    clip: float = Field(default=0.2, gt=0.0, lt=1.0, description="how far from 1 the probability ratio still counts (epsilon)")
    value_coef: float = Field(default=0.5, ge=0.0, description="weight of the value loss")
    entropy_coef: float = Field(default=0.01, ge=0.0, description="weight of the entropy bonus, per nat")
    max_grad_norm: float = Field(default=0.5, gt=0.0, description="gradients are scaled down to this L2 norm")
    adam_eps: float = Field(
        default=1e-5, gt=0.0, description="epsilon of Adam, part of the recipe: bounds the step of rare gradients"
    )
    normalize_advantage: bool = Field(default=True, description="advantages of a batch to mean 0 and deviation 1")
    normalize_value: bool = Field(
        default=True, description="value targets to mean 0 and deviation 1, by statistics of the whole run"
    )
    clip_reward: bool = Field(default=False, description="train on the sign of the reward (returns are always reported raw)")
    plain_ratio_lag: int = Field(
        default=2,
        ge=0,
        description="policy lag (versions) above which the clip is centred on the policy at the start of the update",
    )
    precision: Literal["fp32", "bf16"] = Field(default="fp32", description="arithmetic of training; weights stay float32")

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        return self


class PPO:
    """`common.algorithms.api.Algorithm` for actor-critic networks."""

    def __init__(self, *, settings: PPOSettings, model: ModelSettings, env: EnvSpec, seed: int) -> None:
        """Build the network and optimizer; `seed` fixes initial weights and minibatches."""
        raise NotImplementedError

    @property
    def model(self) -> torch.nn.Module:
        """The network whose parameters are published (float32)."""
        raise NotImplementedError

    def update(self, batch: Sequence[Sample], progress: Progress) -> UpdateResult:
        """Train `epochs` times on one batch."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Nested dicts with string keys; leaves are tensors and JSON scalars."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; ResourceError where the state is of another architecture."""
        raise NotImplementedError
