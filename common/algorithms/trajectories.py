"""The parts that algorithms on trajectories share, actor-critics and PQN: network outputs, minibatches, and the learner's state.

T and B are the axes of `Batch`, S is the size of a memory's state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from common.algorithms import optim
from common.algorithms.batch import Batch, collate
from common.algorithms.moments import ObservationStatistics
from common.algorithms.ranks import ALONE, Ranks, total
from common.algorithms.rewards import RewardStatistics
from common.algorithms.sections import ActionValueSection, ActorCriticSection
from common.envs.spec import EnvSpec
from common.errors import ResourceError
from common.models import nets, snapshot
from common.models.arithmetic import CPU, autocast, to_device
from common.models.memory import Past
from common.models.spec import ModelSettings, Precision
from common.protocol.events import Experience

Net = TypeVar("Net", nets.ActorCritic, nets.QNetwork)
R = TypeVar("R", bound=tuple[Tensor, ...])

_FORWARD_ROWS = 512  # env steps per forward pass: activations stay in the cache


# --- the network's outputs for a batch ---


class BatchOutputs(NamedTuple):
    """`nets.Output` or `nets.ActionValues` for all observations of a batch, in parts.

    Those of `rows` carry gradient, unless it is switched off.
    """

    rows: Sequence[Any]  # for o_0 .. o_{T-1}, [T*B] together
    after: Sequence[Any]  # for o_T, and the last observations of truncated episodes, [B + K] together
    state: Tensor  # [B, S] of the memory after o_{T-1}, by these weights


def batch_outputs(net: nets.ActorCritic | nets.QNetwork, batch: Batch, *, precision: Precision) -> BatchOutputs:
    """Pass all observations through the network once, in parts of bounded size."""
    rows = _forward(net, batch.observation[:-1].flatten(0, 1), batch.past, precision)
    with torch.no_grad():
        state, past = _after(rows, batch)
        after = _forward(net, torch.cat([batch.observation[-1], batch.final_observation]), past, precision)
    return BatchOutputs(rows, after, state)


def with_next_value(values: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """V(o_t) and V of the observation that really followed a_t, [T, B] each, from the values [T*B + B + K] of `BatchOutputs`.

    The last row bootstraps from o_T. A truncated episode bootstraps from its own last observation, because o_{t+1} is the first
    of the next episode there.
    """
    shape = batch.reward.shape
    value, bootstrap, final = torch.split(values, [shape.numel(), shape[1], len(batch.final_index)])
    next_value = torch.cat([value[shape[1] :], bootstrap]).index_copy_(0, batch.final_index, final)
    return value.view(shape), next_value.view(shape)


def _forward(net: nets.ActorCritic | nets.QNetwork, observation: Tensor, past: Past, precision: Precision) -> list[Any]:
    """The outputs for T*B rows, in parts; one part has the same rows of all environments where the network has memory."""
    with autocast(precision, observation.device):
        if net.recurrent is None:
            return [net(part) for part in torch.split(observation, _FORWARD_ROWS)]
        outputs, state = list[Any](), past.state
        rows = max(1, _FORWARD_ROWS // max(1, len(state)))
        for start in torch.split(past.start, rows):
            done = sum(len(output.value) for output in outputs)
            output = net(observation[done : done + start.numel()], Past(state, start))
            assert output.state is not None
            outputs.append(output)
            state = output.state[output.state.shape[0] - len(state) :]
        return outputs


def _after(outputs: Sequence[Any], batch: Batch) -> tuple[Tensor, Past]:
    """The states [B, S] after o_{T-1}, and what came before o_T and the last observations of truncated episodes: one row."""
    rows = [output.state for output in outputs if output.state is not None]
    states = torch.cat(rows) if rows else batch.memory.new_empty(batch.reward.numel(), 0)
    state, final = states[-batch.reward.shape[1] :], states[batch.final_index]
    start = torch.cat([batch.start[-1], batch.start.new_zeros(len(final))])
    return state, Past(torch.cat([state, final]), start.unsqueeze(0))


# --- minibatches ---


class Minibatch(NamedTuple, Generic[R]):
    """The rows of one gradient step; with memory all T rows of some environments, of which N are trained on."""

    rows: R  # arrays [N, ...], or [T*b, ...] with memory
    past: Past | None  # None without memory
    trained: Tensor | None  # [N] int64, index of the valid rows; None: all are

    def chosen(self, column: Tensor) -> Tensor:
        """Those of an array of all rows that are trained on."""
        return column if self.trained is None else column.index_select(0, self.trained)


class Minibatches:
    """A batch, to be cut into random minibatches of nearly equal size, of valid env steps alone.

    With memory a minibatch is whole environments that have valid env steps: there are at most as many minibatches as a rank has
    such environments on average, so that none is empty on all ranks.

    Each rank has minibatches of its own rows, all ranks the same number of them: a gradient step is on one of each.
    """

    def __init__(self, batch: Batch, *, size: int, whole: bool, ranks: Ranks) -> None:
        """`size`: env steps of a minibatch, of each rank; `whole`: all rows of some environments, for a network with memory."""
        self._batch, self._whole = batch, whole
        self._drawn = batch.valid.flatten().nonzero().squeeze(-1)  # [N]: rows, or environments
        self.env_steps = len(self._drawn)  # of this rank
        joint = total(self.env_steps, ranks)
        self.count = max(1, round(joint / (ranks.count * size))) if joint else 0  # 0: no rank has a valid env step
        if whole and joint:
            self._drawn = batch.valid.any(dim=0).nonzero().squeeze(-1)
            self.count = min(self.count, max(1, int(total(len(self._drawn), ranks)) // ranks.count))

    def shuffled(self, rows: R, generator: torch.Generator) -> Iterator[Minibatch[R]]:
        """Yield each of the valid `rows`, arrays [T*B, ...], once, in random order."""
        order = self._drawn[to_device(torch.randperm(len(self._drawn), generator=generator), self._drawn.device)]
        for part in order.tensor_split(self.count):
            yield self._environments(rows, part) if self._whole else Minibatch(_select(rows, part), None, None)

    def _environments(self, rows: R, environments: Tensor) -> Minibatch[R]:
        """All rows of some `environments` [b], and what their memory is computed from."""
        batch = self._batch
        every = torch.arange(batch.reward.numel(), device=environments.device).view(batch.reward.shape)
        index = every[:, environments].flatten()
        trained = batch.valid.flatten()[index].nonzero().squeeze(-1)
        past = Past(batch.past.state[environments], batch.past.start[:, environments])
        return Minibatch(_select(rows, index), past, trained)


def _select(rows: R, index: Tensor) -> R:
    """The rows `index` [N]."""
    return type(rows)(*(row.index_select(0, index) for row in rows))  # row[index] is twenty times slower on images


# --- learning ---


class TrajectoryLearner(Generic[Net]):
    """`common.algorithms.api.Algorithm` without `update`: owns network, optimizer, and statistics of observations and rewards."""

    def __init__(
        self,
        net: Net,
        optimizer: tuple[optim.Optimizer, float],
        *,
        settings: ActorCriticSection | ActionValueSection,
        model: ModelSettings,
        env: EnvSpec,
        device: torch.device = CPU,
        ranks: Ranks = ALONE,
        normalize_reward: bool = False,
    ) -> None:
        """`optimizer`: its name and epsilon."""
        self._ranks = ranks
        self._env, self._device, self._state_size = env, device, model.state_size
        self._model: Net = net.to(device)
        self._max_grad_norm = settings.max_grad_norm
        self._optimizer_name, eps = optimizer
        self._optimizer = optim.build_optimizer(self._optimizer_name, self._model, lr=settings.learning_rate, eps=eps)
        self._observations = ObservationStatistics(lambda: [self._model], env=env, ranks=ranks)
        self._rewards = RewardStatistics(enabled=normalize_reward, gamma=settings.gamma, ranks=ranks)

    @property
    def model(self) -> Net:
        """The network whose parameters are published (float32)."""
        return self._model

    def calibrate(self, frames: Tensor) -> None:
        """Begin the normalisation of observations with example observations [N, *frame]."""
        self._observations.calibrate(frames)

    def observe(self, samples: Sequence[Experience]) -> None:
        """Let the network normalise vector observations by all so far, these included."""
        self._observations.add(samples)

    def ingest(self, samples: Sequence[Experience]) -> Batch:
        """Join trajectories into one batch, stacks rebuilt; its rewards are scaled by all so far, these included."""
        self._rewards.add(samples)
        batch = collate(samples, self._env, self._device, state_size=self._state_size)
        return replace(batch, reward=self._rewards.scaled(batch.reward))

    def _gradient_step(self, loss: Tensor, *, lr: float, rows: int) -> Tensor:
        """As `optim.gradient_step`, of this network on all ranks."""
        most = self._max_grad_norm
        return optim.gradient_step(self._optimizer, self._model, loss, lr=lr, max_grad_norm=most, rows=rows, ranks=self._ranks)

    def state_dict(self) -> dict[str, Any]:
        """Copies, in nested dicts with string keys; leaves are tensors and JSON scalars."""
        return {
            "parameters": snapshot.network_state(self._model),
            "optimizer": {self._optimizer_name: snapshot.optimizer_state(self._optimizer, self._model)},
            "observation_moments": self._observations.state_dict(),
            "rewards": self._rewards.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; ResourceError, and nothing changed, where it is of another architecture or optimizer."""
        optimizers = state.get("optimizer", {})
        if self._optimizer_name not in optimizers:
            fix = "resume with the algorithm settings of that run"
            raise ResourceError(
                "the checkpoint is of another optimizer", found=list(optimizers), wanted=[self._optimizer_name], fix=fix
            )
        self.load_parameters(state)
        snapshot.restore_optimizer(self._optimizer, self._model, optimizers[self._optimizer_name])

    def load_parameters(self, state: Mapping[str, Any]) -> None:
        """Take the network, and the statistics of its observations and rewards."""
        snapshot.restore_network(self._model, state.get("parameters", {}))
        self._observations.load_state_dict(state.get("observation_moments", {}))
        self._rewards.load_state_dict(state.get("rewards", {}))
