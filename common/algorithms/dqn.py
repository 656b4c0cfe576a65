"""Deep Q-learning from a replay memory (Mnih et al. 2015; Double: van Hasselt et al. 2016): the learner's side."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from common.algorithms import exploration, optimizers, parameters, q_learning
from common.algorithms.api import Progress, UpdateResult
from common.algorithms.off_policy import Inserted, Measured, ReplayLearner
from common.algorithms.settings.dqn import DQNSettings
from common.envs.spec import EnvSpec
from common.errors import ConfigError
from common.models import q
from common.models.arithmetic import CPU, autocast
from common.models.spec import ModelSettings
from common.replay.memory import Transitions
from common.replay.prioritized import PrioritySettings


class DQN(ReplayLearner):
    """`common.algorithms.api.Algorithm` for action values."""

    _settings: DQNSettings

    def __init__(
        self, *, settings: DQNSettings, model: ModelSettings, env: EnvSpec, seed: int, device: torch.device = CPU
    ) -> None:
        """Build both networks, the optimizer and the memory; `seed` fixes initial weights and what is drawn.

        Raises ConfigError for actions that are not finite in number.
        """
        if not env.action.discrete:
            wanted, fix = "one of n actions", "choose an algorithm for continuous actions, such as td3"
            raise ConfigError("dqn cannot choose among these actions", found=f"shape {env.action.shape}", wanted=wanted, fix=fix)
        prioritized = PrioritySettings(alpha=settings.priority_alpha) if settings.prioritized else None
        super().__init__(settings=settings, env=env, seed=seed, device=device, prioritized=prioritized)
        self._model = q.build(model, env, dueling=settings.dueling, seed=seed).to(device)
        self._target = copy.deepcopy(self._model).requires_grad_(requires_grad=False)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=settings.learning_rate, eps=settings.adam_eps, fused=True)
        self._average = copy.deepcopy(self._target) if settings.average_rate < 1.0 else None
        self._gradient_steps = 0  # of the whole run

    @property
    def model(self) -> q.QNetwork:
        """The network whose parameters are published (float32): the online one, or its average."""
        return self._model if self._average is None else self._average

    def _networks(self) -> tuple[q.QNetwork, ...]:
        return (self._model, self._target, *([self._average] if self._average is not None else []))

    def update(self, batch: Inserted, progress: Progress, stop: Callable[[], bool] = lambda: False) -> UpdateResult:
        """As in `ReplayLearner`; the metrics also say how much is explored, where that moves."""
        result = super().update(batch, progress, stop)
        if self._settings.exploration == "ladder":
            return result
        now = {"epsilon": exploration.annealed(progress.env_steps, self._settings)}
        return UpdateResult(samples=result.samples, metrics={**result.metrics, **now})

    def _train(self, rows: Transitions) -> list[Measured | None]:
        return [self._step(rows)]

    def _step(self, rows: Transitions) -> Measured | None:
        """One step of the online network; every `target_every`-th time the target network follows."""
        settings = self._settings
        target, weight = self._target_of(rows), self._tensor(rows.weight)
        with autocast(settings.precision, self._device):
            values = self._model(self._tensor(rows.observation))
        loss, td_error, value = q_learning.q_loss(
            values, self._tensor(rows.action), target=target, weight=weight, huber=settings.huber
        )
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self._model.parameters(), settings.max_grad_norm)
        if not (math.isfinite(loss.item()) and math.isfinite(norm.item())):
            return None
        optimizers.step(self._optimizer, lr=self._learning_rate)
        self._gradient_steps += 1
        if self._gradient_steps % settings.target_every == 0:
            parameters.follow(self._target, self._model, settings.target_rate)
        if self._average is not None:
            parameters.follow(self._average, self._model, settings.average_rate)
        error = td_error.abs()
        self._replay.update_priorities(rows.index, error.cpu().numpy())
        return {"loss": loss.detach(), "q_mean": value.mean(), "td_abs": error.mean(), "grad_norm": norm.detach()}

    @torch.no_grad()
    def _target_of(self, rows: Transitions) -> Tensor:
        """What Q(o, a) is trained towards, [N]."""
        following = self._tensor(rows.next_observation)
        with autocast(self._settings.precision, self._device):
            selecting = self._model(following) if self._settings.double else None
            value = q_learning.next_value(self._target(following), selecting)
        reward, discount = self._tensor(rows.reward), self._tensor(rows.discount)
        return q_learning.td_target(reward=reward, discount=discount, value=value)

    def _beta(self, progress: Progress) -> float:
        """Of the importance weights: to 1 at the planned end of the run (Schaul et al. 2016, section 3.4)."""
        done = min(1.0, progress.env_steps / progress.env_steps_planned)
        return self._settings.priority_beta + (1.0 - self._settings.priority_beta) * done

    def state_dict(self) -> dict[str, Any]:
        """Copies, in nested dicts with string keys; leaves are tensors and JSON scalars."""
        return super().state_dict() | {
            "parameters": parameters.state_of(self._model),
            "target": parameters.state_of(self._target),
            "average": {} if self._average is None else parameters.state_of(self._average),
            "adam": optimizers.state_of(self._optimizer, self._model),
            "gradient_steps": self._gradient_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; ResourceError, and nothing changed, where the state is of another architecture."""
        parameters.restore(self._model, state.get("parameters", {}))
        parameters.restore(self._target, state["target"])
        if self._average is not None:  # a run without one may be resumed with one: it begins at what acted so far
            parameters.restore(self._average, state.get("average") or state["parameters"])
        optimizers.restore(self._optimizer, self._model, state["adam"])
        self._gradient_steps = state["gradient_steps"]
        super().load_state_dict(state)
