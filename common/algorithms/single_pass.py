"""One gradient step for each batch: policy gradient, value and entropy together. IMPALA and A3C differ in their returns alone.

All losses are means over the valid env steps, so that a step's size does not depend on how much one batch holds. (The papers sum,
and clip sums: their learning rates and clips must not be copied as they are.)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from common.algorithms import losses
from common.algorithms.actor_critic import ActorCriticLearner
from common.algorithms.api import Progress, UpdateResult
from common.algorithms.appraisal import Appraisal
from common.algorithms.batch import Batch
from common.algorithms.returns import Returns
from common.algorithms.settings.a3c import A3CSettings
from common.algorithms.settings.actor_critic import SinglePassSection
from common.algorithms.settings.impala import ImpalaSettings
from common.envs.spec import EnvSpec
from common.models.arithmetic import CPU
from common.models.spec import ModelSettings


class Loss(NamedTuple):
    """`total` to minimise; the others are scalars without gradient, named as the metrics are."""

    total: Tensor
    policy_loss: Tensor
    value_loss: Tensor
    entropy: Tensor
    explained_variance: Tensor

    def parts(self) -> dict[str, float]:
        """All but `total`."""
        return dict(zip(self._fields[1:], torch.stack(self[1:]).tolist(), strict=True))


def single_pass_loss(
    settings: SinglePassSection, batch: Batch, seen: Appraisal, returns: Returns, target: Tensor, *, entropy_coef: float
) -> Loss:
    """Advantage actor-critic (Mnih et al. 2016, arXiv:1602.01783, section 4; Espeholt et al. 2018, eq. 4 and below).

        loss = mean( - A_t * log pi(a_t | o_t) ) + value_coef * mean( (V(o_t) - target_t)^2 ) / 2 - entropy_coef * mean( H_t )

    over the valid rows, of which there must be one. `target` is that of `returns`, in the units of the value head;
    `entropy_coef` is that of this point of the run.
    """
    valid = batch.valid
    advantage = returns.advantage[valid]
    if settings.normalize_advantage:
        advantage = losses.standardized(advantage, least_std=settings.least_advantage_std)
    log_prob = seen.log_prob[valid]
    losses.require_vectors(log_prob, advantage)
    policy_loss = -(log_prob * advantage).mean()
    value_loss = losses.value_loss(value=seen.head[valid], target=target[valid])
    entropy = seen.entropy[valid].mean()
    total = policy_loss + settings.value_coef * value_loss - entropy_coef * entropy
    explained = losses.explained_variance(value=seen.value[valid], target=returns.target[valid])
    return Loss(total, policy_loss.detach(), value_loss.detach(), entropy.detach(), explained)


class SinglePass(ActorCriticLearner):
    """`common.algorithms.api.Algorithm`, but for `returns`."""

    _settings: A3CSettings | ImpalaSettings

    def __init__(
        self, *, settings: A3CSettings | ImpalaSettings, model: ModelSettings, env: EnvSpec, seed: int, device: torch.device = CPU
    ) -> None:
        """Build the network and optimizer; `seed` fixes initial weights."""
        optimizer, eps = settings.optimizer, settings.optimizer_eps
        super().__init__(settings=settings, model=model, env=env, seed=seed, device=device, optimizer=optimizer, eps=eps)

    @abstractmethod
    def returns(self, batch: Batch, seen: Appraisal, lag: Tensor) -> Returns:
        """Advantages and value targets [T, B] in units of return; `lag` [B] in versions. Called without gradient."""

    def update(self, batch: Batch, progress: Progress, stop: Callable[[], bool] = lambda: False) -> UpdateResult:
        """Take one gradient step on the valid env steps of a batch.

        Where loss or gradient is not finite the step is left out and counted (`nonfinite_steps`), and nothing was measured.
        """
        del stop  # one step is the least there is
        lag = progress.version - batch.version
        samples = int(batch.valid.count_nonzero().item())
        if samples == 0:
            return UpdateResult(samples=0, metrics={})
        self._schedule(progress)
        seen = self._appraise(batch)
        with torch.no_grad():
            returns = self.returns(batch, seen, lag)
            target = self._normalized(returns.target, batch.valid) if self._settings.normalize_value else returns.target
        loss = single_pass_loss(self._settings, batch, seen, returns, target, entropy_coef=self._entropy_coef)
        norm = self._descend(loss.total)
        metrics = {"learning_rate": self._learning_rate, "entropy_coef": self._entropy_coef}
        metrics |= {"policy_lag_mean": lag.double().mean().item(), "nonfinite_steps": float(norm is None)}
        if norm is not None:
            metrics |= loss.parts() | {"grad_norm": norm.item()} | _movement(batch, seen.log_prob.detach())
        return UpdateResult(samples=samples, metrics=metrics)


def _movement(batch: Batch, log_prob: Tensor) -> dict[str, float]:
    """How far the policy has moved since it acted: KL(mu, pi) by the estimator of `losses.policy_loss`, and the ratios."""
    log_ratio = (log_prob - batch.log_prob)[batch.valid]
    ratio = log_ratio.exp()
    distance = (ratio - 1.0).abs().amax()
    return {"approx_kl": (ratio - 1.0 - log_ratio).mean().item(), "first_ratio_error": distance.item()}
