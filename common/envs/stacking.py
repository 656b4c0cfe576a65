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


def stack(frames: Frames, start: NDArray[np.bool_]) -> Frames:
    """Return the stacked observations of all rows, the input of a network.

    Row t of the stacks holds the frames t..t+S-1, the newest in channel S-1 (Mnih et al. 2015, Methods, "preprocessing").
    Frames older than the last start of an episode within the window are zero, so that nothing is seen across a reset.

    Args:
        frames: [rows+S-1, B, *frame], any dtype: S-1 frames of context, zero where the first row's stack is to be zero,
            then one new frame a row. S follows from its length.
        start: [rows, B] bool, whether a row's new frame is the first of an episode.

    Returns:
        [rows, B, S, *frame]; without the S axis where S is 1 and a frame is no grey image, as in
        `EnvSpec.network_input_shape`. Where S is 1 it is a view of `frames`.
    """
    rows = start.shape[0]
    size = frames.shape[0] - rows + 1
    if size < 1 or frames.shape[1:2] != start.shape[1:]:
        raise InternalError("frames and starts do not belong together", found=(frames.shape, start.shape))
    if size == 1:
        return frames[:, :, None] if frames.ndim == _IMAGE_AXES else frames
    stacks = np.empty((rows, frames.shape[1], size, *frames.shape[2:]), frames.dtype)
    for channel in range(size):
        stacks[:, :, channel] = frames[channel : rows + channel]
    _cut(stacks, start)
    return stacks


class FrameStacker:
    """The stacks of B environments, step by step: the newest row of `stack`, the same bytes, without the rows before.

    One thread uses it.
    """

    def __init__(self, frames: Frames, size: int) -> None:
        """Begin with the first frames [B, *frame] of B episodes; `size` is S."""
        self.stacks = np.zeros((len(frames), size, *frames.shape[1:]), frames.dtype)  # [B, S, *frame], the newest frame last
        self.stacks[:, -1] = frames
        self._without_axis = size == 1 and frames.ndim != _IMAGE_AXES - 1

    @property
    def observation(self) -> Frames:
        """The input of a network, [B, *EnvSpec.network_input_shape]: a view that the next `push` overwrites."""
        return self.stacks[:, 0] if self._without_axis else self.stacks

    def push(self, frames: Frames, start: NDArray[np.bool_]) -> None:
        """Add the frames [B, *frame] of one step; `start` [B] marks those that are the first of an episode."""
        self.stacks[:, :-1] = self.stacks[:, 1:]
        self.stacks[start] = 0
        self.stacks[:, -1] = frames


def _cut(stacks: Frames, start: NDArray[np.bool_]) -> None:
    """Zero the frames that are older than a start: [rows, B, S, ...]. Free where nothing started."""
    older = stacks.shape[2] - 1
    row, env = np.nonzero(start)
    for age in range(older if row.size else 0):  # `age` rows after the start, age+1 frames are of the new episode
        inside = row + age < stacks.shape[0]
        stacks[row[inside] + age, env[inside], : older - age] = 0
