"""Deep Q-learning from a replay memory (Mnih et al. 2015; Double: van Hasselt et al. 2016): the learner.

Axes: N transitions, n actions, B environments. Transition i leads from o_i by a_i over k_i <= n_step env steps to next_i; the
replay memory returns the sum of its discounted rewards and the discount gamma^k_i (0 where the episode terminated).

A network with memory is trained on sequences of transitions, each from the state that the actor stored (Kapturowski et al. 2019).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from common.algorithms import optim
from common.algorithms.action_values import EpsilonGreedyPolicy, annealed_epsilon, q_loss
from common.algorithms.api import Entry, RunProgress, UpdateResult
from common.algorithms.measures import NONFINITE_STEPS, Measured
from common.algorithms.off_policy import Inserted, ReplayLearner, td_target
from common.algorithms.settings import DQNSettings
from common.envs.spec import EnvSpec
from common.errors import InternalError
from common.models import nets, snapshot
from common.models.arithmetic import autocast
from common.models.memory import Past, memory_error
from common.models.spec import ModelSettings
from common.replay.blocks import STREAMS
from common.replay.buffer import Transitions
from common.replay.sequences import SequenceReplay, Sequences


def next_value(target_q: Tensor, selecting_q: Tensor | None = None) -> Tensor:
    """V(next_i) [N]: one action value of next_i by the target network.

        max_a Q_target(next, a)                        (Mnih et al. 2015, Methods, "training algorithm")
        Q_target(next, argmax_a Q_online(next, a))     (van Hasselt et al. 2016, arXiv:1509.06461, eq. 4)

    The second, Double Q-learning, lets one network select and the other evaluate: the largest of several noisy values is
    too large on average, the value of an action that another network selected is not.

    Args:
        target_q: [N, n] float32, Q_target(next, .).
        selecting_q: [N, n] float32, Q_online(next, .); None for the first form.
    """
    selecting = target_q if selecting_q is None else selecting_q
    if target_q.ndim != 2 or selecting.shape != target_q.shape:  # noqa: PLR2004 - N and n
        found = [tuple(target_q.shape), tuple(selecting.shape)]
        raise InternalError("action values of different shapes", found=found, wanted="[N, n]")
    return target_q.gather(1, selecting.argmax(dim=1, keepdim=True)).squeeze(1)


class DQN(ReplayLearner):
    """`common.algorithms.api.Algorithm` for action values."""

    _settings: DQNSettings

    def __init__(
        self,
        *,
        settings: DQNSettings,
        model: ModelSettings,
        env: EnvSpec,
        seed: int,
        streams: int = STREAMS,
        length: int = 0,
        **others: Any,
    ) -> None:
        """`seed` fixes initial weights and what is sampled; `length` is T of the rollouts, for a network with memory.

        `others` as of the base.

        Raises ConfigError for continuous actions, and where sequences do not fit into rollouts.
        """
        settings.require_actions(env.action)
        replay = _sequences(settings, model=model, env=env, length=length, streams=streams) if model.recurrent else None
        super().__init__(settings=settings, env=env, seed=seed, streams=streams, replay=replay, **others)
        self._model = nets.build_q_network(model, env, dueling=settings.dueling, seed=seed).to(self._device)
        self._target = copy.deepcopy(self._model).requires_grad_(requires_grad=False)
        self._optimizer = optim.build_optimizer("adam", self._model, lr=settings.learning_rate, eps=settings.adam_eps)
        self._average = copy.deepcopy(self._target) if settings.average_rate < 1.0 else None

    @property
    def model(self) -> nets.QNetwork:
        """The published network (float32): the online one, or its average."""
        return self._model if self._average is None else self._average

    def _networks(self) -> dict[str, nets.QNetwork]:
        average = {} if self._average is None else {"average": self._average}
        return {"parameters": self._model, "target": self._target} | average

    def _optimizers(self) -> dict[str, tuple[torch.optim.Optimizer, nn.Module]]:
        return {"adam": (self._optimizer, self._model)}

    def update(self, batch: Inserted, progress: RunProgress, stop: Callable[[], bool] = lambda: False) -> UpdateResult:
        """Train as `ReplayLearner` does; add the metric `epsilon`."""
        result = super().update(batch, progress, stop)
        epsilon = annealed_epsilon(progress.env_steps, self._settings)
        return UpdateResult(samples=result.samples, metrics={**result.metrics, "epsilon": epsilon})

    def _gradient_step(self, rows: Transitions | Sequences) -> Measured:
        """Train the online network; every `target_every`-th time move the target network towards it."""
        settings = self._settings
        with autocast(settings.precision, self._device):
            values, following, memory = self._unrolled(rows) if isinstance(rows, Sequences) else self._values(rows)
        target = td_target(reward=self._tensor(rows.reward), discount=self._tensor(rows.discount), value=following)
        loss, td_error, value = q_loss(values, self._tensor(rows.action), target=target, huber=settings.huber)
        norm = optim.gradient_step(
            self._optimizer,
            self._model,
            loss,
            lr=self._learning_rate,
            max_grad_norm=settings.max_grad_norm,
            rows=len(rows.reward),
            ranks=self._ranks,
        )
        if self._gradient_steps % settings.target_every == 0:
            optim.polyak_update(self._target, self._model, settings.target_rate, finite=norm)
        if self._average is not None:
            optim.polyak_update(self._average, self._model, settings.average_rate, finite=norm)
        measured = {"loss": loss.detach(), "q_mean": value.mean(), "td_abs": td_error.abs().mean(), "grad_norm": norm}
        return {**measured, **memory} | {NONFINITE_STEPS: norm.isnan()}

    def _values(self, rows: Transitions) -> tuple[Tensor, Tensor, Measured]:
        """Q(o_i, .) [N, n] with gradient, V(next_i) [N] without."""
        with torch.no_grad():
            following = self._tensor(rows.next_observation)
            selecting = self._model(following)[0] if self._settings.double else None
            value = next_value(self._target(following)[0], selecting)
        return self._model(self._tensor(rows.observation))[0], value, {}

    def _unrolled(self, rows: Sequences) -> tuple[Tensor, Tensor, Measured]:
        """The same for the rows of sequences that are trained on, and the metric `memory_error`.

        Both networks begin at the stored states. Those of the online one have no gradient before the burn-in is over.
        """
        start, stored = self._tensor(rows.start), self._tensor(rows.memory)
        observation, done = self._tensor(rows.observation).flatten(0, 1), rows.burn_in * len(stored)
        with torch.no_grad():
            target = self._target(observation, Past(stored, start))[0]
            burnt = self._model(observation[:done], Past(stored, start[: rows.burn_in]))[1] if done else stored
        values, states = self._model(observation[done:], Past(burnt[-len(stored) :], start[rows.burn_in :]))
        index, following = self._tensor(rows.index), self._tensor(rows.following)
        later, end = self._tensor(rows.later_memory), rows.length * len(stored) - done
        selecting = values.detach()[following - done] if self._settings.double else None
        value = next_value(target[following], selecting)
        return values[index - done], value, memory_error(later, states[end - len(stored) : end])

    def load_parameters(self, state: Mapping[str, Any]) -> None:
        """As the base; an average begins at that of the other run, if it had one."""
        super().load_parameters(state)
        if self._average is not None and (average := state.get("average")):
            snapshot.restore_network(self._average, average)


def _sequences(settings: DQNSettings, *, model: ModelSettings, env: EnvSpec, length: int, streams: int) -> SequenceReplay:
    return SequenceReplay(
        env=env,
        capacity=settings.replay_capacity,
        length=length,
        state_size=model.state_size,
        burn_in=settings.burn_in,
        n_step=settings.n_step,
        gamma=settings.gamma,
        clip_reward=settings.clip_reward,
        streams=streams,
    )


ENTRY = Entry(settings=DQNSettings, algorithm=DQN, policy=EpsilonGreedyPolicy)
