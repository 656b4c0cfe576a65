"""A trajectory message, environment by environment, as the memory keeps it.

Whatever autoreset mode recorded it, a column reads like `next_step`: each frame is followed by the one the action led
to, and after an episode's last frame comes a row that is not valid, then the first frame of the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.wire.messages import Arrays


class Column(NamedTuple):
    """R rows of one environment; row r is the action on frame r, which led to frame r+1."""

    context: NDArray[Any]  # [S-1, *frame]: what the stack of frame 0 shows beside it
    frames: NDArray[Any]  # [R+1, *frame]
    start: NDArray[np.bool_]  # [R+1]: the frame is the first of an episode
    action: NDArray[Any]  # [R, *A]
    reward: NDArray[np.float32]  # [R]
    terminated: NDArray[np.bool_]  # [R]
    ended: NDArray[np.bool_]  # [R]: terminated or truncated
    valid: NDArray[np.bool_]  # [R]: an env step, whose frame r+1 is what followed, or does not count
    error: NDArray[np.float32]  # [R]: the actor's |delta|, NaN where it sent none

    @property
    def rows(self) -> int:
        """R, reset rows included."""
        return len(self.reward)


def columns(arrays: Arrays, error: NDArray[np.float32] | None) -> Iterator[Column]:
    """Columns b = 0..B-1 of a trajectory that was checked (see `common.algorithms.trajectory`); `error` is [T, B]."""
    length, num_envs = arrays["reward"].shape
    older = len(arrays["obs"]) - length - 1
    if error is None:
        error = np.full((length, num_envs), np.nan, np.float32)
    last_row, last_env = np.divmod(arrays["final_index"], num_envs)
    ended = arrays["terminated"] | arrays["truncated"]
    for b in range(num_envs):
        column = Column(
            context=arrays["obs"][:older, b],
            frames=arrays["obs"][older:, b],
            start=arrays["start"][:, b],
            action=arrays["action"][:, b],
            reward=arrays["reward"][:, b],
            terminated=arrays["terminated"][:, b],
            ended=ended[:, b],
            valid=arrays["valid"][:, b],
            error=error[:, b],
        )
        mine = np.flatnonzero(last_env == b)
        if mine.size:
            column = _unfold(column, last_row[mine], arrays["final_obs"][mine])
        # A start that no end explains cuts as well: what it follows is not its cause.
        yield column._replace(valid=column.valid & (column.terminated | ~column.start[1:]))


def _unfold(column: Column, rows: NDArray[np.int32], final: NDArray[Any]) -> Column:
    """Put the last frame of each episode that ended in `rows`, which same_step autoreset sends apart, in its place."""
    rows, which = np.unique(rows, return_index=True)
    here = column.ended[rows] & column.start[rows + 1]
    after, final = rows[here] + 1, final[which[here]]
    return Column(
        context=column.context,
        frames=np.insert(column.frames, after, final, axis=0),
        start=np.insert(column.start, after, False),
        action=np.insert(column.action, after, 0, axis=0),
        reward=np.insert(column.reward, after, 0),
        terminated=np.insert(column.terminated, after, False),
        ended=np.insert(column.ended, after, False),
        valid=np.insert(column.valid, after, False),
        error=np.insert(column.error, after, np.nan),
    )
