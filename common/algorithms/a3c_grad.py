"""Asynchronous advantage actor-critic by gradients: actors compute them on their own rollouts, the learner takes the steps.

As in Mnih et al. 2016 (arXiv:1602.01783), but the weights are the learner's and so is the only optimizer: actors keep no
state that training depends on. The learner averages a group of gradients in each step, those that come late counting less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from common.algorithms import returns, schedules
from common.algorithms.actor_critic import ActorCriticLearner
from common.algorithms.api import Place, Progress, Sample, UpdateResult
from common.algorithms.appraisal import appraise, steps
from common.algorithms.batch import collate
from common.algorithms.gradient import PARTS
from common.algorithms.moments import Moments
from common.algorithms.policy import ActorCriticPolicy
from common.algorithms.settings.a3c import A3CGradSettings
from common.algorithms.single_pass import single_pass_loss
from common.envs.spec import EnvSpec
from common.models import nets, snapshot
from common.models.arithmetic import CPU
from common.models.spec import ModelSettings, Precision
from common.units import EnvSteps, Version
from common.wire.messages import Arrays


class GradientPolicy(ActorCriticPolicy):
    """`common.algorithms.api.Policy` that sends the gradient of the loss on what it played, at the weights that played it."""

    def __init__(
        self, *, settings: A3CGradSettings, model: ModelSettings, env: EnvSpec, precision: Precision, seed: int, place: Place
    ) -> None:
        """It acts in `precision`; gradients are float32, computed in the arithmetic that the settings name."""
        super().__init__(model=model, env=env, precision=precision, seed=seed, place=place)
        self._settings, self._env = settings, env
        self._entropy_coef = settings.entropy_coef
        self._trained = nets.build(model, env)

    def load(self, version: Version, parameters: Tensor, *, env_steps: EnvSteps) -> None:
        """As the base, and the same weights to differentiate, with the entropy bonus of this point of the run."""
        super().load(version, parameters, env_steps=env_steps)
        self._entropy_coef = schedules.entropy_coef(self._settings, env_steps=env_steps)
        snapshot.load(self._trained, parameters)

    def experience(self, rollout: Arrays) -> Arrays:
        """The arrays of a Gradient; zeros for a rollout of nothing but reset rows."""
        batch = collate([Sample(version=self.version, env_steps=0, arrays=rollout)], self._env)
        parts = torch.zeros(len(PARTS))
        self._trained.zero_grad(set_to_none=True)
        if batch.valid.any():
            seen = appraise(self._trained, batch, moments=Moments(), precision=self._settings.precision)
            rollout_steps = steps(batch, seen, clip_reward=self._settings.clip_reward)
            made = returns.gae(**rollout_steps, gamma=self._settings.gamma, lambda_=self._settings.gae_lambda)
            loss = single_pass_loss(self._settings, batch, seen, made, made.target, entropy_coef=self._entropy_coef)
            loss.total.backward()  # type: ignore[no-untyped-call]
            parts = torch.stack(loss[1:])
        return {
            "gradient": snapshot.flatten_gradient(self._trained, self._settings.gradient_precision),
            "loss_parts": parts.numpy(),
            "episode_return": rollout["episode_return"],
            "episode_length": rollout["episode_length"],
        }


class Group(NamedTuple):
    """K gradients and what they weigh."""

    gradients: Sequence[Tensor]  # [P] float32 or bfloat16 each
    parts: Tensor  # [K, len(PARTS)]
    env_steps: Tensor  # [K] float64
    version: Tensor  # [K] int64: policy that acted and was differentiated


class A3CGrad(ActorCriticLearner):
    """`common.algorithms.api.Algorithm` for actor-critic networks."""

    _settings: A3CGradSettings

    def __init__(
        self, *, settings: A3CGradSettings, model: ModelSettings, env: EnvSpec, seed: int, device: torch.device = CPU
    ) -> None:
        """Build the network and optimizer; `seed` fixes initial weights."""
        optimizer, eps = settings.optimizer, settings.optimizer_eps
        super().__init__(settings=settings, model=model, env=env, seed=seed, device=device, optimizer=optimizer, eps=eps)

    def collate(self, samples: Sequence[Sample]) -> Group:  # type: ignore[override]
        """Gradients side by side."""
        return Group(
            gradients=[snapshot.to_tensor(sample.arrays["gradient"]) for sample in samples],
            parts=torch.stack([torch.tensor(sample.arrays["loss_parts"]) for sample in samples]),
            env_steps=torch.tensor([sample.env_steps for sample in samples], dtype=torch.float64),
            version=torch.tensor([sample.version for sample in samples]),
        )

    def update(self, batch: Group, progress: Progress, stop: Callable[[], bool] = lambda: False) -> UpdateResult:
        """Take one step along the weighted mean of the gradients.

            g = sum_i w_i * g_i / sum_i w_i,    w_i = env_steps_i / (1 + lag_i)

        Without lag this is the gradient of the mean loss over the joined rollouts. 1 / (1 + lag) follows Zhang et al. 2016
        (arXiv:1511.05950), here relative to the group: what all its gradients have in common is the learning rate's to say.
        A step that is not finite is left out and counted (`nonfinite_steps`).
        """
        del stop  # one step is the least there is
        lag = progress.version - batch.version
        weight = batch.env_steps / (1.0 + lag.clamp_min(0))
        if not weight.any():
            return UpdateResult(samples=0, metrics={})
        weight = (weight / weight.sum()).float()
        self._schedule(progress)
        self._hold(batch.gradients, weight.tolist())
        norm = self._apply()
        metrics = {"learning_rate": self._learning_rate, "entropy_coef": self._entropy_coef}
        metrics |= {"policy_lag_mean": lag.double().mean().item(), "nonfinite_steps": float(norm is None)}
        metrics["gradients"] = float(len(weight))
        if norm is not None:
            metrics |= dict(zip(PARTS, (weight @ batch.parts).tolist(), strict=True)) | {"grad_norm": norm.item()}
        return UpdateResult(samples=int(batch.env_steps.sum()), metrics=metrics)

    def _hold(self, gradients: Sequence[Tensor], weights: Sequence[float]) -> None:
        """Give the network's parameters the weighted sum as their gradient."""
        total = torch.zeros(gradients[0].shape)
        for gradient, weight in zip(gradients, weights, strict=True):
            total.add_(gradient, alpha=weight)
        snapshot.load_gradient(self._model, total)
