"""An environment that takes a fixed time per step, and counts its env steps where a kill cannot lose them.

The count is the reference of the measurement: one file per process, mapped into memory, so that the page cache of the kernel
holds the last step even of a process that was ended by SIGKILL. A step takes `period` seconds without CPU time, so
that the rate of a healthy run is bounded by the environment and not by the CPU.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

from common.units import EnvSteps, Seconds

EPISODE = 20  # env steps
_COUNT = struct.Struct("<qq")  # env steps, and resets with a seed
_counters: dict[Path, mmap.mmap] = {}


class TimedSteps(gymnasium.Env[NDArray[np.float32], np.int64]):
    """Episodes of `EPISODE` steps; the reward is 1 where the action matches the sign of the observation."""

    def __init__(self, *, folder: str, period: Seconds) -> None:
        """Count env steps in `folder`; a step ends no earlier than `period` seconds after the last one."""
        self.observation_space = Box(-1, 1, (1,), np.float32)
        self.action_space = Discrete(2)
        self._period, self._next, self._age, self._seen = period, 0.0, 0, 0.0
        self._counter = _counter(Path(folder) / f"{Path(sys.argv[0]).stem}.{os.getpid()}")

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed, options=options)
        self._age = 0
        self._count(resets=int(seed is not None))  # the environments' own resets have none
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Wait for the rest of the period, count, and reward a match."""
        now = time.monotonic()
        self._next = max(self._next + self._period, now)
        select.select((), (), (), self._next - now)  # relative to now: libfaketime breaks the absolute wait of `time.sleep`
        reward = float(int(action) == (self._seen > 0))
        self._age += 1
        self._count(env_steps=1)
        return self._observe(), reward, self._age == EPISODE, False, {}

    def _count(self, *, env_steps: int = 0, resets: int = 0) -> None:
        before = _COUNT.unpack_from(self._counter)
        _COUNT.pack_into(self._counter, 0, before[0] + env_steps, before[1] + resets)

    def _observe(self) -> NDArray[np.float32]:
        self._seen = float(self.np_random.choice((-1.0, 1.0)))
        return np.array([self._seen], np.float32)


def make(*, folder: str, period: Seconds) -> TimedSteps:
    """Return one environment; the entry point of the chaos and soak runs."""
    return TimedSteps(folder=folder, period=period)


def env_steps(folder: Path, role: str = "actor") -> dict[int, EnvSteps]:
    """Return the env steps of every process of `role` that ever stepped, by process id."""
    return {pid: counts[0] for pid, counts in _counts(folder, role).items()}


def resets(folder: Path, role: str) -> int:
    """Return how often a process of `role` was asked to begin an episode with a seed, over all environments."""
    return sum(counts[1] for counts in _counts(folder, role).values())


def _counts(folder: Path, role: str) -> dict[int, tuple[int, int]]:
    found = {int(path.suffix[1:]): path.read_bytes() for path in folder.glob(f"{role}.*")}
    return {pid: _COUNT.unpack_from(data) for pid, data in found.items() if len(data) >= _COUNT.size}


def _counter(path: Path) -> mmap.mmap:
    """Return the counter of this process; all its environments share it."""
    if path not in _counters:
        with path.open("w+b") as file:
            file.truncate(_COUNT.size)
            _counters[path] = mmap.mmap(file.fileno(), _COUNT.size)
    return _counters[path]
