"""One environment of a run as gymnasium knows environments: prepared and stacked as in training, and drawn in colour.

Pictures of Atari come from a second emulator. It has the same seed and takes the same actions, one emulator frame at a time, so
that all frames of an env step are seen in colour and full size, while the first emulator prepares observations as in training.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Space
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from common.envs.leaves import Array, inputs_of
from common.envs.make import PICTURE, build, make_atari
from common.envs.spec import EnvSettings, EnvSpec, Leaf
from common.envs.stacking import FrameStacker
from common.envs.vector import SEEDS
from common.errors import ConfigError, ResourceError

PICTURES = "rgb_array_list"  # gymnasium's render mode: all pictures since the last call of `render`
OF_LEARNERS = ("normalize_reward", "terminate_on_life_loss")  # settings without effect on the episodes of a policy
UNHEEDED = (*OF_LEARNERS, "num_envs", "autoreset")  # settings without effect on a `RunEnvironment`
ATARI_FPS = 60.0  # of the console
_FPS = 30.0  # where an environment names none


class RunEnvironment(gymnasium.Env[Any, Any]):
    """One environment with the settings of a run; its observations are the input of the run's network. One thread uses it.

    An observation of several arrays is a dict of them by path, the mask of allowed actions as "action_mask". Of several agents an
    observation has those of all of them, [A, *input], an action likewise, the reward is the mean of theirs, and an episode ends
    when the last one leaves. Infos are empty. Where a vector environment of a user's own resets in the same step, the observation
    of a step that ends an episode is the first one of the next.
    """

    def __init__(self, settings: EnvSettings, *, render_mode: str | None = None) -> None:
        """Build it; of a user's function that makes more of them the first one counts.

        Raises `ConfigError` or `ResourceError` as `build` does, and where it cannot be drawn.
        """
        if render_mode not in (None, PICTURE, PICTURES):
            raise ConfigError("unknown render mode", found=render_mode, wanted=f"{PICTURE} or {PICTURES}")
        settings = settings.model_copy(update={"autoreset": "next_step"})  # so that the last observation of an episode is seen
        self._environment = build(settings, 1, render=render_mode is not None)
        self._screen = AtariScreen(settings) if settings.is_atari and render_mode else None
        self._name = settings.name
        self.render_mode = render_mode
        self.run_spec: EnvSpec = self._environment.spec
        self.unheeded = [*UNHEEDED, *self._environment.unheeded]
        native = self._environment.native.metadata
        skipped = 1 if render_mode == PICTURES else settings.frame_skip
        fps = ATARI_FPS / skipped if settings.is_atari else native.get("render_fps") or _FPS
        self.metadata = {"render_modes": [PICTURE, PICTURES], "render_fps": fps}
        spaces = {leaf.path: _space(leaf) for leaf in self.run_spec.inputs}
        self.observation_space: Space[Any] = Dict(spaces) if self.run_spec.leaves else next(iter(spaces.values()))
        self.action_space = self._environment.action_space
        self._agents = self._environment.agents
        self._left = np.zeros(self._agents, np.bool_)  # the agents whose episode has ended
        if self._agents > 1:
            self.observation_space = batch_space(self.observation_space, self._agents)
            self.action_space = batch_space(self.action_space, self._agents)
        self._stacker: FrameStacker | None = None
        self._pictures: list[Array] = []  # since the last call of `render`
        if render_mode and not settings.is_atari and self._environment.native.render_mode != PICTURE:
            self.close()
            found = f"render_mode {self._environment.native.render_mode}"
            fix = "let its function take render_mode, and make the environment with it"
            raise ConfigError(f"{self._name} draws no pictures", found=found, wanted=PICTURE, fix=fix)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; without a seed, with the next one of this environment's own random stream.

        Raises `ConfigError` for options, because a vector environment would not pass them on.
        """
        if options:
            fix = "set env.kwargs, or make the environment by its own function"
            raise ConfigError("reset takes no options", found=sorted(options), wanted="none", fix=fix)
        super().reset(seed=seed, options=options)
        chosen = int(self.np_random.integers(SEEDS)) if seed is None else seed
        self._stacker = FrameStacker(self._environment.reset(chosen), self.run_spec.frame_stack)
        self._left[:] = False
        self._pictures = []
        if self._screen is not None:
            self._screen.reset(chosen)
        self._keep_pictures()
        return self._seen(self._stacker), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take an action of `action_space`. Raises `ConfigError` for another one, or before the first `reset`."""
        if self._stacker is None:
            raise ConfigError("step before the first reset", found="no episode", wanted="a call of reset")
        ours = self._checked(action)
        transition = self._environment.step(ours.repeat(self._environment.num_envs // self._agents, axis=0))
        self._stacker.push(transition.observation, transition.start)
        if self._screen is not None:
            self._screen.step(int(ours[0]))
        self._keep_pictures()
        terminated, truncated, start = (
            array[: self._agents] for array in (transition.terminated, transition.truncated, transition.start)
        )
        self._left = (self._left & ~start) | terminated | truncated
        ended = [bool(self._left.all() and ends.any()) for ends in (terminated, truncated)]
        return self._seen(self._stacker), float(transition.reward[: self._agents].mean()), *ended, {}

    def _checked(self, action: Any) -> Array:
        """Return the action of each agent, counted from 0 where it is discrete: on another one an emulator hangs."""
        given, known = np.asarray(action), self.run_spec.action
        first = getattr(self._environment.action_space, "start", 0)  # of numbers; the batch of a MultiDiscrete has none
        if given.size == self._agents * math.prod(known.shape) and given.dtype.kind in ("biu" if known.discrete else "biuf"):
            ours: Array = given.reshape(self._agents, *known.shape) - np.ravel(first)
            valid = (ours >= 0) & (ours < np.reshape(known.choices, known.shape)) if known.discrete else np.isfinite(ours)
            if valid.all():
                return ours
        raise ConfigError(f"no action of {self._name}", found=action, wanted=f"one of {self.action_space}")

    def render(self) -> Any:
        """Return the newest picture [H, W, 3] uint8, or in mode "rgb_array_list" all since the last call.

        Raises `ResourceError` where it cannot be drawn.
        """
        if self.render_mode == PICTURE:
            return self._newest_pictures()[-1]
        pictures, self._pictures = self._pictures, []
        return pictures if self.render_mode else None

    def close(self) -> None:
        """Free the emulators and other resources."""
        self._environment.close()
        if self._screen is not None:
            self._screen.close()

    def _seen(self, stacker: FrameStacker) -> Any:
        newest = stacker.observation[: self._agents].copy()
        which = 0 if self._agents == 1 else slice(None)
        if self.run_spec.leaves:
            return {path: array[which] for path, array in inputs_of(self.run_spec, newest).items()}
        return newest[which]

    def _keep_pictures(self) -> None:
        if self.render_mode == PICTURES:
            self._pictures += self._newest_pictures()

    def _newest_pictures(self) -> list[Array]:
        """Return the pictures of the last env step: one, and of Atari one for each emulator frame."""
        if self._screen is not None:
            return self._screen.frames
        try:
            drawn: Any = self._environment.native.render()
            picture = drawn[0]
        except Exception as error:  # a renderer may lack a package, a display or a driver, and raise anything
            found = f"{type(error).__name__}: {error}"
            raise ResourceError(f"{self._name} cannot be drawn here", found=found, wanted="a picture") from error
        if not (isinstance(picture, np.ndarray) and picture.dtype == np.uint8 and picture.shape[2:] == (3,)):
            found = f"{picture.dtype} {picture.shape}" if isinstance(picture, np.ndarray) else type(picture).__name__
            raise ResourceError(f"{self._name} draws no pictures", found=found, wanted="uint8 (H, W, 3)")
        return [picture]


def _space(leaf: Leaf) -> Space[Any]:
    dtype, most = np.dtype(leaf.dtype), np.array(leaf.choices or 256) - 1
    low, high = (-np.inf, np.inf) if dtype.kind == "f" else (0, np.broadcast_to(most, leaf.shape).astype(dtype))
    return Box(low, high, leaf.shape, dtype.type)


class AtariScreen:
    """The screen of an Atari environment, frame by frame: an emulator with the environment's seed, which takes its actions."""

    def __init__(self, settings: EnvSettings) -> None:
        self.frames: list[Array] = []  # of the last env step, [210, 160, 3] uint8
        self._frame_skip = settings.frame_skip
        changed = {"frameskip": 1, "maxpool": False, "grayscale": False, "img_height": 210, "img_width": 160}
        self._emulator = make_atari(settings, 1, AutoresetMode.NEXT_STEP, **changed)

    def reset(self, seed: int) -> None:
        """Begin an episode, the same as a `VectorEnvironment` with this seed."""
        observation, _ = self._emulator.reset(seed=seed % (SEEDS - 1))
        self.frames = [observation[0, 0].copy()]

    def step(self, action: int) -> None:
        """Take one env step."""
        self.frames = []
        for _ in range(self._frame_skip):
            observation, _, terminated, truncated, _ = self._emulator.step(np.array([action]))
            self.frames.append(observation[0, 0].copy())
            if terminated[0] or truncated[0]:
                return

    def close(self) -> None:
        """Free the emulator."""
        self._emulator.close()
