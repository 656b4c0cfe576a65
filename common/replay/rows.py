"""The rows of a trajectory message, environment by environment, in the form that the replay memory stores.

Both autoreset modes give the same form, that of `next_step`: each frame is followed by the one the action led
to, and after an episode's last frame comes an invalid row, then the first frame of the next episode.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.protocol.messages import Arrays


class EnvironmentRows(NamedTuple):
    """R rows of one environment; row r is the action on frame r, which led to frame r+1."""

    context: NDArray[Any]  # [S-1, *frame]: the older frames of the stack of frame 0
    frames: NDArray[Any]  # [R+1, *frame]
    start: NDArray[np.bool_]  # [R+1]: the frame is the first of an episode
    action: NDArray[Any]  # [R, *A]
    reward: NDArray[np.float32]  # [R]
    terminated: NDArray[np.bool_]  # [R]
    ended: NDArray[np.bool_]  # [R]: terminated or truncated
    valid: NDArray[np.bool_]  # [R]: an env step that frame r+1 followed, or that terminated

    @property
    def rows(self) -> int:
        """R, reset rows included."""
        return len(self.reward)


def rows_by_environment(arrays: Arrays) -> Iterator[EnvironmentRows]:
    """Rows of environments b = 0..B-1 of a trajectory that was checked (see `common.algorithms.payload`)."""
    length, num_envs = arrays["reward"].shape
    older = len(arrays["obs"]) - length - 1
    last_row, last_env = np.divmod(arrays["final_index"], num_envs)
    ended = arrays["terminated"] | arrays["truncated"]
    for b in range(num_envs):
        rows = EnvironmentRows(
            context=arrays["obs"][:older, b],
            frames=arrays["obs"][older:, b],
            start=arrays["start"][:, b],
            action=arrays["action"][:, b],
            reward=arrays["reward"][:, b],
            terminated=arrays["terminated"][:, b],
            ended=ended[:, b],
            valid=arrays["valid"][:, b],
        )
        mine = np.flatnonzero(last_env == b)
        if mine.size:
            rows = _unfold(rows, last_row[mine], arrays["final_obs"][mine])
        # A start without an end before it cuts a window too: the frame before it is of another episode.
        yield rows._replace(valid=rows.valid & (rows.terminated | ~rows.start[1:]))


def _unfold(rows: EnvironmentRows, ends: NDArray[np.int32], final: NDArray[Any]) -> EnvironmentRows:
    """Insert the last frame of each episode that ended at rows `ends`, which same_step autoreset sends separately."""
    ends, which = np.unique(ends, return_index=True)
    here = rows.ended[ends] & rows.start[ends + 1]
    after, final = ends[here] + 1, final[which[here]]
    names = ("start", "action", "reward", "terminated", "ended", "valid")
    blank = {name: np.insert(getattr(rows, name), after, 0, axis=0) for name in names}
    return rows._replace(frames=np.insert(rows.frames, after, final, axis=0), **blank)
