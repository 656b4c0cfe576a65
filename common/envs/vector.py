"""Environments that are stepped side by side, with rows of one meaning for every origin and autoreset mode.

next_step   the row after an end ignores its action and only brings the reset: valid False, start True
same_step   the row that ends an episode brings the next one's first observation: start True; the last
observation of a truncated episode, which is bootstrapped from, comes apart in `final_observation`

Spaces of gymnasium become the shape and dtype of an observation and the spec of an action, with the casts of both. A batch of
observations passes through its cast each env step, so a cast is a view wherever it can be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from ale_py.vector_env import AtariVectorEnv
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from common.envs import state
from common.envs.spec import ActionSpec, EnvSettings, EnvSpec
from common.errors import ConfigError

Array: TypeAlias = NDArray[Any]
AnyVectorEnv: TypeAlias = VectorEnv[Any, Any, Any]

SEEDS = 2**31  # ale-py takes no larger seed
_RANKS = (1, 2, 3)
_IMAGE_RANKS = (2, 3)
_LEAST_SIDE = 6  # of an image of floats with channels
_LEAST_PLANE = 16  # of an image of floats without: smaller ones are tables
_WRAP = "wrap it in a function of your own, env.entry_point"


class Transition(NamedTuple):
    """Result of one step of B environments. Arrays may be views: copy those that are to outlive the next step."""

    observation: Array  # [B, *frame]: what the next action is chosen on
    reward: NDArray[np.float32]  # [B], raw; 0 in a row that is not valid
    terminated: NDArray[np.bool_]  # [B]: the episode ended by its own rules
    truncated: NDArray[np.bool_]  # [B]: the episode was cut off, by a time limit
    valid: NDArray[np.bool_]  # [B]: False in a reset row: its action was ignored
    start: NDArray[np.bool_]  # [B]: `observation` is the first of an episode
    final_index: NDArray[np.int32]  # [K]: environments truncated in this row, where `observation` is past their end
    final_observation: Array  # [K, *frame]: their last observations
    life_lost: NDArray[np.bool_]  # [B]: an end for the learner alone; False where the episode ended, and unless asked for


class VectorEnvironment:
    """B environments stepped together. One thread uses it; `close` it when done."""

    def __init__(self, env: AnyVectorEnv, *, settings: EnvSettings, mode: AutoresetMode) -> None:
        """Take over `env`, which resets itself by `mode`. Raises `ConfigError` for a space that is not supported."""
        shape, dtype, choices, self._observed = describe_observation(env.single_observation_space)
        if isinstance(env, AtariVectorEnv):
            (height, width), whole, (top, bottom) = shape, self._observed, settings.crop
            shape = (height - top - bottom, width)
            self._observed = lambda batch: whole(batch)[:, top : height - bottom]  # a view: nothing is copied
        action, self.to_native = describe_action(env.single_action_space)
        self.num_envs: int = env.num_envs
        self.action_space: Space[Any] = env.single_action_space  # of one environment, as `to_native` gives it
        self.spec = EnvSpec(
            observation_shape=shape,
            observation_dtype=dtype,
            observation_choices=choices,
            action=action,
            frame_stack=settings.frame_stack,
            frame_skip=settings.frame_skip if isinstance(env, AtariVectorEnv) else 1,
        )
        self.offers_masks = False  # whether an info had an action mask, which nothing uses
        self.native = env  # the environments as gymnasium knows them
        self._counts_lives = settings.terminate_on_life_loss and isinstance(env, AtariVectorEnv)
        self._lives: NDArray[np.int32] = np.zeros(self.num_envs, np.int32)
        self.same_step = mode is AutoresetMode.SAME_STEP  # else an end comes a step before the reset
        self._ended = np.zeros(self.num_envs, np.bool_)
        self._all_valid = np.ones(self.num_envs, np.bool_)
        self._no_life_lost = np.zeros(self.num_envs, np.bool_)
        self._no_index = np.zeros(0, np.int32)
        self._no_frames = np.zeros((0, *shape), dtype)

    def reset(self, seed: int) -> Array:
        """Begin B episodes, environment b with `seed + b` where it is seeded alone; return the first observations [B, *frame]."""
        state.seed_spaces(self.native, seed)  # an environment may sample them
        observation, info = self.native.reset(seed=seed % (SEEDS - self.num_envs))
        self.offers_masks |= "action_mask" in info
        if self._counts_lives:
            self._lives = info["lives"].copy()
        self._ended = np.zeros(self.num_envs, np.bool_)
        return self._observed(observation)

    def step(self, action: Array) -> Transition:
        """Take `action`: [B] or [B, K] int64 from 0, or [B, A] float32, clipped to the space's bounds here."""
        observed, rewards, terminated, truncated, info = self.native.step(self.to_native(action))
        self.offers_masks |= "action_mask" in info
        observation, reward = self._observed(observed), np.asarray(rewards, np.float32)
        after_end, self._ended = self._ended, terminated | truncated
        life_lost = self._life_lost(info)
        if self.same_step:
            final = self._finals(truncated, info)
            return Transition(observation, reward, terminated, truncated, self._all_valid, self._ended, *final, life_lost)
        if after_end.any():  # a reset row has no meaning beside its observation
            alive = ~after_end
            reward, terminated, truncated = np.where(alive, reward, np.float32(0)), terminated & alive, truncated & alive
            self._ended = self._ended & alive
        final = self._no_index, self._no_frames
        return Transition(observation, reward, terminated, truncated, ~after_end, after_end, *final, life_lost)

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which another process continues bit for bit: plain values, not a copy.

        Raises `StateError` where the state of the environments cannot be read.
        """
        return {"ended": self._ended, "lives": self._lives, "environment": state.capture(self.native)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore `state_dict`, after a reset.

        Raises `StateError` where the state does not fit; the environments must then be built anew.
        """
        ended, lives = (saved.get(name) for name in ("ended", "lives"))
        for value, current in ((ended, self._ended), (lives, self._lives)):
            state.check_like("state of the environments", value, current)
        state.restore(self.native, saved.get("environment", {}))
        self._ended, self._lives = np.array(ended), np.array(lives)

    def close(self) -> None:
        """Free the emulators and other resources."""
        self.native.close()

    def _life_lost(self, info: Mapping[str, Any]) -> NDArray[np.bool_]:
        """Return [B]: fewer lives than before, in a game that continues. A reset restores lives and loses none."""
        if not self._counts_lives:
            return self._no_life_lost
        before, self._lives = self._lives, info["lives"].copy()
        return (self._lives < before) & ~self._ended

    def _finals(self, truncated: NDArray[np.bool_], info: Mapping[str, Any]) -> tuple[NDArray[np.int32], Array]:
        if not truncated.any():
            return self._no_index, self._no_frames
        if "final_obs" not in info:
            raise ConfigError(
                "a same_step environment must hand over the last observation of a truncated episode",
                found=f"info with {sorted(info)}",
                wanted='info["final_obs"]',
                fix="add it, or let the environment reset in the next step",
            )
        index = np.flatnonzero(truncated).astype(np.int32)
        return index, self._observed(np.stack([info["final_obs"][env] for env in index]))


def describe_observation(space: Space[Any]) -> tuple[tuple[int, ...], str, tuple[int, ...], Callable[[Array], Array]]:
    """Return shape, dtype, choices and cast of an observation.

    An image has the shape [H, W] or [channels, H, W], in bytes or in float32; a discrete observation is a vector of int32
    with the number of choices of each component; other observations are vectors of float32.
    """
    if isinstance(space, Discrete | MultiDiscrete | MultiBinary):
        choices, start = _choices(space)
        return (len(choices),), "int32", choices, lambda batch: (batch - start).reshape(-1, len(choices)).astype(np.int32)
    if not isinstance(space, Box) or len(space.shape) not in _RANKS:
        wanted = "a Box of 1 to 3 axes, Discrete, MultiDiscrete, or MultiBinary"
        raise ConfigError("observation space not supported", found=space, wanted=wanted, fix=_WRAP)
    channels_last = len(space.shape) == 3 and space.shape[-1] < space.shape[0]  # noqa: PLR2004 - they are the shorter of the outer axes
    shape = (space.shape[-1], *space.shape[:-1]) if channels_last else space.shape
    if not _is_image(shape, space.dtype):
        size = int(np.prod(space.shape))
        return (size,), "float32", (), lambda batch: batch.reshape(-1, size).astype(np.float32, copy=False)
    one_channel = len(shape) == 3 and shape[0] == 1  # noqa: PLR2004 - a grey image
    shape = shape[1:] if one_channel else shape

    def planes(batch: Array) -> Array:
        moved = np.moveaxis(batch, -1, 1) if channels_last else batch
        return moved[:, 0] if one_channel else moved

    if space.dtype == np.uint8:
        return shape, "uint8", (), planes
    largest = max(float(np.abs(bound).max()) for bound in (space.low, space.high))
    divisor = np.float32(largest if 1.0 < largest < np.inf else 1.0)  # as bytes are: 0 to 255 becomes 0 to 1
    return shape, "float32", (), lambda batch: planes(batch).astype(np.float32) / divisor


def _choices(space: Discrete[Any] | MultiDiscrete[Any] | MultiBinary) -> tuple[tuple[int, ...], Array]:
    """Return the number of choices of each component of a space, and the first choice of each, in the shape of the space."""
    if isinstance(space, MultiDiscrete):
        return tuple(map(int, space.nvec.ravel())), space.start
    if isinstance(space, Discrete):
        return (int(space.n),), np.asarray(space.start)
    return (2,) * int(np.prod(space.shape)), np.zeros((), np.int64)


def _is_image(shape: tuple[int, ...], dtype: np.dtype[Any] | None) -> bool:
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
