"""Observations become one array: leaves are cast and joined, and action masks are read and checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import reduce
from operator import getitem
from typing import Any, TypeAlias

import numpy as np
from ale_py.vector_env import AtariVectorEnv
from gymnasium.spaces import Dict, Space, Tuple
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array
from numpy.typing import NDArray

from common.envs.leaves import Array, components_allowed, join, joined_dtype
from common.envs.spaces import DescribedLeaf, describe_observation, leaf_spaces, outside_space
from common.envs.spec import ACTION_MASK, LEAST_ROWS, ONE_ARRAY, ActionSpec, EnvSettings, Leaf
from common.errors import ConfigError

AnyVectorEnv: TypeAlias = VectorEnv[Any, Any, Any]


class ObservationReader:
    """Makes observations [B, *frame] of the batches and infos of a vector environment."""

    def __init__(self, env: AnyVectorEnv, settings: EnvSettings, action: ActionSpec) -> None:
        """Raises `ConfigError` for a space that is not supported, and for a mask that does not fit the actions."""
        self._name, self._space, self._choices = settings.name, env.single_observation_space, action.choices
        inside = isinstance(self._space, Dict) and ACTION_MASK in self._space.spaces
        self.ignores_mask = inside and action.discrete and not settings.action_mask
        also = (ACTION_MASK,) if inside and settings.action_mask and settings.leaves else ()
        seen = describe_observation(self._space, (*settings.leaves, *also))
        mask = next((each for each in seen if each.leaf.path == ACTION_MASK), None)
        self._mask: Leaf | None = None
        if settings.action_mask:
            self._mask = _mask_leaf(action)
            seen = [each if each.leaf.path else each._replace(leaf=replace(each.leaf, path=ONE_ARRAY)) for each in seen]
            seen = [each for each in seen if each is not mask]
            if mask is not None and mask.leaf.shape != self._mask.shape:
                raise self._wrong_mask(f"one of shape {mask.leaf.shape}")
            if not seen:
                raise ConfigError(f"{self._name} shows nothing but a mask", found=self._space, wanted="another key beside it")
        if isinstance(env, AtariVectorEnv):
            seen = [_cropped(seen[0], settings.crop)]
        self._in_info = self._mask is not None and mask is None
        self._seen = [*seen, *([mask] if self._mask and mask else [])]
        self._leaves = (*(each.leaf for each in seen), *([self._mask] if self._mask else []))

    def described(self) -> dict[str, Any]:
        """Return the fields of an `EnvSpec` that describe the observation."""
        if len(self._leaves) == 1:
            leaf = self._leaves[0]
            return {"observation_shape": leaf.shape, "observation_dtype": leaf.dtype, "observation_choices": leaf.choices}
        size = joined_dtype(self._leaves).itemsize
        leaves = {"leaves": self._leaves, "action_mask": self._mask is not None}
        return {"observation_shape": (size,), "observation_dtype": "uint8", **leaves}

    def __call__(self, batch: Any, info: Mapping[str, Any], *, acted_on: NDArray[np.bool_]) -> Array:
        """Return the observations [B, *frame] of a batch; an action is chosen on those of `acted_on` [B].

        Raises `ConfigError` for an array of another shape than its space, for bytes or choices in another dtype, for a mask of
        another form, and for one that allows no action where one is chosen.
        """
        arrays = [self._cast(each, batch, len(acted_on)) for each in self._seen]
        if len(self._leaves) == 1:
            return arrays[0]
        if self._in_info:
            unknown = () if acted_on.any() else np.ones((len(acted_on), len(self._leaves[-1].choices)), np.uint8)
            masks = np.asarray(info.get(ACTION_MASK, unknown))
            arrays.append(self._of_lists(masks) if masks.dtype == object else masks)
        if self._mask is not None:
            self._check(arrays[-1], info, acted_on)
        return join(self._leaves, arrays)

    def final(self, info: Mapping[str, Any], index: NDArray[np.int32]) -> Array:
        """Return the last observations [K, *frame] of the environments `index` [K], which have begun other episodes.

        Raises `ConfigError` where `info` does not have them, as one for each environment or as a batch.
        """
        space = self._space
        try:
            final = info["final_obs"]
            items = [_item(space, final, env) if isinstance(final, Mapping) else final[env] for env in index]
            self.require_leaves(items)
            batch: Any = concatenate(space, items, create_empty_array(space, len(items)))  # type: ignore[arg-type]  # its own type
        except (LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                "a same_step environment must hand over the last observation of a truncated episode",
                found=f"info with {sorted(info)}" + (f", final_obs {type(final)}" if "final_obs" in info else ""),
                wanted='info["final_obs"], of each environment, or a batch of a Dict space',
                fix="add it, or let the environment reset in the next step",
            ) from error
        none = np.zeros(len(index), np.bool_)
        last = info.get("final_info") if self._in_info else None
        masks = last.get(ACTION_MASK) if isinstance(last, Mapping) else None  # a list of mappings, before gymnasium 1.0
        if masks is None:
            return self(batch, {}, acted_on=none)
        try:
            rows = np.asarray(masks)[index]
        except (IndexError, ValueError) as error:
            raise self._wrong_mask(f"masks in final_info that are no batch of all environments: {error}") from error
        return self(batch, {ACTION_MASK: rows}, acted_on=none)

    def require_leaves(self, observations: Iterable[Any]) -> None:
        """Raise `ConfigError` where one of these observations, as environments return them, lacks an array of its space."""
        for seen in observations:
            if seen is None:  # of an environment that has not returned one yet
                continue
            for path, keys, _ in leaf_spaces(self._space):
                try:
                    reduce(getitem, keys, seen)
                except LookupError:
                    found = f"keys {', '.join(map(str, seen))}" if isinstance(seen, Mapping) else repr(seen)
                    fact, wanted = f"{self._name} returns an observation without {path}", "all arrays of its space, each time"
                    raise ConfigError(fact, found=found, wanted=wanted, fix="correct the environment") from None

    def _cast(self, each: DescribedLeaf, batch: Any, rows: int) -> Array:
        array = np.asarray(reduce(getitem, each.keys, batch))
        if array.shape != (wanted := (rows, *each.shape)):  # a cast would make rows of any numbers
            raise outside_space(self._name, each.leaf.path, f"shape {array.shape}", wanted=f"shape {wanted}")
        if each.leaf.dtype == "uint8" and array.dtype != np.uint8:  # the learner would have other bytes than the actor acted on
            raise outside_space(self._name, each.leaf.path, f"dtype {array.dtype}", wanted="dtype uint8")
        if each.leaf.choices and array.dtype.kind not in "biu":
            raise outside_space(self._name, each.leaf.path, f"dtype {array.dtype}", wanted="integers")
        return each.cast(array)

    def _of_lists(self, masks: Array) -> Array:
        """Return the masks [B, N] that single environments gave as lists; that of an environment without one forbids all."""
        none = np.zeros(len(self._leaves[-1].choices))
        try:
            return np.stack([none if mask is None else np.asarray(mask) for mask in masks])
        except ValueError as error:
            raise self._wrong_mask("lists of several lengths") from error

    def _check(self, mask: Array, info: Mapping[str, Any], acted_on: NDArray[np.bool_]) -> None:
        if mask.shape != (len(acted_on), len(self._leaves[-1].choices)):
            raise self._wrong_mask(f"one of shape {mask.shape[1:]}" if mask.size else f"none in info, with {sorted(info)}")
        if not ((mask == 0) | (mask == 1)).all():
            raise self._wrong_mask(f"one with {mask[(mask != 0) & (mask != 1)][0]}")
        components = components_allowed(self._choices, mask)
        if (nothing := acted_on & ~components.all(axis=1)).any():
            row = int(nothing.argmax())
            part = f" for component {int(components[row].argmin())} of its action" if components[row].any() else ""
            found = f"a mask of zeros{part or ', or none,'} of environment {row}"
            wanted = "an allowed action in each observation that an action is chosen on"
            raise ConfigError(f"{self._name} allows no action", found=found, wanted=wanted, fix="correct the environment")

    def _wrong_mask(self, found: str) -> ConfigError:
        size = self._mask.shape[0] if self._mask else 0
        wanted = f"{size} numbers 0 or 1 in info[{ACTION_MASK!r}], or under that key in a Dict observation"
        fix = "correct the environment, or set env.action_mask=false"
        return ConfigError(f"{self._name} gives no mask of its actions", found=found, wanted=wanted, fix=fix)


def _item(space: Space[Any], batch: Any, env: int) -> Any:
    """Return the observation of one environment in a batch of them."""
    if isinstance(space, Dict):
        return {key: _item(each, batch[key], env) for key, each in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(_item(each, part, env) for each, part in zip(space.spaces, batch, strict=True))
    return batch[env]


def _mask_leaf(action: ActionSpec) -> Leaf:
    if not action.discrete:
        wanted = "discrete ones, of which a mask may forbid some"
        raise ConfigError("env.action_mask does not fit the actions", found="continuous ones", wanted=wanted, fix="leave it out")
    size = sum(action.choices)
    return Leaf(path=ACTION_MASK, shape=(size,), dtype="uint8", choices=(2,) * size)


def _cropped(image: DescribedLeaf, rows: tuple[int, int]) -> DescribedLeaf:
    """Return an Atari image without `rows` at top and bottom: a view, nothing is copied."""
    (*stacked, height, width), whole, (top, bottom) = image.leaf.shape, image.cast, rows  # a user's function may stack frames
    left = height - top - bottom
    if left < LEAST_ROWS and left < height:
        fact, found = "env.crop leaves too few rows of the image", f"{left} of {height}"
        raise ConfigError(fact, found=found, wanted=f"at least {LEAST_ROWS}", fix="change env.crop")
    leaf = replace(image.leaf, shape=(*stacked, left, width))
    return image._replace(leaf=leaf, cast=lambda batch: whole(batch)[..., top : height - bottom, :])
