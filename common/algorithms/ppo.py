"""Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347): the learner's side.

Experience is on-policy, or a few policy versions old.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.algorithms import losses, schedules
from common.algorithms.actor_critic import ActorCriticLearner
from common.algorithms.api import Progress, UpdateResult
from common.algorithms.appraisal import steps
from common.algorithms.batch import Batch
from common.algorithms.returns import gae
from common.algorithms.settings.ppo import PPOSettings
from common.envs.spec import EnvSpec
from common.models.arithmetic import CPU, autocast
from common.models.spec import ModelSettings

_IMPORTANCE_CAP = 10.0  # of proximal over behaviour probability: rarely reached within the policy lag a run accepts


class _Rows(NamedTuple):
    """What a gradient step needs of N env steps."""

    observation: Tensor  # [N, *input]
    action: Tensor  # [N] or [N, A]
    log_prob: Tensor  # [N], of the proximal policy: the one the clip is centred on
    importance: Tensor  # [N], proximal over behaviour probability; 1 where they are the same
    advantage: Tensor  # [N]
    target: Tensor  # [N], in the units of the value head


class _Step(NamedTuple):
    """What one gradient step measured, each a scalar; the names are those of the metrics."""

    policy_loss: Tensor
    value_loss: Tensor
    entropy: Tensor
    approx_kl: Tensor
    clip_fraction: Tensor
    grad_norm: Tensor
    ratio_error: Tensor


class PPO(ActorCriticLearner):
    """`common.algorithms.api.Algorithm` for actor-critic networks."""

    _settings: PPOSettings

    def __init__(
        self, *, settings: PPOSettings, model: ModelSettings, env: EnvSpec, seed: int, device: torch.device = CPU
    ) -> None:
        """Build the network and optimizer; `seed` fixes initial weights and minibatches."""
        super().__init__(
            settings=settings, model=model, env=env, seed=seed, device=device, optimizer="adam", eps=settings.adam_eps
        )
        self._generator = torch.Generator().manual_seed(seed)

    def update(self, batch: Batch, progress: Progress, stop: Callable[[], bool] = lambda: False) -> UpdateResult:
        """Train `epochs` times on the valid env steps of a batch, in random minibatches of nearly equal size.

        A step whose loss or gradient is not finite is left out and counted (`nonfinite_steps`). What was not measured,
        because no step was taken, is not among the metrics. `approx_kl` is of the last epoch: how far the update went.
        """
        lag = progress.version - batch.version
        chosen = batch.valid.flatten().nonzero().squeeze(-1)
        if len(chosen) == 0:
            return UpdateResult(samples=0, metrics={})
        rows, explained = self._prepare(batch, lag)
        self._schedule(progress)
        metrics = {"learning_rate": self._learning_rate, "entropy_coef": self._entropy_coef}
        metrics["policy_lag_mean"] = lag.double().mean().item()
        epochs = [self._epoch(rows, chosen, stop) for _ in range(self._settings.epochs)]
        taken = [step for epoch in epochs for step in epoch if step is not None]
        metrics["nonfinite_steps"] = float(sum(map(len, epochs)) - len(taken))
        if taken:
            metrics |= _means(taken)
            metrics["approx_kl"] = _means([step for step in epochs[-1] if step is not None] or taken)["approx_kl"]
            metrics["first_ratio_error"] = taken[0].ratio_error.item()
            del metrics["ratio_error"]
            metrics["explained_variance"] = explained
            self._adapt(metrics["approx_kl"])
        return UpdateResult(samples=len(chosen), metrics=metrics)

    @torch.no_grad()
    def _prepare(self, data: Batch, lag: Tensor) -> tuple[_Rows, float]:
        """Values, advantages and proximal log-probabilities of all T*B rows, by the weights before the update."""
        settings, seen = self._settings, self._appraise(data)
        rollout = steps(data, seen, clip_reward=settings.clip_reward)
        advantage, target = gae(**rollout, gamma=settings.gamma, lambda_=settings.gae_lambda)
        explained = losses.explained_variance(value=seen.value[data.valid], target=target[data.valid]).item()
        proximal = torch.where(lag > settings.plain_ratio_lag, seen.log_prob, data.log_prob).flatten()
        weight = losses.importance_weight(
            proximal_log_prob=proximal, behaviour_log_prob=data.log_prob.flatten(), cap=_IMPORTANCE_CAP
        )
        if settings.normalize_value:
            target = self._normalized(target, data.valid)
        observation, action = data.observation[:-1].flatten(0, 1), data.action.flatten(0, 1)
        return _Rows(observation, action, proximal, weight, advantage.flatten(), target.flatten()), explained

    def _epoch(self, rows: _Rows, chosen: Tensor, stop: Callable[[], bool]) -> list[_Step | None]:
        """One pass over the `chosen` rows in random order, or as far as `stop` lets it; None for a step that was left out."""
        order = chosen[torch.randperm(len(chosen), generator=self._generator)]
        parts = max(1, round(len(order) / self._settings.minibatch))
        # index_select, because row[index] is twenty times slower on images.
        minibatches = (_Rows(*(row.index_select(0, index) for row in rows)) for index in order.tensor_split(parts))
        return [self._step(minibatch) for minibatch in takewhile(lambda _: not stop(), minibatches)]

    def _step(self, rows: _Rows) -> _Step | None:
        """One gradient step; None, and nothing changed, where it would not be finite."""
        settings, advantage = self._settings, rows.advantage
        if settings.normalize_advantage:
            advantage = losses.standardized(advantage, least_std=settings.least_advantage_std)
        with autocast(settings.precision, rows.observation.device):
            policy, value = self._model(rows.observation)
        surrogate = losses.policy_loss(
            log_prob=policy.log_prob(rows.action),
            proximal_log_prob=rows.log_prob,
            importance=rows.importance,
            advantage=advantage,
            clip=settings.clip,
        )
        error = losses.value_loss(value=value, target=rows.target)
        entropy = policy.entropy().mean()
        loss = surrogate.loss + settings.value_coef * error - self._entropy_coef * entropy
        norm = self._descend(loss)
        if norm is None:
            return None
        measured = (surrogate.loss, error, entropy, surrogate.approx_kl, surrogate.clip_fraction, norm, surrogate.ratio_error)
        return _Step(*(value.detach() for value in measured))

    def _schedule(self, progress: Progress) -> None:
        """One that adapts itself follows the last update, not the progress."""
        if self._settings.lr_schedule != "kl_adaptive":
            super()._schedule(progress)

    def _adapt(self, kl: float) -> None:
        if self._settings.lr_schedule == "kl_adaptive":
            self._learning_rate = schedules.kl_adaptive(self._learning_rate, kl=kl, target=self._settings.kl_target)

    def state_dict(self) -> dict[str, Any]:
        """Copies, in nested dicts with string keys; leaves are tensors and JSON scalars."""
        return super().state_dict() | {"generator": self._generator.get_state(), "learning_rate": self._learning_rate}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; ResourceError, and nothing changed, where the state is of another architecture."""
        super().load_state_dict(state)
        self._generator.set_state(state["generator"])
        if self._settings.lr_schedule == "kl_adaptive":  # else it follows from the settings, which a resumed run may change
            self._learning_rate = state["learning_rate"]


def _means(taken: Sequence[_Step]) -> dict[str, float]:
    means = torch.stack([torch.stack(step) for step in taken]).mean(dim=0).tolist()
    return dict(zip(_Step._fields, means, strict=True))
