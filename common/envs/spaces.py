"""Spaces of gymnasium become the leaves of an observation and the spec of an action, with the casts of both.

A batch of observations passes through its casts each env step, so a cast is a view wherever it can be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, reduce
from operator import getitem
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
    """A leaf, the function that casts a batch of its values, and their keys and shape in an observation of gymnasium."""

    leaf: Leaf
    cast: Callable[[Any], Array]  # from [B, *shape]
    keys: tuple[Any, ...]
    shape: tuple[int, ...]


def describe_observation(space: Space[Any], chosen: Sequence[str] = ()) -> list[DescribedLeaf]:
    """Return the leaves of an observation, those of Dict and Tuple in gymnasium's order. Raises `ConfigError` for other spaces.

    Of several, only those of the paths `chosen`, with all inside them; none chosen: all. An image has the shape [H, W] or
    [channels, H, W], in bytes of 0 to 255 or in float32; a discrete leaf is a vector of int32 with the number of choices of each
    component; others are vectors of float32.
    """
    inside = list(leaf_spaces(space))
    paths = [path for path, _, _ in inside]
    if len(set(paths)) < max(1, len(paths)):
        raise ConfigError("observation space has leaves of one path", found=paths, wanted="at least one, of different paths")
    if unknown := [name for name in chosen if not any(_lies_in(path, (name,)) for path in paths)]:
        wanted = f"some of {', '.join(paths)}" if any(paths) else "nothing for an observation of one array"
        raise ConfigError("env.leaves names what the observation does not have", found=unknown, wanted=wanted)
    return [
        DescribedLeaf(*_describe_leaf(inner, path), keys, inner.shape or ())
        for path, keys, inner in inside
        if not chosen or _lies_in(path, chosen)
    ]


def leaf_spaces(
    space: Space[Any], path: str = "", keys: tuple[Any, ...] = ()
) -> Iterator[tuple[str, tuple[Any, ...], Space[Any]]]:
    """Yield path, keys and indices, and space of each array of an observation."""
    if not isinstance(space, Dict | Tuple):
        yield path, keys, space
        return
    for key, inner in space.spaces.items() if isinstance(space, Dict) else enumerate(space.spaces):
        yield from leaf_spaces(inner, f"{path}/{key}".lstrip("/"), (*keys, key))


def require_integers(name: str, space: Space[Any], observations: Iterable[Any]) -> None:
    """Raise `ConfigError` for an integer beyond the dtype of its space: gymnasium's cast, when it joins rows, wraps it around."""
    for path, keys, inner in leaf_spaces(space):
        for seen in observations if inner.dtype is not None and inner.dtype.kind in "iu" else ():
            array = np.asarray(reduce(getitem, keys, seen))
            if array.dtype.kind in "iu" and (beyond := array != array.astype(inner.dtype)).any():
                raise outside_space(name, path, array[beyond][0], wanted=f"integers of {inner.dtype}")


def outside_space(name: str, path: str, found: object, *, wanted: str) -> ConfigError:
    """Return the error for observations of an environment that differ from its space at `path`."""
    fact = f"{name} returns observations outside its observation space"
    return ConfigError(fact, found=f"{path} {found}".strip(), wanted=wanted, fix="correct the environment")


def _lies_in(path: str, chosen: Sequence[str]) -> bool:
    return any(path == name or path.startswith(f"{name}/") for name in chosen)


def _describe_leaf(space: Space[Any], path: str) -> tuple[Leaf, Callable[[Any], Array]]:
    if isinstance(space, Discrete | MultiDiscrete | MultiBinary):
        choices, start = _choices(space)
        size = len(choices)
        leaf = Leaf(path=path, shape=(size,), dtype="int32", choices=choices)
        return leaf, lambda batch: (batch - start).reshape(-1, size).astype(np.int32)
    if not isinstance(space, Box):
        wanted = "a Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of them"
        fix = f"choose others with env.leaves, or {_WRAP}" if path else _WRAP
        raise ConfigError(f"observation space {path}".strip() + " not supported", found=space, wanted=wanted, fix=fix)
    if 0 in space.shape:
        fix = "choose others with env.leaves" if path else _WRAP
        raise ConfigError(f"observation space {path}".strip() + " is empty", found=space, wanted="at least one number", fix=fix)
    if space.dtype == np.uint8 and len(space.shape) > max(_IMAGE_RANKS):
        fact, wanted = f"observation space {path}".strip() + " is neither an image nor a vector", "at most three axes of bytes"
        fix = f"leave out a wrapper that stacks images, and set env.frame_stack; for other arrays, {_WRAP}, that flattens it"
        fix = f"choose others with env.leaves, or {fix}" if path else fix
        raise ConfigError(fact, found=space, wanted=wanted, fix=fix)
    channels_last = len(space.shape) == 3 and _channels_last(*space.shape)  # noqa: PLR2004 - an image
    shape = (space.shape[-1], *space.shape[:-1]) if channels_last else space.shape
    if not _is_image(shape, space.dtype):
        size = int(np.prod(space.shape))
        leaf = Leaf(path=path, shape=(size,), dtype="float32")
        return leaf, lambda batch: batch.reshape(-1, size).astype(np.float32, copy=False)
    one_channel = len(shape) == 3 and shape[0] == 1  # noqa: PLR2004 - a grey image
    shape = shape[1:] if one_channel else shape

    def planes(batch: Array) -> Array:
        moved = np.moveaxis(batch, -1, 1) if channels_last else batch
        return moved[:, 0] if one_channel else moved

    largest = max(float(np.abs(bound.astype(np.float64)).max()) for bound in (space.low, space.high))
    if space.dtype == np.uint8 and largest == np.iinfo(np.uint8).max:  # planes of 0 and 1 are numbers as others are
        return Leaf(path=path, shape=shape, dtype="uint8"), planes
    # As bytes are: 0 to 255 becomes 0 to 1. The largest number of the dtype is no bound.
    divisor = np.float32(largest if 1.0 < largest < _largest(space.dtype) else 1.0)
    leaf = Leaf(path=path, shape=shape, dtype="float32")
    return leaf, lambda batch: planes(batch).astype(np.float32) / divisor


def _channels_last(first: int, middle: int, last: int) -> bool:
    """Return whether the last of three axes are the channels: 1 or 3, beside a square plane, or the shorter of the outer two."""
    if last in {1, 3} and last < first:
        return True
    if (first == middle) != (middle == last):
        return first == middle
    return last < first


def _largest(dtype: np.dtype[Any]) -> float:
    """Return the largest number of a dtype; infinity where it may be a bound that is meant, as 65,535 of a depth camera.

    Of float64 it is that of float32, which all numbers become.
    """
    if dtype.kind == "f":
        return float(min(np.finfo(dtype).max, np.finfo(np.float32).max))
    return float(np.iinfo(dtype).max) if dtype.itemsize > 2 else math.inf  # noqa: PLR2004 - bytes


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


def _bounds(bounds: NDArray[Any]) -> tuple[float, ...]:
    """Return one bound of each component; the largest number of the dtype is none."""
    none = np.abs(bounds) >= _largest(bounds.dtype)
    return tuple(np.where(none, np.copysign(np.inf, bounds), bounds).astype(float).tolist())


def _from_zero(action: Array, *, shape: tuple[int, ...], start: Any, dtype: Any) -> Array:
    taken: Array = (action.reshape(shape) + start).astype(dtype, copy=False)
    return taken


def _clipped(action: Array, *, shape: tuple[int, ...], low: Array, high: Array, dtype: Any) -> Array:
    return np.clip(action, low, high).astype(dtype, copy=False).reshape(shape)


def describe_action(space: Space[Any]) -> tuple[ActionSpec, Callable[[Array], Array]]:
    """Return the spec of an action, and the function that converts it to the environment's own."""
    shape, dtype = (-1, *(space.shape or ())), space.dtype
    if isinstance(space, Discrete | MultiDiscrete | MultiBinary):
        choices, start = _choices(space)
        action = ActionSpec(choices=choices, shape=() if isinstance(space, Discrete) else (len(choices),))
        return action, partial(_from_zero, shape=shape, start=start, dtype=dtype)
    if isinstance(space, Box) and space.dtype.kind == "f":
        low, high = space.low.ravel(), space.high.ravel()
        action = ActionSpec(shape=low.shape, low=_bounds(low), high=_bounds(high))
        return action, partial(_clipped, shape=shape, low=low, high=high, dtype=dtype)
    wanted = "Discrete, MultiDiscrete, MultiBinary, or a Box of floats"
    raise ConfigError("action space not supported", found=space, wanted=wanted, fix=_WRAP)
