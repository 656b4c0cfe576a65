"""What the learner, the actor and an algorithm promise one another. Knows no sockets, queues, files or clocks.

One algorithm is one module: its settings, its loss as pure functions, and a class that keeps the model, the
optimizer and the random state and implements `Algorithm`. The services only ever see this protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from common import units
from common.algorithms.parts import Part, RunParts
from common.replay.segments import Segment
from common.units import EnvSteps, Version
from common.wire.messages import Arrays


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One experience message as the learner's queue hands it over: `version` acted, `arrays` by the run's schema.

    Messages of one `peer` with consecutive `seq` follow one another in time: what ends in one goes on in the next.
    """

    peer: Hashable = None  # one incarnation of one actor; in lockstep one place, whichever processes held it. Plain values
    seq: units.Sequence = 0
    version: Version
    env_steps: EnvSteps
    arrays: Arrays


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far the run is: schedules (learning rate, entropy, exploration) are functions of it."""

    env_steps: EnvSteps  # trained on so far
    env_steps_planned: EnvSteps  # the run's budget, > 0
    version: Version  # newest published policy


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """What one learner update did. `metrics` are scalars for TensorBoard and /metrics (loss parts, entropy, approx_kl, ...)."""

    samples: int  # valid env steps in the batch
    metrics: Mapping[str, float]


class Algorithm(Protocol):
    """Learner side of an algorithm."""

    @property
    def model(self) -> torch.nn.Module:
        """The network whose parameters are published (float32, in the learner's hands)."""

    def calibrate(self, frames: torch.Tensor) -> None:
        """Learn what observations look like from example frames [N, *frame], once, before the first update of a run."""

    def collate(self, samples: Sequence[Sample]) -> Any:
        """Turn experience messages (all of one schema) into what `update` trains on; valid until the next call."""

    def update(self, batch: Any, progress: Progress, stop: Callable[[], bool] = lambda: False) -> UpdateResult:
        """Train on one collated batch, until `stop`: it is asked before each gradient step, or few short ones."""

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs: model, optimizer, random state, running statistics. Tensors and JSON scalars."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`. Raises `ResourceError` where the state is of another architecture."""


@runtime_checkable
class Remembers(Protocol):
    """What an algorithm with a replay memory offers beside `Algorithm`, so that its size is told and checked at the start."""

    @property
    def replay_env_steps(self) -> EnvSteps:
        """How much the memory holds when it is full."""

    @property
    def replay_bytes(self) -> int:
        """What it then takes; allocated already, touched as it fills."""


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
class InParts(Protocol):
    """What an algorithm offers beside `Algorithm` whose gradient step falls into parts, which may be computed apart."""

    parts: Sequence[Part]
    run_parts: RunParts
    """How it has them computed: one after the other, unless it is told of another way before the first update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a policy acts: exploration that differs from actor to actor is a function of it."""

    index: int  # of this peer among those of its role, from 0
    peers: int  # of its role that the run expects; more may come
    num_envs: int  # B, environments that this peer steps
    training: bool = True  # False: an evaluator, which explores, where it does, as at the end of training


class Policy(Protocol):
    """Acting side of an algorithm: turns observations into actions. One per actor or evaluator process."""

    @property
    def layout(self) -> str:
        """Fingerprint of the parameters it takes (`common.models.snapshot.Layout`)."""

    def load(self, version: Version, parameters: torch.Tensor, *, env_steps: EnvSteps) -> None:
        """Take the weights of a snapshot: flat [P] float32 or bfloat16 (see `common.models.snapshot`).

        `env_steps` were trained on when it was published: schedules of exploration are functions of them.
        """

    def act(self, observation: torch.Tensor, *, greedy: bool = False) -> Mapping[str, torch.Tensor]:
        """Choose actions for [B, *input] in the environment's dtype, by the weights that were loaded.

        Returns {"action": [B] int64 or [B, A] float32} and what the rollout records per step, e.g. "log_prob": [B] float32.
        """

    def experience(self, rollout: Arrays) -> Arrays:
        """What to send of a finished rollout, by the run's schema: the rollout itself, or what was made of it.

        Called before the next `load`: the weights that are loaded are those that acted.
        """


@runtime_checkable
class HasRandomState(Protocol):
    """A policy whose random stream can be saved, so that an actor restarted in lockstep continues with it."""

    def random_state(self) -> np.ndarray:
        """Return the state of every random generator that it draws from, [N] uint8."""

    def set_random_state(self, state: np.ndarray) -> None:
        """Restore `random_state`; any exception means that the bytes are no such state."""
