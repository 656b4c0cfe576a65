"""Observations of several arrays, joined to one array of bytes: so rollouts, messages, stacks and replay memories hold one array.

The leaves of an `EnvSpec` lie one behind the other in the bytes of a frame, in their order, without gaps, row-major and
little-endian. An observation of one array is never joined: functions here return it as it is, with the path "".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from common.envs.spec import EnvSpec, Leaf
from common.errors import DropReason, ProtocolError
from common.protocol.content import check_numbers
from common.protocol.limits import OBSERVATION_MAX

Array: TypeAlias = NDArray[Any]


class LeafValues(NamedTuple):
    """The values [..., *shape] of one leaf, of any number of observations, and its choices where it is discrete."""

    path: str
    values: Array
    choices: tuple[int, ...]


@cache  # a run has one, and an env step needs it
def joined_dtype(leaves: tuple[Leaf, ...]) -> np.dtype[Any]:
    """Return the dtype of a joined observation, with one field for each leaf, named by its index."""
    return np.dtype([(str(index), np.dtype(leaf.dtype).newbyteorder("<"), leaf.shape) for index, leaf in enumerate(leaves)])


def join(leaves: tuple[Leaf, ...], arrays: Sequence[Array]) -> Array:
    """Return the joined observations [N, bytes] uint8 of the `arrays` [N, *shape] of all leaves."""
    joined = np.empty(len(arrays[0]), joined_dtype(leaves))
    for index, array in enumerate(arrays):
        joined[str(index)] = array
    return joined.view(np.uint8).reshape(len(joined), -1)


def split(env: EnvSpec, observation: Array) -> list[LeafValues]:
    """Return the leaves of observations [..., *frame] as views of them, the mask last."""
    if not env.leaves:
        return [LeafValues("", observation, env.observation_choices)]
    joined = np.ascontiguousarray(observation).view(joined_dtype(env.leaves))[..., 0]
    return [LeafValues(leaf.path, joined[str(index)], leaf.choices) for index, leaf in enumerate(env.leaves)]


def inputs_of(env: EnvSpec, observation: Array) -> dict[str, Array]:
    """Return the arrays `EnvSpec.inputs` [N, *shape] by path, of network inputs [N, (S,) bytes]: of a mask the newest."""
    values = [leaf.values for leaf in split(env, observation)]
    if env.action_mask and env.frame_stack > 1:
        values[-1] = values[-1][:, -1]
    return {leaf.path: np.array(array).reshape(-1, *leaf.shape) for leaf, array in zip(env.inputs, values, strict=True)}


def join_inputs(env: EnvSpec, inputs: Sequence[Array]) -> Array:
    """Inverse of `inputs_of`, for the arrays [N, *shape] in the order of `EnvSpec.inputs`; one array alone is returned."""
    if not env.leaves:
        return inputs[0]
    stacked = () if env.frame_stack == 1 else (env.frame_stack,)
    joined = np.empty((len(inputs[0]), *stacked), joined_dtype(env.leaves))
    for index, (leaf, array) in enumerate(zip(env.leaves, inputs, strict=True)):
        once = stacked and env.action_mask and index == len(env.leaves) - 1
        joined[str(index)] = array[:, np.newaxis] if once else array.reshape(*joined.shape, *leaf.shape)
    return joined[..., np.newaxis].view(np.uint8)


def action_mask(env: EnvSpec, observation: Array) -> NDArray[np.bool_]:
    """Return the allowed actions [..., sum of their choices] in joined observations [..., bytes]."""
    mask: NDArray[np.bool_] = split(env, observation)[-1].values != 0
    return mask


def vectors(env: EnvSpec, observation: Array) -> Array:
    """Return the vectors in observations [N, *frame], joined: [N, D] float32; the frames where they are one array."""
    if not env.leaves:
        return observation
    seen = zip(env.parts, split(env, observation), strict=False)
    found = [leaf.values.reshape(len(observation), math.prod(part.observation_shape)) for part, leaf in seen if part.is_vector]
    return np.concatenate(found or [np.empty((len(observation), 0), np.float32)], axis=1)


def components_allowed(choices: Sequence[int], mask: Array) -> NDArray[np.bool_]:
    """Return [N, K]: whether masks [N, sum of choices] allow a choice of each of the K components of an action."""
    return np.logical_or.reduceat(mask != 0, np.cumsum((0, *choices[:-1])), axis=1)


def allowed(env: EnvSpec, mask: NDArray[np.bool_], action: Array) -> NDArray[np.bool_]:
    """Return [...]: whether the `mask` [..., sum of choices] allows each component of an `action` [...] or [..., K]."""
    offsets = np.cumsum([0, *env.action.choices[:-1]])
    chosen = action.reshape(*mask.shape[:-1], len(offsets)) + offsets
    return np.asarray(np.take_along_axis(mask, chosen, axis=-1).all(axis=-1))


def random_allowed(env: EnvSpec, mask: NDArray[np.bool_], random: np.random.Generator) -> Array:
    """Return actions [N] or [N, K] int64 drawn from those that the `mask` [N, sum of choices] allows, all alike."""
    rank = np.where(mask, random.random(mask.shape), -1.0)
    ends = np.cumsum(env.action.choices)
    chosen = [part.argmax(axis=1) for part in np.split(rank, ends[:-1], axis=1)]
    return np.stack(chosen, axis=1).reshape(len(mask), *env.action.shape)


def check_observations(name: str, env: EnvSpec, observation: Array) -> None:
    """Raise `ProtocolError` where a leaf of observations [..., *frame] has a value that its space cannot have.

    Numbers of observations that are one array are checked with the other arrays of a message.
    """
    for path, values, choices in split(env, observation):
        leaf = f"{name}/{path}" if path else name
        if path:
            check_numbers({leaf: values}, {leaf: OBSERVATION_MAX})
        check_choices(f"observation {path}".strip() + " outside the observation space", values, choices)


def check_choices(fact: str, values: Array, choices: tuple[int, ...]) -> None:
    """Raise `ProtocolError` where a component of `values` [..., K] is outside its `choices`; none: they are not discrete."""
    if not choices or not values.size:
        return
    rows = tuple(range(values.ndim - 1))
    low, high = np.minimum.reduce(values, axis=rows), np.maximum.reduce(values, axis=rows)
    if (outside := np.flatnonzero((low < 0) | (high >= choices))).size:
        first = outside[0]
        found, wanted = [int(low[first]), int(high[first])], f"0 to {choices[first] - 1}"
        raise ProtocolError(DropReason.SCHEMA, fact, found=found, wanted=wanted)
