"""The interfaces between the services and an algorithm: the learner's side, the acting side, and the `Entry` that joins them.

One algorithm is one module: a learner that keeps model, optimizer and random state, a policy, and `ENTRY`. The services use
nothing else of it. No algorithm uses sockets, queues, files or clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from common.algorithms.payload import Payload, trajectory_payload
from common.algorithms.sections import AlgorithmSection
from common.models import snapshot
from common.models.memory import Past, Recurrent, finite_states
from common.models.spec import Precision
from common.protocol.events import Experience
from common.protocol.messages import Arrays, ArraySpec
from common.replay.blocks import Segment
from common.units import EnvSteps, Version

Net = TypeVar("Net", bound=nn.Module)


# --- the learner's side ---


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """A point of the run: schedules (learning rate, entropy, exploration) are functions of it."""

    env_steps: EnvSteps  # trained on so far
    env_steps_planned: EnvSteps  # the run's budget, > 0
    version: Version  # newest published policy


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """The outcome of one update. `metrics` are scalars for TensorBoard and /metrics (loss parts, entropy, approx_kl, ...)."""

    samples: int  # valid env steps in the batch
    metrics: Mapping[str, float]


class Algorithm(Protocol):
    """Learner side of an algorithm."""

    @property
    def model(self) -> nn.Module:
        """The network whose parameters are published (float32, owned by the learner)."""

    def calibrate(self, frames: Tensor) -> None:
        """Begin the normalisation with example observations [N, *frame], once, before the first update of a run."""

    def ingest(self, samples: Sequence[Experience]) -> Any:
        """Take in experience messages, all of one schema; return what `update` needs of them, valid until the next call.

        An algorithm with a replay memory inserts them; another joins them to the batch that it trains on.
        """

    def update(self, batch: Any, progress: RunProgress, stop: Callable[[], bool] = lambda: False) -> UpdateResult:
        """Train on what `ingest` returned. `stop` is called before each gradient step, and ends the update where it is True."""

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs: model, optimizer, random state, running statistics. Tensors and JSON scalars."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`. Raises `ResourceError` where the state is of another architecture."""


@runtime_checkable
class ObservesExperience(Protocol):
    """An algorithm that adapts its normalisation of observations to the experience of the run."""

    def observe(self, samples: Sequence[Experience]) -> None:
        """Take the observations of a batch into the normalisation; called after its update, before the next publication."""


@runtime_checkable
class HasReplay(Protocol):
    """An algorithm with a replay memory, whose size is logged and checked at the start."""

    @property
    def replay_env_steps(self) -> EnvSteps:
        """Env steps in a full memory."""

    @property
    def replay_bytes(self) -> int:
        """Bytes of a full memory; allocated already, touched as it fills."""


@runtime_checkable
class SavesReplay(Protocol):
    """An algorithm whose replay memory can be part of checkpoints (`checkpoint.replay`)."""

    def replay_state(self) -> Mapping[str, Any]:
        """Return the memory, and the state of its rate limit, without the data in `replay_segments`: arrays and JSON scalars."""

    def load_replay_state(self, state: Mapping[str, Any]) -> None:
        """Restore `replay_state`; the caller then fills `replay_segments`. Raises `ResourceError` for a state of another form."""

    def replay_segments(self) -> Sequence[Segment]:
        """Return the segments of the memory, in the same order each time."""


@runtime_checkable
class LoadsParameters(Protocol):
    """An algorithm that can start with the weights of another run (`run.init`)."""

    def load_parameters(self, state: Mapping[str, Any]) -> None:
        """Take the weights of all networks from the `state_dict` of another run, and nothing else.

        Raises `ResourceError`, and changes nothing, for a network of other layers.
        """


# --- the acting side ---


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """The worker that a policy acts for: exploration that differs from actor to actor is a function of it."""

    index: int  # of this worker among those of its role, from 0
    workers: int  # of its role that the run expects; more may come
    num_envs: int  # B, environments that this worker steps
    training: bool = True  # False: an evaluator, which explores, where it does, as at the end of training


class Policy(Protocol):
    """Acting side of an algorithm: turns observations into actions. One per actor or evaluator process."""

    @property
    def layout(self) -> str:
        """Fingerprint of the parameters that `load` takes (`common.models.snapshot.ParameterLayout`)."""

    def load(self, version: Version, parameters: Tensor, *, env_steps: EnvSteps) -> None:
        """Take the weights of a snapshot: flat [P] float32 or bfloat16 (see `common.models.snapshot`).

        `env_steps` were trained on when it was published: schedules of exploration are functions of them.
        """

    def act(self, observation: Tensor, *, greedy: bool = False) -> Mapping[str, Tensor]:
        """Choose actions for [B, *input] in the environment's dtype, by the weights that were loaded.

        Returns {"action": [B] or [B, K] int64, or [B, A] float32} and the arrays that are recorded per step, such as
        "log_prob": [B] float32.
        """

    def experience(self, rollout: Arrays) -> Arrays:
        """Return the arrays to send of a finished rollout, by the run's schema: the rollout itself, or what it makes of it.

        Called before the next `load`: the weights that are loaded are those that acted.
        """


def begin_episodes(policy: Policy, start: NDArray[np.bool_]) -> None:
    """Let the next `act` of a policy begin an episode where `start` [B] is True; nothing is done for one without memory.

    To be called before each `act`.
    """
    if isinstance(policy, NetworkPolicy) and policy.memory.shape[1]:
        policy.begin_episodes(torch.from_numpy(start))


def states(policy: Policy) -> NDArray[np.float32] | None:
    """Return the states [B, S] of a policy's memory after the newest `act`; None for one without memory."""
    return policy.memory.numpy() if isinstance(policy, NetworkPolicy) and policy.memory.shape[1] else None


@runtime_checkable
class HasRandomState(Protocol):
    """A policy whose random stream can be saved, so that an actor restarted in lockstep continues with it."""

    def random_state(self) -> np.ndarray:
        """Return the state of every random generator that it draws from, [N] uint8."""

    def set_random_state(self, state: np.ndarray) -> None:
        """Restore `random_state`; any exception means that the bytes are no such state."""


class NetworkPolicy(Generic[Net]):
    """The part of `Policy` that is the same for every network; load a snapshot before the first `act`."""

    def __init__(self, net: Net, *, precision: Precision, seed: int, state_size: int = 0) -> None:
        """Act with `net`, of which it becomes the owner, in `precision`; `seed` fixes the random stream of the actions.

        `state_size` (S) is that of its memory, 0 without one.
        """
        self._net = net.requires_grad_(requires_grad=False).eval()
        if precision == "bf16":
            self._net.bfloat16()
            for module in self._net.modules():
                if isinstance(module, Recurrent):
                    module.float()
        self._generator = torch.Generator().manual_seed(seed)
        self.version: Version = -1  # of the weights that act; -1 before the first `load`
        self.memory = torch.empty(0, state_size)  # [B, S] float32: of each environment after the newest `act`; S = 0 without
        self._start = torch.empty(1, 0, dtype=torch.bool)

    def begin_episodes(self, start: Tensor) -> None:
        """Let the next `act` begin an episode where `start` [B] is True, without a memory of the one before."""
        self._start = start.unsqueeze(0)
        if len(self.memory) != len(start):
            self.memory = self.memory.new_zeros(len(start), self.memory.shape[1])

    @property
    def _past(self) -> Past:
        """What came before the observations of the next `act`."""
        return Past(self.memory, self._start)

    def _remember(self, state: Tensor | None) -> None:
        """Keep the states [B, S] after an `act`, for the next; None without memory."""
        if state is not None:
            self.memory = finite_states(state)
            self._start = torch.zeros_like(self._start)

    @property
    def network(self) -> Net:
        """The network that acts."""
        return self._net

    @property
    def layout(self) -> str:
        """Fingerprint of the parameters that `load` takes."""
        return snapshot.ParameterLayout.of(self._net).fingerprint

    def load(self, version: Version, parameters: Tensor, *, env_steps: EnvSteps) -> None:
        """Take the weights of a snapshot: flat [P] float32 or bfloat16. `env_steps` makes no difference."""
        del env_steps
        snapshot.load(self._net, parameters)
        self.version = version

    def experience(self, rollout: Arrays) -> Arrays:
        """Return the rollout unchanged."""
        return rollout

    def random_state(self) -> np.ndarray:
        """Return the state of the random stream that actions are drawn from, [N] uint8."""
        state: np.ndarray = self._generator.get_state().numpy()
        return state

    def set_random_state(self, state: np.ndarray) -> None:
        """Restore `random_state`. Raises `RuntimeError` or `TypeError` for bytes that are no such state."""
        self._generator.set_state(torch.from_numpy(state))


# --- both ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One algorithm: its settings, the constructors of its two sides, and the arrays that pass between them."""

    settings: type[AlgorithmSection]
    algorithm: Callable[..., Algorithm]  # settings=, model=, env=, seed=, device= of a GPU, ranks=, normalize_reward=
    policy: Callable[..., Policy]  # settings=, model=, env=, precision=, seed=, context=
    recorded: Callable[..., tuple[ArraySpec, ...]] = lambda **_: ()  # settings=, length=, num_envs=
    payload: Callable[..., Payload] = trajectory_payload  # settings=, model=, env=, length=, num_envs=, rollout= its schema
