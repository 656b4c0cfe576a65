"""Stacks of images from images stored once: one function for the actor's network and the learner.

Axes: rows (time) first, then B environments; `frame` is the shape of one image, `EnvSpec.observation_shape`. S is the stack size.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from common.errors import InternalError

Frames: TypeAlias = NDArray[Any]

_IMAGE_AXES = 4  # [rows, B, H, W]: a grey image, the one frame that has a stack axis even where S is 1


def stack(frames: Frames, start: NDArray[np.bool_], *, last: int | None = None, out: Frames | None = None) -> Frames:
    """Return stacked observations of the newest rows, the input of a network.

    Row t of the stacks holds the frames t..t+S-1, the newest in channel S-1 (Mnih et al. 2015, Methods, "preprocessing").
    Frames older than the last start of an episode within the window are zero, so that nothing is seen across a reset.

    Args:
        frames: [rows+S-1, B, *frame], any dtype: S-1 frames of context, zero where the first row's stack is to be zero,
            then one new frame a row. S follows from its length.
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
    """Return the S-1 frames before the newest one, with which the next rollout begins.

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


class FrameStacker:
    """The stacks of B environments, step by step: the newest row of `stack`, without the rows before. One thread uses it."""

    def __init__(self, frames: Frames, size: int) -> None:
        """Begin with the first frames [B, *frame] of B episodes; `size` is S."""
        self._stacks = np.zeros((len(frames), size, *frames.shape[1:]), frames.dtype)
        self._stacks[:, -1] = frames
        self._without_axis = size == 1 and frames.ndim != _IMAGE_AXES - 1

    @property
    def observation(self) -> Frames:
        """The input of a network, [B, *EnvSpec.network_input_shape]: a view that the next `push` overwrites."""
        return self._stacks[:, 0] if self._without_axis else self._stacks

    def push(self, frames: Frames, start: NDArray[np.bool_]) -> None:
        """Add the frames [B, *frame] of one step; `start` [B] marks those that are the first of an episode."""
        self._stacks[:, :-1] = self._stacks[:, 1:]
        self._stacks[start] = 0
        self._stacks[:, -1] = frames


def _cut(stacks: Frames, start: NDArray[np.bool_], first: int) -> None:
    """Zero the frames that are older than a start: [n, B, S, ...], rows `first`.. of `start`. Free where nothing started."""
    older = stacks.shape[2] - 1
    seen_from = max(0, first - older + 1)  # a start further back has left every window
    row, env = np.nonzero(start[seen_from:])
    row += seen_from - first
    for age in range(older if row.size else 0):  # `age` rows after the start, age+1 frames are of the new episode
        inside = (row + age >= 0) & (row + age < stacks.shape[0])
        stacks[row[inside] + age, env[inside], : older - age] = 0
