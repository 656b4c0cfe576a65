"""Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347) on experience that may be a few policy versions old.

`PPO.update` takes the newest values and log-probabilities of a batch, makes advantages and targets of them, and then trains for
several epochs of random minibatches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.algorithms import losses, optim
from common.algorithms.api import Entry, RunProgress, UpdateResult
from common.algorithms.batch import Batch
from common.algorithms.measures import NONFINITE_STEPS, Measured, means, nonfinite_steps, taken
from common.algorithms.on_policy import ActorCriticLearner, ActorCriticPolicy, network_outputs, recorded_log_prob, return_inputs
from common.algorithms.ranks import weighted_mean
from common.algorithms.returns import gae
from common.algorithms.settings import PPOSettings
from common.algorithms.trajectories import Minibatch, Minibatches
from common.models.arithmetic import autocast
from common.models.memory import memory_error

_IMPORTANCE_CAP = 10.0  # of proximal over behaviour probability: rarely reached within the policy lag a run accepts


class _Rows(NamedTuple):
    """Rows of a batch, [T*B] of all or [N] of those that one gradient step trains on."""

    observation: Tensor  # [N, *input]
    action: Tensor  # [N] or [N, A]
    log_prob: Tensor  # [N], of the policy before the update
    proximal_log_prob: Tensor  # [N], of the policy that the clip is centred on
    importance: Tensor  # [N], proximal over behaviour probability; 1 where they are the same
    advantage: Tensor  # [N]
    target: Tensor  # [N], in the units of the value head


class PPO(ActorCriticLearner):
    """`common.algorithms.api.Algorithm` for actor-critic networks."""

    _settings: PPOSettings

    def __init__(self, *, settings: PPOSettings, seed: int, **others: Any) -> None:
        """`seed` fixes initial weights and minibatches; `others` as of the base."""
        super().__init__(settings=settings, seed=seed, **others)
        self._learning_rate = settings.learning_rate  # of the next update
        self._generator = torch.Generator().manual_seed(seed)

    def update(self, batch: Batch, progress: RunProgress, stop: Callable[[], bool] = lambda: False) -> UpdateResult:
        """Train `epochs` times on the valid env steps of a batch, in random `Minibatches`.

        A step whose loss or gradient is not finite is left out and counted (`nonfinite_steps`). Measures of gradient steps are
        absent from the metrics where no step was taken. `approx_kl` is of the last epoch: how far the update went.
        """
        settings = self._settings
        minibatches = Minibatches(batch, size=settings.minibatch, whole=self._model.recurrent is not None, ranks=self._ranks)
        if minibatches.count == 0:
            return UpdateResult(samples=0, metrics={})
        lag = progress.version - batch.version
        rows, measured_before = self._prepare(batch, lag)
        if settings.lr_schedule != "kl_adaptive":
            self._learning_rate = optim.scheduled_learning_rate(settings, progress)
        entropy_coef = optim.scheduled_entropy_coef(settings, env_steps=progress.env_steps)
        shuffles = (minibatches.shuffled(rows, self._generator) for _ in range(settings.epochs))
        epochs = [
            [self._step(minibatch, entropy_coef) for minibatch in takewhile(lambda _: not stop(), shuffled)]
            for shuffled in shuffles
        ]
        steps = [step for epoch in epochs for step in epoch]
        measuring = [step for step in taken(steps) if len(step) > 1]  # those for which this rank had rows
        metrics = {
            "learning_rate": self._learning_rate,
            "entropy_coef": entropy_coef,
            NONFINITE_STEPS: float(nonfinite_steps(steps)),
        } | self._rewards.metrics
        if minibatches.env_steps:
            metrics["policy_lag_mean"] = lag.double().mean().item()
        kl = math.nan
        if measured := means(steps):
            kl = means(epochs[-1]).get("approx_kl", measured["approx_kl"])
            metrics |= measured | {name: value.item() for name, value in measured_before.items()}
            metrics |= {"approx_kl": kl, "first_ratio_error": measuring[0]["first_ratio_error"].item()}
        if settings.lr_schedule == "kl_adaptive":
            # Before the first step it is 0 at any rate, and what an interrupted update has moved says little of a whole one.
            whole = len(measuring) > 1 and len(steps) == settings.epochs * minibatches.count
            kl = weighted_mean(kl if whole else math.nan, minibatches.env_steps if whole else 0, self._ranks)
            if not math.isnan(kl):
                self._learning_rate = optim.kl_adapted_rate(self._learning_rate, kl=kl, target=settings.kl_target)
        return UpdateResult(samples=minibatches.env_steps, metrics=metrics)

    @torch.no_grad()
    def _prepare(self, batch: Batch, lag: Tensor) -> tuple[_Rows, dict[str, Tensor]]:
        """All T*B rows by the weights before the update, and metrics of their outputs; `lag` [B] in versions."""
        settings = self._settings
        outputs = network_outputs(self._model, batch, moments=self._moments, precision=settings.precision)
        inputs = return_inputs(batch, outputs, clip_reward=settings.clip_reward)
        advantage, target = gae(**inputs, gamma=settings.gamma, lambda_=settings.gae_lambda)
        explained = losses.explained_variance(value=outputs.value[batch.valid], target=target[batch.valid])
        metrics = {"explained_variance": explained} | memory_error(batch.memory[1], outputs.state)
        if settings.normalize_value:
            self.move_value_units(target, batch.valid)
            target = self._moments.normalize(target)
        # The ratio is clipped against the policy that acted, or against the newest one where that is too old.
        proximal = torch.where(lag > settings.plain_ratio_lag, outputs.log_prob, batch.log_prob).flatten()
        importance = losses.importance_weight(
            proximal_log_prob=proximal, behaviour_log_prob=batch.log_prob.flatten(), cap=_IMPORTANCE_CAP
        )
        rows = _Rows(
            observation=batch.observation[:-1].flatten(0, 1),
            action=batch.action.flatten(0, 1),
            log_prob=outputs.log_prob.flatten(),
            proximal_log_prob=proximal,
            importance=importance,
            advantage=advantage.flatten(),
            target=target.flatten(),
        )
        return rows, metrics

    def _step(self, minibatch: Minibatch[_Rows], entropy_coef: float) -> Measured:
        """One gradient step, left out where it would not be finite."""
        settings, rows = self._settings, minibatch.rows
        advantage = minibatch.chosen(rows.advantage)
        if settings.normalize_advantage:
            advantage = losses.standardized(advantage, least_std=settings.least_advantage_std, ranks=self._ranks)
        if len(advantage) == 0:  # other ranks have rows
            norm = self._gradient_step(torch.zeros((), device=advantage.device), lr=self._learning_rate, rows=0)
            return {NONFINITE_STEPS: norm.isnan()}
        with autocast(settings.precision, rows.observation.device):
            policy, values, _ = self._model(rows.observation, minibatch.past)
        log_prob = minibatch.chosen(policy.log_prob(rows.action))
        surrogate = losses.policy_loss(
            log_prob=log_prob,
            proximal_log_prob=minibatch.chosen(rows.proximal_log_prob),
            importance=minibatch.chosen(rows.importance),
            advantage=advantage,
            clip=settings.clip,
        )
        value_loss = losses.value_loss(value=minibatch.chosen(values), target=minibatch.chosen(rows.target))
        entropy = minibatch.chosen(policy.entropy()).mean()
        loss = surrogate.loss + settings.value_coef * value_loss - entropy_coef * entropy
        norm = self._gradient_step(loss, lr=self._learning_rate, rows=len(advantage))
        return {
            "policy_loss": surrogate.loss.detach(),
            "value_loss": value_loss.detach(),
            "entropy": entropy.detach(),
            "approx_kl": losses.approximate_kl(log_prob=log_prob.detach(), before=minibatch.chosen(rows.log_prob)),
            "clip_fraction": surrogate.clip_fraction,
            "grad_norm": norm,
            "first_ratio_error": surrogate.ratio_error,
            NONFINITE_STEPS: norm.isnan(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Copies, in nested dicts with string keys; leaves are tensors and JSON scalars."""
        adapted = {"learning_rate": self._learning_rate} if self._settings.lr_schedule == "kl_adaptive" else {}
        return super().state_dict() | {"generator": self._generator.get_state()} | adapted

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; ResourceError, and nothing changed, where the state is of another architecture."""
        super().load_state_dict(state)
        if "generator" in state:
            self._generator.set_state(state["generator"])
        self._learning_rate = state.get("learning_rate", self._learning_rate)  # an adapted rate; other schedules set theirs


ENTRY = Entry(settings=PPOSettings, algorithm=PPO, policy=ActorCriticPolicy, recorded=recorded_log_prob)
