"""Stacks of frames from frames stored once: the one function by which the actor's network and the learner see them.

Axes: rows (time) first, then B environments; a frame is what `EnvSpec.observation_shape` says. S is the stack size.
Knows no environment, no rollout and no message, only arrays.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from common.errors import InternalError

Frames: TypeAlias = NDArray[Any]

_IMAGE_AXES = 4  # [rows, B, H, W]: a grey image, the one frame that has a stack axis even where S is 1


def stack(frames: Frames, start: NDArray[np.bool_], *, last: int | None = None, out: Frames | None = None) -> Frames:
    """Stacked observations of the newest rows, as a network sees them.

    Row t of the stacks holds the frames t..t+S-1, the newest in channel S-1 (Mnih et al. 2015, Methods, "preprocessing").
    Frames older than the last start of an episode within the window are zero, so that nothing is seen across a reset.

    Args:
        frames: [rows+S-1, B, *frame], any dtype: S-1 frames of context, zero where the first row's stack is to be zero,
            then one new frame a row. S is what its length says.
        start: [rows, B] bool, whether a row's new frame is the first of an episode.
        last: how many of the newest rows to build; all of them where None. An actor asks for one, from the same frames
            and starts as the learner, and so gets the same bytes.
        out: where to write the result; None for a new array.

    Returns:
        [last, B, S, *frame]; without the S axis where S is 1 and a frame is no grey image, as in
        `EnvSpec.network_input_shape`. Where S is 1 and `out` is None it is a view of `frames`.
    """
    rows = start.shape[0]
    size = frames.shape[0] - rows + 1
    if size < 1 or frames.shape[1:2] != start.shape[1:]:
        raise InternalError("frames and starts do not belong together", found=(frames.shape, start.shape))
    wanted = rows if last is None else last
    if size == 1:
        newest = frames[rows - wanted :, :, None] if frames.ndim == _IMAGE_AXES else frames[rows - wanted :]
        if out is None:
            return newest
        np.copyto(out, newest)
        return out
    if out is None:
        out = np.empty((wanted, frames.shape[1], size, *frames.shape[2:]), frames.dtype)
    first = rows - wanted
    for channel in range(size):
        out[:, :, channel] = frames[first + channel : rows + channel]
    _cut(out, start, first)
    return out


def context(frames: Frames, start: NDArray[np.bool_]) -> Frames:
    """The S-1 frames that go before the newest one when a next rollout begins with it.

    Args:
        frames: [rows+S-1, B, *frame] of the rollout that ends, as in `stack`.
        start: [rows, B] bool.

    Returns:
        [S-1, B, *frame], a copy, zero where the stack of the newest row is zero.
    """
    size = frames.shape[0] - start.shape[0] + 1
    if size == 1:
        return frames[:0].copy()
    return np.ascontiguousarray(np.moveaxis(stack(frames, start, last=1)[0, :, :-1], 1, 0))


def _cut(stacks: Frames, start: NDArray[np.bool_], first: int) -> None:
    """Zero what is older than a start: [n, B, S, ...], rows `first`.. of `start`. Costs nothing where nothing started."""
    older = stacks.shape[2] - 1
    seen_from = max(0, first - older + 1)  # a start further back has left every window
    row, env = np.nonzero(start[seen_from:])
    row += seen_from - first
    for age in range(older if row.size else 0):  # `age` rows after the start, age+1 frames are of the new episode
        inside = (row + age >= 0) & (row + age < stacks.shape[0])
        stacks[row[inside] + age, env[inside], : older - age] = 0
