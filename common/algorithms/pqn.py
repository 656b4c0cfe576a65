"""Q-learning on trajectories, without replay memory and target network: PQN (Gallici et al. 2024, arXiv:2407.04811).

`PQN.update` makes Q(lambda) returns of the newest action values of a batch, and then trains towards them for several epochs of
random minibatches. What takes the place of the target network is `model.layer_norm`, which keeps action values from diverging
(section 4 of the paper).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain, takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.algorithms import optim
from common.algorithms.action_values import EpsilonGreedyPolicy, annealed_epsilon, q_loss
from common.algorithms.api import Entry, RunProgress, UpdateResult
from common.algorithms.batch import Batch
from common.algorithms.measures import NONFINITE_STEPS, Measured, means, nonfinite_steps
from common.algorithms.returns import q_lambda
from common.algorithms.settings import PQNSettings
from common.algorithms.trajectories import Minibatch, Minibatches, TrajectoryLearner, batch_outputs, with_next_value
from common.envs.spec import EnvSpec
from common.models import nets
from common.models.arithmetic import autocast
from common.models.memory import memory_error
from common.models.spec import ModelSettings

_RADAM_EPS = 1e-8


class _Rows(NamedTuple):
    """Rows of a batch, [T*B] of all or [N] of those that one gradient step trains on."""

    observation: Tensor  # [N, *input]
    action: Tensor  # [N]
    target: Tensor  # [N], the return that Q(o, a) is trained towards


class PQN(TrajectoryLearner[nets.QNetwork]):
    """`common.algorithms.api.Algorithm` for action values."""

    def __init__(self, *, settings: PQNSettings, model: ModelSettings, env: EnvSpec, seed: int, **others: Any) -> None:
        """`seed` fixes initial weights and minibatches; `others` as of the base.

        Raises ConfigError for continuous actions and several components.
        """
        settings.require_actions(env.action)
        net = nets.build_q_network(model, env, dueling=settings.dueling, seed=seed)
        super().__init__(net, ("radam", _RADAM_EPS), settings=settings, model=model, env=env, **others)
        self._settings = settings
        self._generator = torch.Generator().manual_seed(seed)

    def update(self, batch: Batch, progress: RunProgress, stop: Callable[[], bool] = lambda: False) -> UpdateResult:
        """Train `epochs` times on the valid env steps of a batch, in random `Minibatches`.

        A step whose loss or gradient is not finite is left out and counted (`nonfinite_steps`). Measures of gradient steps are
        absent from the metrics where no step was taken.
        """
        settings = self._settings
        minibatches = Minibatches(batch, size=settings.minibatch, whole=self._model.recurrent is not None, ranks=self._ranks)
        if minibatches.count == 0:
            return UpdateResult(samples=0, metrics={})
        rows, measured_before = self._prepare(batch)
        learning_rate = optim.scheduled_learning_rate(settings, progress)
        epochs = chain.from_iterable(minibatches.shuffled(rows, self._generator) for _ in range(settings.epochs))
        steps = [self._step(minibatch, learning_rate) for minibatch in takewhile(lambda _: not stop(), epochs)]
        metrics = {
            "learning_rate": learning_rate,
            "epsilon": annealed_epsilon(progress.env_steps, settings),
            NONFINITE_STEPS: float(nonfinite_steps(steps)),
        } | self._rewards.metrics
        if minibatches.env_steps:
            metrics["policy_lag_mean"] = (progress.version - batch.version).double().mean().item()
        if measured := means(steps):
            metrics |= measured | {name: value.item() for name, value in measured_before.items()}
        return UpdateResult(samples=minibatches.env_steps, metrics=metrics)

    @torch.no_grad()
    def _prepare(self, batch: Batch) -> tuple[_Rows, Measured]:
        """All T*B rows with their returns by the weights before the update, and metrics of their outputs."""
        settings = self._settings
        outputs = batch_outputs(self._model, batch, precision=settings.precision)
        greedy = torch.cat([output.value.amax(dim=1) for output in (*outputs.rows, *outputs.after)])
        value, next_value = with_next_value(greedy, batch)
        target = q_lambda(
            reward=batch.reward.sign() if settings.clip_reward else batch.reward,
            value=value,
            next_value=next_value,
            terminated=batch.terminated,
            truncated=batch.truncated,
            valid=batch.valid,
            gamma=settings.gamma,
            lambda_=settings.q_lambda,
        )
        rows = _Rows(batch.observation[:-1].flatten(0, 1), batch.action.flatten(), target.flatten())
        return rows, memory_error(batch.memory[1], outputs.state)

    def _step(self, minibatch: Minibatch[_Rows], learning_rate: float) -> Measured:
        """One gradient step on half the squared error of Q(o, a), left out where it would not be finite."""
        rows = minibatch.rows
        target = minibatch.chosen(rows.target)
        if len(target) == 0:  # other ranks have rows
            norm = self._gradient_step(torch.zeros((), device=target.device), lr=learning_rate, rows=0)
            return {NONFINITE_STEPS: norm.isnan()}
        with autocast(self._settings.precision, rows.observation.device):
            values, _ = self._model(rows.observation, minibatch.past)
        loss, td_error, value = q_loss(minibatch.chosen(values), minibatch.chosen(rows.action), target=target, huber=None)
        norm = self._gradient_step(loss, lr=learning_rate, rows=len(target))
        measured = {"loss": loss.detach(), "q_mean": value.mean(), "td_abs": td_error.abs().mean(), "grad_norm": norm}
        return measured | {NONFINITE_STEPS: norm.isnan()}

    def state_dict(self) -> dict[str, Any]:
        """Copies, in nested dicts with string keys; leaves are tensors and JSON scalars."""
        return super().state_dict() | {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; ResourceError, and nothing changed, where the state is of another architecture."""
        super().load_state_dict(state)
        if "generator" in state:
            self._generator.set_state(state["generator"])


ENTRY = Entry(settings=PQNSettings, algorithm=PQN, policy=EpsilonGreedyPolicy)
