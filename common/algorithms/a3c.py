"""Asynchronous advantage actor-critic by data: actors send experience, the learner takes one gradient step for each batch.

Mnih et al. 2016 (arXiv:1602.01783), with generalised advantages for n-step returns, of which gae_lambda = 1 are the paper's.

All losses are means over the valid env steps, so that a step's size does not depend on how much one batch holds. (The papers sum,
and clip sums: their learning rates and clips must not be copied as they are.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.algorithms import losses, optim
from common.algorithms.api import Entry, RunProgress, UpdateResult
from common.algorithms.batch import Batch
from common.algorithms.on_policy import (
    ActorCriticLearner,
    ActorCriticPolicy,
    NetworkOutputs,
    network_outputs,
    recorded_log_prob,
    return_inputs,
)
from common.algorithms.ranks import ALONE, Ranks, total
from common.algorithms.returns import Returns, vtrace
from common.algorithms.settings import A3CSettings, ImpalaSettings, SinglePassSection
from common.errors import ConfigError
from common.models import snapshot
from common.models.memory import memory_error


class SinglePassLoss(NamedTuple):
    """`total` to minimise; the others are scalars without gradient, named as the metrics are."""

    total: Tensor
    policy_loss: Tensor
    value_loss: Tensor
    entropy: Tensor
    explained_variance: Tensor


LOSS_PARTS = SinglePassLoss._fields[1:]
"""The metrics of the loss, in the order of `SinglePassLoss`."""


def single_pass_loss(
    settings: SinglePassSection,
    batch: Batch,
    outputs: NetworkOutputs,
    returns: Returns,
    target: Tensor,
    *,
    entropy_coef: float,
    ranks: Ranks = ALONE,
) -> SinglePassLoss:
    """Advantage actor-critic (Mnih et al. 2016, arXiv:1602.01783, section 4; Espeholt et al. 2018, eq. 4 and below).

        loss = mean( - A_t * log pi(a_t | o_t) ) + value_coef * mean( (V(o_t) - target_t)^2 ) / 2 - entropy_coef * mean( H_t )

    over the valid rows, of which there must be one (on one of the `ranks`). `target` is that of `returns`, in the units of the
    value head; `entropy_coef` is that of this point of the run.
    """
    valid = batch.valid
    advantage = returns.advantage[valid]
    if settings.normalize_advantage:
        advantage = losses.standardized(advantage, least_std=settings.least_advantage_std, ranks=ranks)
    log_prob = outputs.log_prob[valid]
    losses.require_vectors(log_prob, advantage)
    policy_loss = -(log_prob * advantage).mean()
    value_loss = losses.value_loss(value=outputs.normalized_value[valid], target=target[valid])
    entropy = outputs.entropy[valid].mean()
    total = policy_loss + settings.value_coef * value_loss - entropy_coef * entropy
    explained = losses.explained_variance(value=outputs.value[valid], target=returns.target[valid])
    return SinglePassLoss(total, policy_loss.detach(), value_loss.detach(), entropy.detach(), explained)


class SinglePassLearner(ActorCriticLearner):
    """`common.algorithms.api.Algorithm` of A3C and IMPALA, which differ in the clips of V-trace."""

    _settings: A3CSettings | ImpalaSettings

    def load_parameters(self, state: Mapping[str, Any]) -> None:
        """As the base. Raises `ConfigError` for values in units of return, which would be read in others from the first batch."""
        snapshot.require_same_network(self._model, state.get("parameters", {}))
        if self._settings.normalize_value and self._in_returns(state):
            fact, fix = "the values of these weights are in units of return", "set algorithm.normalize_value=false"
            raise ConfigError(fact, found="algorithm.normalize_value true", wanted="false, as in their run", fix=fix)
        super().load_parameters(state)

    def update(self, batch: Batch, progress: RunProgress, stop: Callable[[], bool] = lambda: False) -> UpdateResult:
        """Take one gradient step on the valid env steps of a batch.

        Where loss or gradient is not finite the step is left out and counted (`nonfinite_steps`), and its measures are absent.
        """
        del stop  # an update is one step
        settings = self._settings
        samples = int(batch.valid.count_nonzero().item())
        if total(samples, self._ranks) == 0:
            return UpdateResult(samples=0, metrics={})
        lag = progress.version - batch.version
        learning_rate = optim.scheduled_learning_rate(settings, progress)
        entropy_coef = optim.scheduled_entropy_coef(settings, env_steps=progress.env_steps)
        outputs = network_outputs(self._model, batch, moments=self._moments, precision=settings.precision)
        with torch.no_grad():
            returns = self.returns(batch, outputs)
            target = self.normalize_targets(returns.target, batch.valid) if settings.normalize_value else returns.target
        loss = single_pass_loss(settings, batch, outputs, returns, target, entropy_coef=entropy_coef, ranks=self._ranks)
        norm = self._gradient_step(loss.total, lr=learning_rate, rows=samples).item()
        nonfinite = {"nonfinite_steps": float(math.isnan(norm))}
        if samples == 0:
            return UpdateResult(samples=0, metrics=nonfinite)
        metrics = {
            "learning_rate": learning_rate,
            "entropy_coef": entropy_coef,
            "policy_lag_mean": lag.double().mean().item(),
        } | nonfinite
        metrics |= self._rewards.metrics
        if not math.isnan(norm):
            metrics |= zip(LOSS_PARTS, torch.stack(loss[1:]).tolist(), strict=True)
            metrics |= {"grad_norm": norm} | _policy_change(batch, outputs.log_prob.detach())
            metrics |= {name: value.item() for name, value in memory_error(batch.memory[1], outputs.state).items()}
        return UpdateResult(samples=samples, metrics=metrics)

    def returns(self, batch: Batch, outputs: NetworkOutputs) -> Returns:
        """V-trace by the recorded probabilities: advantages and targets [T, B] in units of return. Called without gradient."""
        settings, (rho_clip, c_clip, pg_rho_clip) = self._settings, self._settings.clips
        return vtrace(
            **return_inputs(batch, outputs, clip_reward=settings.clip_reward),
            log_ratio=outputs.log_prob - batch.log_prob,
            gamma=settings.gamma,
            lambda_=settings.gae_lambda,
            rho_clip=rho_clip,
            c_clip=c_clip,
            pg_rho_clip=pg_rho_clip,
        )


def _policy_change(batch: Batch, log_prob: Tensor) -> dict[str, float]:
    """KL(mu, pi) of the policies that acted and that learns, and their ratios."""
    now, before = log_prob[batch.valid], batch.log_prob[batch.valid]
    kl, distance = losses.approximate_kl(log_prob=now, before=before), ((now - before).exp() - 1.0).abs().amax()
    return {"approx_kl": kl.item(), "first_ratio_error": distance.item()}


ENTRY = Entry(settings=A3CSettings, algorithm=SinglePassLearner, policy=ActorCriticPolicy, recorded=recorded_log_prob)
