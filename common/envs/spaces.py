"""Spaces of gymnasium become the leaves of an observation and the spec of an action, with the casts of both.

A batch of observations passes through its casts each env step, so a cast is a view wherever it can be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple
from numpy.typing import NDArray

from common.envs.spec import ActionSpec, Leaf
from common.errors import ConfigError

Array: TypeAlias = NDArray[Any]

_IMAGE_RANKS = (2, 3)
_LEAST_SIDE = 6  # of an image of floats with channels
_LEAST_PLANE = 16  # of an image of floats without: smaller ones are tables
_WRAP = "wrap it in a function of your own, env.entry_point"


class DescribedLeaf(NamedTuple):
    """A leaf, and the function that takes its values [B, *shape] out of a batch of observations as gymnasium makes it."""

    leaf: Leaf
    cast: Callable[[Any], Array]


def describe_observation(space: Space[Any], path: str = "") -> list[DescribedLeaf]:
    """Return the leaves of an observation, those of Dict and Tuple in gymnasium's order. Raises `ConfigError` for other spaces.

    An image has the shape [H, W] or [channels, H, W], in bytes or in float32; a discrete leaf is a vector of int32
    with the number of choices of each component; others are vectors of float32.
    """
    if not isinstance(space, Dict | Tuple):
        return [_describe_leaf(space, path)]
    inside = space.spaces.items() if isinstance(space, Dict) else enumerate(space.spaces)
    found = [
        DescribedLeaf(leaf, partial(_cast_inside, key, cast))
        for key, inner in inside
        for leaf, cast in describe_observation(inner, f"{path}/{key}".lstrip("/"))
    ]
    if len({leaf.path for leaf, _ in found}) < max(1, len(found)):
        paths = sorted(leaf.path for leaf, _ in found)
        raise ConfigError("observation space has leaves of one path", found=paths, wanted="at least one, of different paths")
    return found


def _cast_inside(key: Any, cast: Callable[[Any], Array], batch: Any) -> Array:
    return cast(batch[key])


def _describe_leaf(space: Space[Any], path: str) -> DescribedLeaf:
    if isinstance(space, Discrete | MultiDiscrete | MultiBinary):
        choices, start = _choices(space)
        size = len(choices)
        leaf = Leaf(path=path, shape=(size,), dtype="int32", choices=choices)
        return DescribedLeaf(leaf, lambda batch: (batch - start).reshape(-1, size).astype(np.int32))
    if not isinstance(space, Box):
        wanted = "a Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of them"
        raise ConfigError(f"observation space {path}".strip() + " not supported", found=space, wanted=wanted, fix=_WRAP)
    channels_last = len(space.shape) == 3 and space.shape[-1] < space.shape[0]  # noqa: PLR2004 - they are the shorter of the outer axes
    shape = (space.shape[-1], *space.shape[:-1]) if channels_last else space.shape
    if not _is_image(shape, space.dtype):
        size = int(np.prod(space.shape))
        leaf = Leaf(path=path, shape=(size,), dtype="float32")
        return DescribedLeaf(leaf, lambda batch: batch.reshape(-1, size).astype(np.float32, copy=False))
    one_channel = len(shape) == 3 and shape[0] == 1  # noqa: PLR2004 - a grey image
    shape = shape[1:] if one_channel else shape

    def planes(batch: Array) -> Array:
        moved = np.moveaxis(batch, -1, 1) if channels_last else batch
        return moved[:, 0] if one_channel else moved

    if space.dtype == np.uint8:
        return DescribedLeaf(Leaf(path=path, shape=shape, dtype="uint8"), planes)
    largest = max(float(np.abs(bound).max()) for bound in (space.low, space.high))
    divisor = np.float32(largest if 1.0 < largest < np.inf else 1.0)  # as bytes are: 0 to 255 becomes 0 to 1
    leaf = Leaf(path=path, shape=shape, dtype="float32")
    return DescribedLeaf(leaf, lambda batch: planes(batch).astype(np.float32) / divisor)


def _choices(space: Discrete[Any] | MultiDiscrete[Any] | MultiBinary) -> tuple[tuple[int, ...], Array]:
    """Return the number of choices of each component of a space, and the first choice of each, in the shape of the space."""
    if isinstance(space, MultiDiscrete):
        return tuple(map(int, space.nvec.ravel())), space.start
    if isinstance(space, Discrete):
        return (int(space.n),), np.asarray(space.start)
    return (2,) * int(np.prod(space.shape)), np.zeros((), np.int64)


def _is_image(shape: Sequence[int], dtype: np.dtype[Any] | None) -> bool:
    """Return whether an array [H, W] or [channels, H, W] is an image: bytes are, other numbers from a certain size on."""
    if len(shape) not in _IMAGE_RANKS:
        return False
    return dtype == np.uint8 or min(shape[-2:]) >= (_LEAST_PLANE if len(shape) == 2 else _LEAST_SIDE)  # noqa: PLR2004 - a plane


def describe_action(space: Space[Any]) -> tuple[ActionSpec, Callable[[Array], Array]]:
    """Return the spec of an action, and the function that converts it to the environment's own."""
    shape, dtype = (-1, *(space.shape or ())), space.dtype
    if isinstance(space, Discrete | MultiDiscrete | MultiBinary):
        choices, start = _choices(space)
        action = ActionSpec(choices=choices, shape=() if isinstance(space, Discrete) else (len(choices),))
        return action, lambda action: (action.reshape(shape) + start).astype(dtype, copy=False)
    if isinstance(space, Box) and space.dtype.kind == "f":
        low, high = space.low.ravel(), space.high.ravel()
        action = ActionSpec(shape=low.shape, low=tuple(map(float, low)), high=tuple(map(float, high)))
        return action, lambda action: np.clip(action, low, high).astype(dtype, copy=False).reshape(shape)
    wanted = "Discrete, MultiDiscrete, MultiBinary, or a Box of floats"
    raise ConfigError("action space not supported", found=space, wanted=wanted, fix=_WRAP)
