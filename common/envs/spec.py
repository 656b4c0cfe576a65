"""Settings and description of an environment: shapes, spaces, signature. Pure; `make.py` builds environments."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from common.conditions import PER_ENVIRONMENT, OnlyIf, Unless
from common.errors import ConfigError

IMAGE_RANK = 2
"""Axes of an observation that is an image: [H, W], grey. Its stack [S, H, W] is the input of convolutions, also where S is 1."""

ACTION_MASK = "action_mask"
"""The key of the mask of allowed actions, in the info of an environment or in a Dict observation, and the path of its leaf."""

ONE_ARRAY = "observation"
"""The path of an observation of one array, alone or beside a mask."""

LEAST_ROWS = 16
"""Of an Atari image, after rows were cut off."""


_T = TypeVar("_T")
_AtariImage: TypeAlias = Annotated[_T, OnlyIf("id", "ALE/*")]  # also of a function that returns an AtariVectorEnv
_Atari: TypeAlias = Annotated[_T, OnlyIf("entry_point", ""), OnlyIf("id", "ALE/*")]
_Rows: TypeAlias = Annotated[int, Field(ge=0)]


class EnvSettings(BaseModel):
    """Section `env` of the configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Annotated[str, OnlyIf("entry_point", "")] = Field(
        default="CartPole-v1",
        description="gymnasium id, or `PACKAGE:NAME` of PettingZoo; `ALE/...` ids run on ale-py's native vector environment",
    )
    entry_point: str = Field(
        default="",
        description="your own: package.module:function, called with kwargs, returns a gymnasium Env, VectorEnv, or a ParallelEnv",
    )
    kwargs: Annotated[dict[str, Any], PER_ENVIRONMENT] = Field(
        default_factory=dict, description="passed to gymnasium.make_vec or to the entry point"
    )
    num_envs: int = Field(default=8, ge=1, le=4096, description="environments stepped side by side by each actor (B)")
    autoreset: Annotated[Literal["next_step", "same_step"], OnlyIf("policy_server.workers", 0)] = Field(
        default="next_step", description="gymnasium's autoreset mode asked of the environment; of env workers next_step"
    )
    leaves: Annotated[tuple[str, ...], PER_ENVIRONMENT] = Field(
        default=(), description="paths of the arrays of a Dict or Tuple observation that are used, such as [image]; none: all"
    )
    action_mask: bool = Field(
        default=False,
        description="never take actions that info[action_mask], or the key action_mask of a Dict observation, forbids (with a 0)",
    )
    normalize_reward: Annotated[
        bool,
        Unless("algorithm.name", "a3c-grad", why="gradients carry no rewards to take the statistics of"),
        Unless("algorithm.clip_reward", True, why="signs have no scale"),
    ] = Field(
        default=False,
        description="train on rewards over the running deviation of the discounted return (returns are always reported raw)",
    )
    frame_stack: int = Field(default=1, ge=1, le=16, description="newest observations the network sees, oldest first (S)")
    frame_skip: _AtariImage[int] = Field(default=4, ge=1, le=16, description="Atari: emulator frames per env step")
    height: _Atari[int] = Field(default=84, ge=16, le=210, description="Atari: rows of the grey image")
    width: _Atari[int] = Field(default=84, ge=16, le=160, description="Atari: columns of the grey image")
    crop: Annotated[_AtariImage[tuple[_Rows, _Rows]], PER_ENVIRONMENT] = Field(
        default=(0, 0), description="Atari: rows cut off the grey image at top and bottom, such as a scoreboard"
    )
    sticky_actions: _Atari[float] = Field(default=0.0, ge=0.0, le=1.0, description="Atari: probability that an action repeats")
    noop_max: _Atari[int] = Field(default=30, ge=0, le=1000, description="Atari: most random no-ops at the start of an episode")
    full_action_space: _Atari[bool] = Field(default=False, description="Atari: all 18 actions instead of the game's own")
    max_episode_frames: _Atari[int] = Field(
        default=108_000, ge=1, description="Atari: emulator frames after which an episode is truncated"
    )
    terminate_on_life_loss: _AtariImage[bool] = Field(
        default=False, description="Atari: a lost life is an end for the learner; the game goes on, and so does its return"
    )
    threads: _Atari[int] = Field(default=1, ge=1, le=256, description="Atari: emulator threads per actor")

    @property
    def name(self) -> str:
        """Return the environment's own name: the entry point where there is one, else the id."""
        return self.entry_point or self.id

    @property
    def is_atari(self) -> bool:
        """Return whether these are emulators of an Atari game that Rookery makes itself."""
        return self.id.startswith("ALE/") and not self.entry_point

    @property
    def task(self) -> dict[str, Any]:
        """The settings, as JSON values, that decide what a policy earns: returns under others cannot be compared."""
        return self.model_dump(mode="json", exclude={"num_envs", "autoreset", "normalize_reward", "threads"})

    def task_changes(self, before: Mapping[str, Any]) -> str:
        """Return the settings of the task that were others in `before`; "" where none was, or `before` does not have them."""
        changed = ((name, before.get(name, value), value) for name, value in self.task.items())
        return "; ".join(f"env.{name} was {was}, is {value}" for name, was, value in changed if was != value)

    @model_validator(mode="after")
    def _something_is_left_to_see(self) -> Self:
        left = self.height - sum(self.crop)
        if left < LEAST_ROWS and not self.entry_point:  # an AtariVectorEnv of a function has a height of its own
            text = f"crop {list(self.crop)} leaves {left} of {self.height} rows; wanted at least {LEAST_ROWS}"
            raise ValueError(text)
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionSpec:
    """Discrete with one component (`shape` ()) or with K (`shape` (K,)), or continuous with A components (`shape` (A,)).

    Discrete components count from 0; `choices` has the number of choices of each. Continuous ones have bounds instead, in `low`
    and in `high`, which may be infinite.
    """

    shape: tuple[int, ...]
    choices: tuple[int, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        shapes = [(len(self.choices or self.low),)] + ([()] if len(self.choices) == 1 else [])
        if self.shape not in shapes or len(self.low) != len(self.high) or min(self.choices, default=1) < 1:
            wanted, fix = "numbers, or a vector with both bounds of each component", "flatten them in your env.entry_point"
            found = f"shape {self.shape}, choices {self.choices}, {len(self.low)} lower and {len(self.high)} upper bounds"
            raise ConfigError("actions of this form are not supported", found=found, wanted=wanted, fix=fix)

    @property
    def discrete(self) -> bool:
        """Return whether actions are discrete, with one component or several."""
        return bool(self.choices)

    @property
    def n(self) -> int:
        """Return the number of different actions, where they are discrete."""
        return math.prod(self.choices)

    @property
    def bounded(self) -> tuple[bool, ...]:
        """Return of each continuous component whether it has finite bounds, low < high."""
        return tuple(math.isfinite(high - low) and low < high for low, high in zip(self.low, self.high, strict=True))

    @property
    def origin(self) -> tuple[float, ...]:
        """Return the center of each continuous component that lacks a bound, in its own unit: 0, or 1 inside its only bound."""
        return tuple(max(low + 1, min(0.0, high - 1)) for low, high in zip(self.low, self.high, strict=True))

    @property
    def dtype(self) -> str:
        """Return the dtype of recorded actions: "int64" or "float32"."""
        return "int64" if self.discrete else "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One array of an observation that has several: of a Dict or Tuple, or of any space with an action mask."""

    path: str  # keys and indices of the spaces around it, such as "arm/0"
    shape: tuple[int, ...]
    dtype: str  # as `EnvSpec.observation_dtype`
    choices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpec:
    """One environment of the vector: `observation_shape` is one frame, before stacking.

    An observation of several arrays is one frame of bytes, in which its `leaves` lie one behind the other (`common.envs.leaves`).
    """

    observation_shape: tuple[int, ...]
    observation_dtype: str  # "uint8", "float32", or "int32" of discrete observations
    action: ActionSpec
    frame_stack: int  # S
    frame_skip: int  # emulator frames per env step; 1 outside Atari
    observation_choices: tuple[int, ...] = ()  # of each component of a discrete observation, which counts from 0
    leaves: tuple[Leaf, ...] = ()  # of an observation of several arrays
    action_mask: bool = False  # whether the last leaf is a mask [sum of the actions' choices]: 1 for an action that is allowed

    @property
    def is_image(self) -> bool:
        """Return whether an observation is an image, [H, W] or [channels, H, W], and no vector."""
        return len(self.observation_shape) >= IMAGE_RANK

    @property
    def is_vector(self) -> bool:
        """Return whether an observation is a vector of numbers, which may be normalised component by component."""
        return not (self.is_image or self.observation_choices)

    @property
    def network_input_shape(self) -> tuple[int, ...]:
        """Return the shape of one stacked observation: [S, *frame], or of the frame itself where S is 1 and it is no image."""
        if self.frame_stack == 1 and len(self.observation_shape) != IMAGE_RANK:
            return self.observation_shape
        return (self.frame_stack, *self.observation_shape)

    @property
    def seen(self) -> tuple[Leaf, ...]:
        """Return the leaves that a network sees: all but the mask."""
        return self.leaves[:-1] if self.action_mask else self.leaves

    @property
    def parts(self) -> tuple[EnvSpec, ...]:
        """Return the spec of each leaf that a network sees, as if it were the whole observation; itself without leaves."""
        whole = replace(self, leaves=(), action_mask=False)
        return tuple(
            replace(whole, observation_shape=leaf.shape, observation_dtype=leaf.dtype, observation_choices=leaf.choices)
            for leaf in self.seen
        ) or (self,)

    @property
    def inputs(self) -> tuple[Leaf, ...]:
        """Return the arrays that a policy takes for one observation, in the network's shapes; one array is `ONE_ARRAY`."""
        mask = self.leaves[-1:] if self.action_mask else ()
        if not self.leaves:
            shape, dtype = self.network_input_shape, self.observation_dtype
            return (Leaf(path=ONE_ARRAY, shape=shape, dtype=dtype, choices=self.observation_choices),)
        seen = zip(self.seen, self.parts, strict=True)
        return *(replace(leaf, shape=part.network_input_shape) for leaf, part in seen), *mask

    @property
    def signature(self) -> str:
        """Return the fingerprint that learner and worker compare before they exchange experience."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
