"""Spaces of gymnasium as the project has them: shape and dtype of an observation, spec of an action, and the casts of both.

A batch of observations passes through the cast each env step, so a cast is a view wherever it can be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from gymnasium.spaces import Box, Discrete, Space
from numpy.typing import NDArray

from common.envs.spec import ActionSpec
from common.errors import ConfigError

Array: TypeAlias = NDArray[Any]

_RANKS = (1, 2, 3)
_IMAGE_RANKS = (2, 3)
_LEAST_SIDE = 6  # of an image of floats with channels
_LEAST_PLANE = 16  # of an image of floats without: smaller ones are tables
_WRAP = "wrap it in a function of your own, env.entry_point"


def describe_observation(space: Space[Any]) -> tuple[tuple[int, ...], str, Callable[[Array], Array]]:
    """Return shape, dtype and cast of an observation.

    An image has the shape [H, W] or [channels, H, W], in bytes or in float32; other observations are vectors of float32.
    """
    if not isinstance(space, Box) or len(space.shape) not in _RANKS:
        raise ConfigError("observation space not supported", found=space, wanted="a Box of 1 to 3 axes", fix=_WRAP)
    channels_last = len(space.shape) == 3 and space.shape[-1] < space.shape[0]  # noqa: PLR2004 - they are the shorter of the outer axes
    shape = (space.shape[-1], *space.shape[:-1]) if channels_last else space.shape
    if not _is_image(shape, space.dtype):
        size = int(np.prod(space.shape))
        return (size,), "float32", lambda batch: batch.reshape(-1, size).astype(np.float32, copy=False)
    one_channel = len(shape) == 3 and shape[0] == 1  # noqa: PLR2004 - a grey image
    shape = shape[1:] if one_channel else shape

    def planes(batch: Array) -> Array:
        moved = np.moveaxis(batch, -1, 1) if channels_last else batch
        return moved[:, 0] if one_channel else moved

    if space.dtype == np.uint8:
        return shape, "uint8", planes
    largest = max(float(np.abs(bound).max()) for bound in (space.low, space.high))
    divisor = np.float32(largest if 1.0 < largest < np.inf else 1.0)  # as bytes are: 0 to 255 becomes 0 to 1
    return shape, "float32", lambda batch: planes(batch).astype(np.float32) / divisor


def _is_image(shape: tuple[int, ...], dtype: np.dtype[Any] | None) -> bool:
    """Return whether an array [H, W] or [channels, H, W] is an image: bytes are, other numbers from a certain size on."""
    if len(shape) not in _IMAGE_RANKS:
        return False
    return dtype == np.uint8 or min(shape[-2:]) >= (_LEAST_PLANE if len(shape) == 2 else _LEAST_SIDE)  # noqa: PLR2004 - a plane


def cropped(
    shape: tuple[int, ...], observed: Callable[[Array], Array], crop: tuple[int, int]
) -> tuple[tuple[int, ...], Callable[[Array], Array]]:
    """Return shape and cast of an image without `crop` rows at top and bottom: a view, so that nothing is copied here."""
    height, width = shape
    rows = slice(crop[0], height - crop[1])
    return (height - sum(crop), width), lambda batch: observed(batch)[:, rows]


def describe_action(space: Space[Any]) -> tuple[ActionSpec, Callable[[Array], Array]]:
    """Return the spec of an action, and the function that converts it to the environment's own."""
    if isinstance(space, Discrete):
        first = int(space.start)
        return ActionSpec(n=int(space.n), shape=()), (lambda action: action + first) if first else (lambda action: action)
    if isinstance(space, Box) and len(space.shape) == 1 and space.dtype.kind == "f" and space.is_bounded():
        low, high, dtype = space.low, space.high, space.dtype
        bounds = {"low": tuple(map(float, low)), "high": tuple(map(float, high))}
        return ActionSpec(n=0, shape=space.shape, **bounds), lambda action: np.clip(action, low, high).astype(dtype, copy=False)
    raise ConfigError(
        "action space not supported", found=space, wanted="Discrete, or a float Box of 1 axis with finite bounds", fix=_WRAP
    )
