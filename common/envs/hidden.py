"""Environments whose newest observation does not say what to do, for presets of policies with memory: see `env.entry_point`."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.wrappers import TransformObservation
from numpy.typing import NDArray

_FORWARD, _LEFT, _RIGHT = range(3)
_STAYED = -0.1  # reward of an env step that changed nothing, as in the paper


class TMaze(gymnasium.Env[NDArray[np.float32], np.int64]):
    """The T-maze of Bakker 2002 ("Reinforcement learning with long short-term memory"): a cue, a corridor, and a turn at its end.

    Observation [2] float32: the cue, which is 1 or -1 in the first observation of an episode and 0 afterwards, and whether the
    junction is reached. Actions: forward, left, right; where there is a wall they change nothing, and cost 0.1. A turn at the
    junction ends the episode: the reward is 1 to the left after cue -1 and to the right after cue 1. Walking earns 0, so that a
    mean return is at most the share of right turns. Without memory that is one half.
    """

    def __init__(self, *, length: int = 20, limit: int = 100) -> None:
        """Args: `length` of the corridor in steps forward; `limit` in env steps, after which an episode is truncated."""
        self.observation_space = Box(-1, 1, (2,), np.float32)
        self.action_space = Discrete(3)
        self._length, self._limit = length, limit
        self._cue, self._place, self._age = 0, 0, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Begin at the start of the corridor, with a cue drawn anew."""
        super().reset(seed=seed, options=options)
        self._cue, self._place, self._age = 2 * int(self.np_random.integers(2)) - 1, 0, 0
        return np.array([self._cue, 0], np.float32), {}

    def step(self, action: np.int64) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Walk or turn."""
        turned = bool(self._place == self._length and action != _FORWARD)
        right = turned and action == (_RIGHT if self._cue > 0 else _LEFT)
        walked = bool(action == _FORWARD and self._place < self._length)
        self._age += 1
        self._place += walked
        seen = np.array([0, self._place == self._length], np.float32)
        return seen, float(right) if turned or walked else _STAYED, turned, self._age >= self._limit and not turned, {}


def cartpole(render_mode: str | None = None) -> gymnasium.Env[NDArray[np.float32], np.int64]:
    """Return CartPole-v1 without velocities: the observation [2] float32 is the place of the cart and the angle of the pole."""
    env = gymnasium.make("CartPole-v1", render_mode=render_mode)
    space = env.observation_space
    assert isinstance(space, Box)
    return TransformObservation(env, lambda observation: observation[::2], Box(space.low[::2], space.high[::2], dtype=np.float32))
