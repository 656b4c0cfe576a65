"""The learner's side of every algorithm that trains from a replay memory.

`collate` inserts what actors sent, `update` takes the gradient steps that the inserts have paid for. So the number of times an
env step is trained on follows from the settings alone, however fast actors and learner are. An algorithm adds its networks and
what one gradient step is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.algorithms import schedules
from common.algorithms.api import Progress, Sample, UpdateResult
from common.algorithms.settings.replay import ReplaySection
from common.envs.spec import EnvSpec
from common.models.arithmetic import CPU
from common.models.nets import Network
from common.replay.governor import Governor
from common.replay.memory import Replay, Transitions
from common.replay.prioritized import PrioritySettings
from common.replay.segments import Segment
from common.units import EnvSteps

Measured = Mapping[str, Tensor]
"""What one gradient step measured: scalars by the names of their metrics, without gradient."""


class Inserted(NamedTuple):
    """What one call of `collate` put into the memory."""

    env_steps: int
    version: float  # mean, of the policies that acted


class ReplayLearner(ABC):
    """The part of `common.algorithms.api.Algorithm` that concerns the memory and the pace.

    The memory is not part of `state_dict`: it is as large as the machine allows. Where checkpoints hold it, it is written apart
    (`common.algorithms.api.SavesReplay`); else a resumed run fills it again, and warms up.
    """

    def __init__(
        self,
        *,
        settings: ReplaySection,
        env: EnvSpec,
        seed: int,
        device: torch.device = CPU,
        prioritized: PrioritySettings | None = None,
    ) -> None:
        """Allocate the memory (ConfigError where it cannot be); `seed` fixes what is drawn from it."""
        self._pace = Governor(samples_per_insert=settings.samples_per_insert, batch=settings.minibatch, warm_up=settings.warmup)
        self._settings, self._learning_rate = settings, settings.learning_rate
        self._device = device  # of the networks; the memory is the CPU's
        self._rng = np.random.default_rng(seed)
        self._replay = Replay(
            env=env,
            capacity=settings.replay_capacity,
            n_step=settings.n_step,
            gamma=settings.gamma,
            clip_reward=settings.clip_reward,
            prioritized=prioritized,
        )

    @abstractmethod
    def _networks(self) -> Iterable[Network]:
        """All that are trained, and their targets."""

    def calibrate(self, frames: Tensor) -> None:
        """Fix the normalisation of observations by example frames [N, *frame]."""
        for net in self._networks():
            net.calibrate(frames)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    @property
    def _together(self) -> int:
        """Gradient steps that may be taken now on minibatches drawn together."""
        return 1

    @abstractmethod
    def _train(self, rows: Transitions) -> Sequence[Measured | None]:
        """Take a gradient step on each of up to `_together` minibatches, which lie one after another in `rows`.

        None for a step that would not be finite: what would not be leaves its network as it is.
        """

    def _beta(self, progress: Progress) -> float:
        """Of the importance weights at this point of the run; unused where sampling is uniform."""
        del progress
        return 1.0

    @property
    def replay_env_steps(self) -> EnvSteps:
        """How much the memory holds when it is full: what was asked for, in whole blocks."""
        return self._replay.capacity

    @property
    def replay_bytes(self) -> int:
        """What it then takes."""
        return self._replay.nbytes

    def replay_state(self) -> dict[str, Any]:
        """Return the state of the memory without its segments, and of the limit on gradient steps."""
        return {"memory": self._replay.state_dict(), "pace": self._pace.state_dict()}

    def load_replay_state(self, state: Mapping[str, Any]) -> None:
        """Restore `replay_state`; the caller then fills the segments. Raises `ResourceError` for a memory of another layout."""
        self._replay.load_state_dict(state["memory"])
        self._pace.load_state_dict(state["pace"])

    def replay_segments(self) -> Sequence[Segment]:
        """Return the segments of the memory."""
        return self._replay.segments()

    def collate(self, samples: Sequence[Sample]) -> Inserted:
        """Insert trajectories into the memory."""
        for sample in samples:
            arrays = sample.arrays
            env_steps = self._replay.insert(arrays, stream=sample.peer, seq=sample.seq, error=arrays.get("priority"))
            self._pace.inserted(env_steps)
        return Inserted(sum(sample.env_steps for sample in samples), float(np.mean([sample.version for sample in samples])))

    def update(self, batch: Inserted, progress: Progress, stop: Callable[[], bool] = lambda: False) -> UpdateResult:
        """Take the gradient steps that are owed for all inserts so far; none before the warm-up is over.

        A step that would not be finite is left out and counted (`nonfinite_steps`), and so are its samples: bad numbers do
        not make the run train more often on the others. What was not measured is not among the metrics.
        """
        self._learning_rate = schedules.learning_rate(self._settings, progress)
        steps: list[Measured | None] = []
        windows: list[np.ndarray] = []
        while (due := min(self._pace.owed, self._together)) and len(self._replay) and not stop():
            self._pace.drew(due)
            rows = self._replay.sample(due * self._settings.minibatch, self._rng, beta=self._beta(progress))
            windows.append(rows.env_steps)
            steps.extend(self._train(rows))
        taken = [step for step in steps if step is not None]
        metrics = {
            "learning_rate": self._learning_rate,
            "policy_lag_mean": progress.version - batch.version,
            "gradient_steps": float(len(taken)),
            "nonfinite_steps": float(len(steps) - len(taken)),
            "replay_env_steps": float(len(self._replay)),
            "samples_per_insert": self._pace.ratio,
        }
        if windows:
            metrics["window_env_steps"] = float(np.concatenate(windows).mean())
        return UpdateResult(samples=batch.env_steps, metrics=metrics | _means(taken))

    def state_dict(self) -> dict[str, Any]:
        """The random state of sampling."""
        return {"replay_rng": dict(self._rng.bit_generator.state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self._rng.bit_generator.state = state["replay_rng"]


def _means(steps: Sequence[Measured]) -> dict[str, float]:
    """Mean of each metric over the steps that measured it."""
    values: dict[str, list[Tensor]] = {}
    for step in steps:
        for name, value in step.items():
            values.setdefault(name, []).append(value)
    return {name: torch.stack(scalars).mean().item() for name, scalars in values.items()}
