"""One pass over each batch: policy gradient, value and entropy together. IMPALA and A3C differ in their returns alone.

All losses are means over the valid env steps, so that a step's size does not depend on how much one batch holds. (The papers sum,
and clip sums: their learning rates and clips must not be copied as they are.)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.algorithms import losses
from common.algorithms.actor_critic import ActorCriticLearner
from common.algorithms.api import Progress, UpdateResult
from common.algorithms.appraisal import Appraisal
from common.algorithms.batch import Batch, minibatches
from common.algorithms.returns import Returns
from common.algorithms.settings.a3c import A3CSettings
from common.algorithms.settings.actor_critic import SinglePassSection
from common.algorithms.settings.impala import ImpalaSettings
from common.envs.spec import EnvSpec
from common.models.arithmetic import CPU, autocast
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


_MEASURED = (*Loss._fields[1:], "grad_norm")


class Rows(NamedTuple):
    """N valid env steps, and what the network says of them. The first three carry the gradient."""

    log_prob: Tensor  # [N] log pi(a_t | o_t)
    entropy: Tensor  # [N] of pi(. | o_t), nats
    value: Tensor  # [N] what the value head says of o_t
    advantage: Tensor  # [N]
    target: Tensor  # [N], in the units of the value head


def single_pass_loss(settings: SinglePassSection, rows: Rows) -> Loss:
    """Advantage actor-critic (Mnih et al. 2016, arXiv:1602.01783, section 4; Espeholt et al. 2018, eq. 4 and below).

        loss = mean( - A_t * log pi(a_t | o_t) ) + value_coef * mean( (V(o_t) - target_t)^2 ) / 2 - entropy_coef * mean( H_t )

    over the rows, of which there must be one.
    """
    advantage = rows.advantage
    if settings.normalize_advantage:
        advantage = losses.standardized(advantage, least_std=settings.least_advantage_std)
    losses.require_vectors(rows.log_prob, advantage)
    policy_loss = -(rows.log_prob * advantage).mean()
    value_loss = losses.value_loss(value=rows.value, target=rows.target)
    entropy = rows.entropy.mean()
    total = policy_loss + settings.value_coef * value_loss - settings.entropy_coef * entropy
    explained = losses.explained_variance(value=rows.value.detach(), target=rows.target)
    return Loss(total, policy_loss.detach(), value_loss.detach(), entropy.detach(), explained)


class SinglePass(ActorCriticLearner):
    """`common.algorithms.api.Algorithm`, but for `returns`."""

    _settings: A3CSettings | ImpalaSettings

    def __init__(
        self, *, settings: A3CSettings | ImpalaSettings, model: ModelSettings, env: EnvSpec, seed: int, device: torch.device = CPU
    ) -> None:
        """Build the network and optimizer; `seed` fixes initial weights and minibatches."""
        optimizer, eps = settings.optimizer, settings.optimizer_eps
        super().__init__(settings=settings, model=model, env=env, seed=seed, device=device, optimizer=optimizer, eps=eps)
        self._generator = torch.Generator().manual_seed(seed)

    @abstractmethod
    def returns(self, batch: Batch, seen: Appraisal, lag: Tensor) -> Returns:
        """Advantages and value targets [T, B] in units of return; `lag` [B] in versions. Called without gradient."""

    def update(self, batch: Batch, progress: Progress, stop: Callable[[], bool] = lambda: False) -> UpdateResult:
        """Train once on each valid env step of a batch: in one gradient step, or in random minibatches of nearly equal size.

        A step whose loss or gradient is not finite is left out and counted (`nonfinite_steps`). What was not measured, because
        no step was taken, is not among the metrics.
        """
        lag = progress.version - batch.version
        chosen = batch.valid.flatten().nonzero().squeeze(-1)
        if len(chosen) == 0:
            return UpdateResult(samples=0, metrics={})
        self._schedule(progress)
        parts = minibatches(chosen, size=self._settings.minibatch or len(chosen), generator=self._generator)
        with torch.set_grad_enabled(len(parts) == 1):  # of several steps each asks the network again
            seen = self._appraise(batch)
        with torch.no_grad():
            returns = self.returns(batch, seen, lag)
            target = self._normalized(returns.target, batch.valid) if self._settings.normalize_value else returns.target
        whole = (seen.log_prob, seen.entropy, seen.head, returns.advantage, target)
        rows = Rows(*(part.flatten(0, 1) for part in whole))
        if len(parts) == 1:
            steps = [self._step(_taken(rows, chosen))]
        else:
            steps = [self._step(self._ask(batch, rows, part)) for part in takewhile(lambda _: not stop(), parts)]
        taken = [step for step in steps if step is not None]
        metrics = {"learning_rate": self._learning_rate, "policy_lag_mean": lag.double().mean().item()}
        metrics["nonfinite_steps"] = float(len(steps) - len(taken))
        if taken:
            metrics |= dict(zip(_MEASURED, torch.tensor(taken).mean(dim=0).tolist(), strict=True))
            metrics |= _movement(batch, seen.log_prob.detach())
        return UpdateResult(samples=len(chosen), metrics=metrics)

    def _ask(self, batch: Batch, rows: Rows, part: Tensor) -> Rows:
        """The rows of a minibatch, by the weights as they are now.

        The policy has moved since the pass began: the probability ratio of then and now corrects for it, clipped at 1 as V-trace
        clips it.
        """
        observation = batch.observation[:-1].flatten(0, 1).index_select(0, part)
        with autocast(self._settings.precision, observation.device):
            policy, value = self._model(observation)
        before, action = _taken(rows, part), batch.action.flatten(0, 1).index_select(0, part)
        log_prob = policy.log_prob(action)
        moved = (log_prob.detach() - before.log_prob).exp().clamp_max(1.0)
        return before._replace(log_prob=log_prob, entropy=policy.entropy(), value=value, advantage=before.advantage * moved)

    def _step(self, rows: Rows) -> list[float] | None:
        """One gradient step, and what it measured by the names of `_MEASURED`; None, and nothing changed, if not finite."""
        loss = single_pass_loss(self._settings, rows)
        norm = self._descend(loss.total)
        return None if norm is None else [*loss.parts().values(), norm.item()]

    def state_dict(self) -> dict[str, Any]:
        """Copies, in nested dicts with string keys; leaves are tensors and JSON scalars."""
        return super().state_dict() | {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; ResourceError, and nothing changed, where the state is of another architecture."""
        super().load_state_dict(state)
        if "generator" in state:  # a run from before there were minibatches drew nothing
            self._generator.set_state(state["generator"])


def _taken(rows: Rows, index: Tensor) -> Rows:
    return Rows(*(row.index_select(0, index) for row in rows))


def _movement(batch: Batch, log_prob: Tensor) -> dict[str, float]:
    """How far the policy has moved since it acted: KL(mu, pi) by the estimator of `losses.policy_loss`, and the ratios."""
    log_ratio = (log_prob - batch.log_prob)[batch.valid]
    ratio = log_ratio.exp()
    distance = (ratio - 1.0).abs().amax()
    return {"approx_kl": (ratio - 1.0 - log_ratio).mean().item(), "first_ratio_error": distance.item()}
