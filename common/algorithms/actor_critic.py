"""The learner's side that all actor-critic algorithms share: network, optimizer, units of values, and how a step is taken.

Values are normalised by the statistics of their targets over the run, where the settings ask for it: the value head speaks
in normalised units, and `appraise` and `_normalized` are the only places where the two units meet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from common.algorithms import optimizers, parameters, schedules
from common.algorithms.api import Progress, Sample
from common.algorithms.appraisal import Appraisal, appraise
from common.algorithms.batch import Batch, collate
from common.algorithms.moments import Moments
from common.algorithms.optimizers import OptimizerName
from common.algorithms.settings.actor_critic import ActorCriticSection
from common.envs.spec import EnvSpec
from common.errors import ResourceError
from common.models import nets
from common.models.arithmetic import CPU
from common.models.spec import ModelSettings


class ActorCriticLearner:
    """`common.algorithms.api.Algorithm` without `update`."""

    def __init__(
        self,
        *,
        settings: ActorCriticSection,
        model: ModelSettings,
        env: EnvSpec,
        seed: int,
        optimizer: OptimizerName,
        eps: float,
        device: torch.device = CPU,
    ) -> None:
        """Build the network, its initial weights fixed by `seed`, and the optimizer with its epsilon."""
        self._settings, self._env, self._device = settings, env, device
        self._model = nets.build(model, env, seed=seed).to(device)
        self._optimizer_name = optimizer
        self._optimizer = optimizers.build(optimizer, self._model, lr=settings.learning_rate, eps=eps)
        self._learning_rate, self._entropy_coef = settings.learning_rate, settings.entropy_coef
        self._moments = Moments()  # of the value targets of the run

    @property
    def model(self) -> nets.ActorCritic:
        """The network whose parameters are published (float32)."""
        return self._model

    def calibrate(self, frames: Tensor) -> None:
        """Fix the normalisation of observations by example frames [N, *frame]."""
        self._model.calibrate(frames)

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Join trajectories into one batch, stacks rebuilt."""
        return collate(samples, self._env).to(self._device)

    def _appraise(self, batch: Batch) -> Appraisal:
        return appraise(self._model, batch, moments=self._moments, precision=self._settings.precision)

    def _normalized(self, target: Tensor, valid: Tensor) -> Tensor:
        """Targets [T, B] by the statistics of the run, which take these in first. Invalid rows do not count."""
        merged = self._moments.merge(Moments.of(target[valid]))
        if math.isfinite(merged.m2):  # else the steps will be left out, and so are their targets
            self._moments = merged
        return self._moments.normalize(target)

    def _schedule(self, progress: Progress) -> None:
        """Set learning rate and entropy bonus of the next steps."""
        self._learning_rate = schedules.learning_rate(self._settings, progress)
        self._entropy_coef = schedules.entropy_coef(self._settings, env_steps=progress.env_steps)

    def _descend(self, loss: Tensor) -> Tensor | None:
        """One gradient step on a scalar loss; its gradient's norm before clipping. None, and nothing changed, if not finite."""
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        return self._apply() if math.isfinite(loss.item()) else None

    def _apply(self) -> Tensor | None:
        """One step along the gradients that the parameters hold, scaled down to the largest norm; result as of `_descend`."""
        norm = nn.utils.clip_grad_norm_(self._model.parameters(), self._settings.max_grad_norm)
        if not math.isfinite(norm.item()):
            return None
        optimizers.step(self._optimizer, lr=self._learning_rate)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Copies, in nested dicts with string keys; leaves are tensors and JSON scalars."""
        return {
            "parameters": parameters.state_of(self._model),
            "optimizer": {self._optimizer_name: optimizers.state_of(self._optimizer, self._model)},
            "value_moments": asdict(self._moments),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; ResourceError, and nothing changed, where it is of another architecture or optimizer."""
        remembered = state.get("optimizer", {})
        if self._optimizer_name not in remembered:
            fix = "resume with the algorithm settings of that run"
            raise ResourceError(
                "the checkpoint is of another optimizer", found=list(remembered), wanted=[self._optimizer_name], fix=fix
            )
        parameters.restore(self._model, state.get("parameters", {}))
        optimizers.restore(self._optimizer, self._model, remembered[self._optimizer_name])
        self._moments = Moments(**state["value_moments"])
