"""Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347): the learner's side.

Values are normalised by the statistics of their targets over the run: the value head speaks in normalised units, and
`_prepare` is the only place where the two units meet. Experience is on-policy, or a few policy versions old.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from common.algorithms import losses, schedules
from common.algorithms.api import Progress, Sample, UpdateResult
from common.algorithms.batch import Batch, collate
from common.algorithms.moments import Moments
from common.algorithms.returns import gae
from common.algorithms.settings.ppo import PPOSettings
from common.envs.spec import EnvSpec
from common.errors import ResourceError
from common.models import nets
from common.models.spec import ModelSettings

_IMPORTANCE_CAP = 10.0  # of proximal over behaviour probability: rarely reached within the policy lag a run accepts
_FORWARD_ROWS = 512  # env steps per forward pass without gradient: activations stay in the cache


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


class PPO:
    """`common.algorithms.api.Algorithm` for actor-critic networks."""

    def __init__(self, *, settings: PPOSettings, model: ModelSettings, env: EnvSpec, seed: int) -> None:
        """Build the network and optimizer; `seed` fixes initial weights and minibatches."""
        self._settings, self._env = settings, env
        self._model = nets.build(model, env, seed=seed)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=settings.learning_rate, eps=settings.adam_eps, fused=True)
        self._generator = torch.Generator().manual_seed(seed)
        self._learning_rate = settings.learning_rate
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
        return collate(samples, self._env)

    def update(self, batch: Batch, progress: Progress) -> UpdateResult:
        """Train `epochs` times on the valid env steps of a batch, in random minibatches of nearly equal size.

        A step whose loss or gradient is not finite is left out and counted (`nonfinite_steps`). What was not measured,
        because no step was taken, is not among the metrics. `approx_kl` is of the last epoch: how far the update went.
        """
        lag = progress.version - batch.version
        chosen = batch.valid.flatten().nonzero().squeeze(-1)
        if len(chosen) == 0:
            return UpdateResult(samples=0, metrics={})
        rows, explained = self._prepare(batch, lag)
        if self._settings.lr_schedule == "linear":
            self._learning_rate = schedules.linear(
                self._settings.learning_rate, progress, final=self._settings.lr_final, over=self._settings.lr_env_steps
            )
        metrics = {"learning_rate": self._learning_rate, "policy_lag_mean": lag.double().mean().item()}
        epochs = [self._epoch(rows, chosen) for _ in range(self._settings.epochs)]
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
        steps, num_envs = data.reward.shape
        observation, action = data.observation[:-1].flatten(0, 1), data.action.flatten(0, 1)
        outputs = self._outputs(observation)
        actions = torch.split(action, _FORWARD_ROWS)
        newest = torch.cat([output.policy.log_prob(part) for output, part in zip(outputs, actions, strict=True)])
        # What follows the last row, and what followed where an episode was cut (o_{t+1} is of the next one there).
        after = self._outputs(torch.cat([data.observation[-1], data.final_observation]))
        value = self._moments.denormalize(torch.cat([output.value for output in (*outputs, *after)]))
        value, bootstrap, final = torch.split(value, [steps * num_envs, num_envs, len(data.final_index)])
        next_value = torch.cat([value[num_envs:], bootstrap]).index_copy_(0, data.final_index, final)
        advantage, target = gae(
            reward=data.reward.sign() if self._settings.clip_reward else data.reward,
            value=value.view(steps, num_envs),
            next_value=next_value.view(steps, num_envs),
            terminated=data.terminated,
            truncated=data.truncated,
            valid=data.valid,
            gamma=self._settings.gamma,
            lambda_=self._settings.gae_lambda,
        )
        explained = losses.explained_variance(value=value[data.valid.flatten()], target=target[data.valid]).item()
        proximal = torch.where(lag > self._settings.plain_ratio_lag, newest.view_as(data.log_prob), data.log_prob).flatten()
        weight = losses.importance_weight(
            proximal_log_prob=proximal, behaviour_log_prob=data.log_prob.flatten(), cap=_IMPORTANCE_CAP
        )
        target = self._normalized(target, data.valid)
        return _Rows(observation, action, proximal, weight, advantage.flatten(), target.flatten()), explained

    def _outputs(self, observation: Tensor) -> list[nets.Output]:
        """Forward passes of bounded size."""
        with self._autocast():
            return [self._model(part) for part in torch.split(observation, _FORWARD_ROWS)]

    def _normalized(self, target: Tensor, valid: Tensor) -> Tensor:
        """Targets by the statistics of the run, which take these in first. Invalid rows do not count."""
        if not self._settings.normalize_value:
            return target
        merged = self._moments.merge(Moments.of(target[valid]))
        if math.isfinite(merged.m2):  # else the steps will be left out, and so are their targets
            self._moments = merged
        return self._moments.normalize(target)

    def _epoch(self, rows: _Rows, chosen: Tensor) -> list[_Step | None]:
        """One pass over the `chosen` rows in random order; None for a step that was left out."""
        order = chosen[torch.randperm(len(chosen), generator=self._generator)]
        parts = max(1, round(len(order) / self._settings.minibatch))
        # index_select, because row[index] is twenty times slower on images.
        minibatches = (_Rows(*(row.index_select(0, index) for row in rows)) for index in order.tensor_split(parts))
        return [self._step(minibatch) for minibatch in minibatches]

    def _step(self, rows: _Rows) -> _Step | None:
        """One gradient step; None, and nothing changed, where it would not be finite."""
        settings = self._settings
        with self._autocast():
            policy, value = self._model(rows.observation)
        surrogate = losses.policy_loss(
            log_prob=policy.log_prob(rows.action),
            proximal_log_prob=rows.log_prob,
            importance=rows.importance,
            advantage=losses.standardized(rows.advantage) if settings.normalize_advantage else rows.advantage,
            clip=settings.clip,
        )
        error = losses.value_loss(value=value, target=rows.target)
        entropy = policy.entropy().mean()
        loss = surrogate.loss + settings.value_coef * error - settings.entropy_coef * entropy
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self._model.parameters(), settings.max_grad_norm)
        if not (math.isfinite(loss.item()) and math.isfinite(norm.item())):
            return None
        self._optimizer.param_groups[0]["lr"] = self._learning_rate
        self._optimizer.step()
        measured = (surrogate.loss, error, entropy, surrogate.approx_kl, surrogate.clip_fraction, norm, surrogate.ratio_error)
        return _Step(*(value.detach() for value in measured))

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self._settings.precision == "bf16")

    def _adapt(self, kl: float) -> None:
        if self._settings.lr_schedule == "kl_adaptive":
            self._learning_rate = schedules.kl_adaptive(self._learning_rate, kl=kl, target=self._settings.kl_target)

    def state_dict(self) -> dict[str, Any]:
        """Copies, in nested dicts with string keys; leaves are tensors and JSON scalars."""
        parameters = {name: parameter.detach() for name, parameter in self._model.named_parameters()}
        adam = {name: self._optimizer.state.get(parameter, {}) for name, parameter in self._model.named_parameters()}
        return {
            "parameters": {name: tensor.clone() for name, tensor in parameters.items()},
            "adam": {name: {key: tensor.clone() for key, tensor in state.items()} for name, state in adam.items() if state},
            "generator": self._generator.get_state(),
            "learning_rate": self._learning_rate,
            "value_moments": asdict(self._moments),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; ResourceError, and nothing changed, where the state is of another architecture."""
        parameters = dict(self._model.named_parameters())
        _require_same(state.get("parameters", {}), parameters)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(state["parameters"][name])
        self._optimizer.state.clear()
        for name, adam in state.get("adam", {}).items():  # absent before the first step
            self._optimizer.state[parameters[name]] = {key: _like(tensor, parameters[name]) for key, tensor in adam.items()}
        self._generator.set_state(state["generator"])
        if self._settings.lr_schedule == "kl_adaptive":  # else it follows from the settings, which a resumed run may change
            self._learning_rate = state["learning_rate"]
        self._moments = Moments(**state["value_moments"])


def _means(steps: Sequence[_Step]) -> dict[str, float]:
    means = torch.stack([torch.stack(step) for step in steps]).mean(dim=0).tolist()
    return dict(zip(_Step._fields, means, strict=True))


def _require_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Refuse parameters of other names or shapes, naming only those that differ."""
    shapes = [{name: list(tensor.shape) for name, tensor in tensors.items()} for tensors in (found, wanted)]
    if shapes[0] != shapes[1]:
        differing = [
            {name: shape for name, shape in one.items() if other.get(name) != shape} for one, other in (shapes, shapes[::-1])
        ]
        fix = "resume with the env and model settings of that run"
        raise ResourceError("the checkpoint is of another network", found=differing[0], wanted=differing[1], fix=fix)


def _like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A copy that lies in memory as the parameter does (the fused optimizer walks both together); the step count as it is."""
    return tensor.clone() if tensor.shape != parameter.shape else torch.empty_like(parameter).copy_(tensor)
