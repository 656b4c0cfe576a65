"""One rollout, recorded row by row into the arrays of a Trajectory message.

Axes: T env steps, B environments, S stacked images. Each rollout has arrays of its own: a message may wait for its
acknowledgement, or be sent again, while the next rollouts are recorded. (A pool would need the completed messages, and save the
page faults of fresh memory: under 1 % of the emulator's time at 84x84.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from common.algorithms.episode_reports import EPISODE_INDEX
from common.algorithms.payload import MEMORY
from common.envs.stacking import Frames, FrameStacker
from common.envs.state import StateError, check_like

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from common.envs.vector import Transition
    from common.protocol.messages import Arrays, ArraySpec
    from common.units import EnvSteps


class Rollout:
    """Per rollout: `start`, `observation`, act, `record(t, ...)` for t = 0..T-1, then `finish(...)` and `begin_next()`.

    Episodes go on from one rollout to the next, and so do their returns. One thread uses it.
    """

    env_steps: EnvSteps  # valid rows recorded since the rollout began, over all environments
    memory: NDArray[np.float32]  # [B, S]: of the policy when the rollout began, or when it was finished; S = 0 without memory

    def __init__(self, schema: Sequence[ArraySpec], first: Frames) -> None:
        """Begin with the observations [B, *frame] of a reset; `schema` is that of `common.algorithms.payload`."""
        self._specs = {spec.name: spec for spec in schema}
        self.length: int = self._specs["action"].shape[0]
        self._num_envs = first.shape[0]
        self._size = self._specs["obs"].shape[0] - self.length
        self._returns = np.zeros(self._num_envs, np.float64)
        self._lengths = np.zeros(self._num_envs, np.int32)
        self._stacker = FrameStacker(first, self._size)
        state_size = self._specs[MEMORY].shape[-1] if MEMORY in self._specs else 0
        self.memory = np.zeros((self._num_envs, state_size), np.float32)
        self._begin(np.ones(self._num_envs, np.bool_))

    @property
    def observation(self) -> Frames:
        """The newest observation as the policy sees it, [B, *network_input_shape]: a view that `record` overwrites."""
        return self._stacker.observation

    def start(self, t: int) -> NDArray[np.bool_]:
        """Return [B]: whether o_t is the first observation of an episode."""
        start: NDArray[np.bool_] = self._start[t]
        return start

    def record(self, t: int, action: NDArray[Any], recorded: Mapping[str, NDArray[Any]], transition: Transition) -> None:
        """Write row t: `action` [B, ...] and the arrays [B] that the policy `recorded` on o_t, and the `transition`. Copies."""
        arrays = self._arrays
        arrays["action"][t] = action
        for name, values in recorded.items():
            arrays[name][t] = values
        arrays["reward"][t] = transition.reward
        arrays["terminated"][t] = transition.terminated | transition.life_lost
        arrays["truncated"][t] = transition.truncated
        arrays["valid"][t] = transition.valid
        self._start[t + 1] = transition.start
        self._frames[t + self._size] = transition.observation
        self._stacker.push(transition.observation, transition.start)
        if len(transition.final_index):
            self._parts["final_obs"].append(transition.final_observation.copy())
            self._parts["final_index"].append(transition.final_index + t * self._num_envs)
        self._account(t, transition)

    def finish(self, memory: NDArray[np.float32] | None = None) -> Arrays:
        """All arrays of the schema, after T rows. They are the caller's: nothing here writes to them again.

        `memory` [B, S] is that of a policy with memory after row T-1.
        """
        if memory is not None:
            self.memory = self._arrays[MEMORY][1] = memory
        for name, parts in self._parts.items():
            spec = self._specs[name]
            self._arrays[name] = np.concatenate([np.empty((0, *spec.shape[1:]), spec.dtype), *parts]).astype(spec.dtype)
        return self._arrays

    def begin_next(self) -> None:
        """Begin the next rollout with the newest observation of this one, and the images of its stack."""
        self._begin(self._start[-1])

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Return the state of a rollout without rows: observations, their earlier images, memory, running episodes."""
        start, frames = self._start[0].copy(), self._frames[: self._size].copy()
        episodes = {"returns": self._returns.copy(), "lengths": self._lengths.copy()}
        memory = {"memory": self.memory.copy()} if self.memory.size else {}
        return {"frames": frames, "start": start} | memory | episodes

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore `state_dict`. Raises `StateError`, and changes nothing, for arrays of another dtype or shape."""
        own = self.state_dict()
        if saved.keys() != own.keys():
            raise StateError("state of the rollout", found=sorted(saved), wanted=sorted(own))
        for name, current in own.items():
            check_like(f"state of the rollout: {name}", saved[name], current)
        first, *others = saved["frames"]
        self._stacker = FrameStacker(first, self._size)
        for frames in others:
            self._stacker.push(frames, np.zeros(self._num_envs, np.bool_))
        if self.memory.size:
            self.memory = np.array(saved["memory"])
        self._begin(saved["start"])
        self._returns[:], self._lengths[:] = saved["returns"], saved["lengths"]

    def _begin(self, start: NDArray[np.bool_]) -> None:
        fixed = [spec for spec in self._specs.values() if -1 not in spec.shape]
        self._arrays = {spec.name: np.empty(spec.shape, spec.dtype) for spec in fixed}
        self._frames, self._start = self._arrays["obs"], self._arrays["start"]
        self._frames[: self._size], self._start[0] = np.moveaxis(self._stacker.stacks, 1, 0), start
        if self.memory.size:
            self._arrays[MEMORY][0] = self.memory
        self._parts: dict[str, list[NDArray[Any]]] = {spec.name: [] for spec in self._specs.values() if -1 in spec.shape}
        self.env_steps = 0

    def _account(self, t: int, transition: Transition) -> None:
        """Add row t to the episodes under way; those that end in it are kept and begin at zero again."""
        self.env_steps += int(np.count_nonzero(transition.valid))
        self._returns += transition.reward  # 0 in rows that are not valid
        self._lengths += transition.valid
        ended = transition.terminated | transition.truncated
        if not transition.valid.all():  # of env workers, after missing rows: an episode that did not end is not reported
            self._returns[~transition.valid] = 0
            self._lengths[~transition.valid] = 0
        if ended.any():
            self._parts["episode_return"].append(self._returns[ended])
            self._parts["episode_length"].append(self._lengths[ended])
            self._parts[EPISODE_INDEX].append(np.flatnonzero(ended) + t * self._num_envs)
            self._returns[ended] = 0
            self._lengths[ended] = 0
