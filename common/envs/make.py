"""From `EnvSettings` to environments stepped side by side, whatever their origin and autoreset mode.

Three origins: Atari on ale-py's native vector environment, a gymnasium id, a function of the user's. All of them end in
one `VectorEnvironment`, whose `Transition` says what a row is worth, so that nobody after it needs to know the mode:

    next_step   the row after an end ignores its action and only brings the reset: valid False, start True
    same_step   the row that ends an episode brings the next one's first observation: start True; the last
                observation of a truncated episode, which is bootstrapped from, comes apart in `final_observation`
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any, NamedTuple, TypeAlias

import ale_py
import gymnasium
import numpy as np
from ale_py.vector_env import AtariVectorEnv
from gymnasium.spaces import Box, Discrete, Space
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from numpy.typing import NDArray

from common import extensions
from common.envs import state
from common.envs.spec import ActionSpec, EnvSettings, EnvSpec
from common.errors import ConfigError, ResourceError, RookeryError

Array: TypeAlias = NDArray[Any]
AnyVectorEnv: TypeAlias = VectorEnv[Any, Any, Any]

_MODES = {"next_step": AutoresetMode.NEXT_STEP, "same_step": AutoresetMode.SAME_STEP}
_ATARI_KWARGS = ("maxpool", "thread_affinity_offset", "use_fire_reset")  # the rest has a setting, or breaks a row's meaning
_SEEDS = 2**31  # ale-py takes no larger seed
_RANKS = (1, 2, 3)
_IMAGE_RANKS = (2, 3)


class Transition(NamedTuple):
    """What one step of B environments brought. Arrays may be views: copy what is to outlive the next step."""

    observation: Array  # [B, *frame]: what the next action is chosen on
    reward: NDArray[np.float32]  # [B], raw; 0 in a row that is not valid
    terminated: NDArray[np.bool_]  # [B]: the episode ended by its own rules
    truncated: NDArray[np.bool_]  # [B]: the episode was cut off, by a time limit
    valid: NDArray[np.bool_]  # [B]: False in a reset row, whose action was ignored
    start: NDArray[np.bool_]  # [B]: `observation` is the first of an episode
    final_index: NDArray[np.int32]  # [K]: environments truncated in this row, where `observation` is past their end
    final_observation: Array  # [K, *frame]: their last observations
    life_lost: NDArray[np.bool_]  # [B]: an end for the learner alone; False where the episode ended, and unless asked for


class VectorEnvironment:
    """B environments stepped together. One thread uses it; `close` it when done."""

    def __init__(self, env: AnyVectorEnv, *, settings: EnvSettings, mode: AutoresetMode) -> None:
        """Take over `env`, which resets itself by `mode`. Raises `ConfigError` for a space that is not supported."""
        shape, dtype, self._observed = _observation(env.single_observation_space)
        if isinstance(env, AtariVectorEnv):
            shape, self._observed = _cropped(shape, self._observed, settings.crop)
        action, self._acted = _action(env.single_action_space)
        self.num_envs: int = env.num_envs
        self.spec = EnvSpec(
            observation_shape=shape,
            observation_dtype=dtype,
            action=action,
            frame_stack=settings.frame_stack,
            frame_skip=settings.frame_skip if isinstance(env, AtariVectorEnv) else 1,
        )
        self._env = env
        self._counts_lives = settings.terminate_on_life_loss and isinstance(env, AtariVectorEnv)
        self._lives: NDArray[np.int32] = np.zeros(self.num_envs, np.int32)
        self._same_step = mode is AutoresetMode.SAME_STEP
        self._ended = np.zeros(self.num_envs, np.bool_)
        self._all_valid = np.ones(self.num_envs, np.bool_)
        self._no_life_lost = np.zeros(self.num_envs, np.bool_)
        self._no_index = np.zeros(0, np.int32)
        self._no_frames = np.zeros((0, *shape), dtype)

    def reset(self, seed: int) -> Array:
        """Begin B episodes, environment b with `seed + b` where it is seeded alone; their first observations [B, *frame]."""
        observation, info = self._env.reset(seed=seed % (_SEEDS - self.num_envs))
        if self._counts_lives:
            self._lives = info["lives"].copy()
        self._ended = np.zeros(self.num_envs, np.bool_)
        return self._observed(observation)

    def step(self, action: Array) -> Transition:
        """Take `action`: [B] int64 from 0, or [B, A] float32, clipped to the space's bounds here."""
        observed, rewards, terminated, truncated, info = self._env.step(self._acted(action))
        observation, reward = self._observed(observed), np.asarray(rewards, np.float32)
        after_end, self._ended = self._ended, terminated | truncated
        life_lost = self._life_lost(info)
        if self._same_step:
            final = self._finals(truncated, info)
            return Transition(observation, reward, terminated, truncated, self._all_valid, self._ended, *final, life_lost)
        if after_end.any():  # whatever a reset row says beside its observation means nothing
            alive = ~after_end
            reward, terminated, truncated = np.where(alive, reward, np.float32(0)), terminated & alive, truncated & alive
            self._ended = self._ended & alive
        final = self._no_index, self._no_frames
        return Transition(observation, reward, terminated, truncated, ~after_end, after_end, *final, life_lost)

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which another process continues bit for bit: plain values, not a copy.

        Raises `StateError` where the state of the environments cannot be read.
        """
        return {"ended": self._ended, "lives": self._lives, "environment": state.capture(self._env)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore `state_dict`, after a reset.

        Raises `StateError` where the state does not fit; the environments must then be built anew.
        """
        ended, lives = (saved.get(name) for name in ("ended", "lives"))
        for value, current in ((ended, self._ended), (lives, self._lives)):
            state.check_like("state of the environments", value, current)
        state.restore(self._env, saved.get("environment", {}))
        self._ended, self._lives = np.array(ended), np.array(lives)

    def close(self) -> None:
        """Free the emulators and other resources."""
        self._env.close()

    def _life_lost(self, info: Mapping[str, Any]) -> NDArray[np.bool_]:
        """[B]: fewer lives than before, in a game that goes on. A reset brings lives back and loses none."""
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


def make(settings: EnvSettings, *, num_envs: int | None = None) -> VectorEnvironment:
    """Build `num_envs` (default: the setting) environments. Raises `ConfigError` or `ResourceError`, saying what to do."""
    wanted = settings.num_envs if num_envs is None else num_envs
    environment = _make(settings, wanted)
    if environment.num_envs != wanted:
        environment.close()
        raise ConfigError(
            f"{settings.entry_point or settings.id} makes another number of environments",
            found=environment.num_envs,
            wanted=wanted,
            fix="let its function take num_envs, or set env.num_envs to what it makes",
        )
    return environment


def spec_of(settings: EnvSettings) -> EnvSpec:
    """Describe the environment, by building one of it, beginning an episode and closing it again.

    Errors as in `make`, and `ConfigError` where the environment itself fails, or shows what its space does not say.
    """
    try:
        environment = _make(settings, 1)
        with closing(environment):
            shown = environment.reset(0).shape[1:]
    except RookeryError:
        raise
    except Exception as error:  # whatever a user's own code raises: it is theirs to mend, and no restart helps
        found = f"{type(error).__name__}: {error}"
        fact = f"{settings.entry_point or settings.id} fails when it is built or begins an episode"
        raise ConfigError(fact, found=found, wanted="an observation of its space", fix="mend it, or env.kwargs") from error
    if shown != environment.spec.observation_shape:
        fact = f"{settings.entry_point or settings.id} shows what its observation space does not say"
        raise ConfigError(fact, found=f"shape {shown}", wanted=f"shape {environment.spec.observation_shape}", fix="mend it")
    return environment.spec


def example_frames(settings: EnvSettings, *, seed: int, num_envs: int = 2, steps: int = 512) -> Array:
    """What observations look like before anything is learned: [steps * num_envs, *frame] of random play.

    Few environments and many steps, since an Atari environment takes as long to begin as to play 700 steps.
    """
    environment = _make(settings, num_envs)
    random, action = np.random.default_rng(seed), environment.spec.action
    environment.reset(seed)
    frames = []
    for _ in range(steps):
        if action.discrete:
            chosen: Array = random.integers(action.n, size=num_envs)
        else:
            chosen = random.uniform(action.low, action.high, size=(num_envs, *action.shape)).astype(np.float32)
        frames.append(environment.step(chosen).observation.copy())
    environment.close()
    return np.concatenate(frames)


def _make(settings: EnvSettings, num_envs: int) -> VectorEnvironment:
    mode = _MODES[settings.autoreset]
    if settings.entry_point:
        env = _from_function(settings, num_envs, mode)
    elif settings.id.startswith("ALE/"):
        env = _atari(settings, num_envs, mode)
    else:
        env = _from_registry(settings, num_envs, mode)
    try:
        # ale-py writes its mode into metadata shared by all its environments: there the setting is the truth
        return VectorEnvironment(env, settings=settings, mode=mode if isinstance(env, AtariVectorEnv) else _mode_of(env))
    except ConfigError:
        env.close()
        raise


def _atari(settings: EnvSettings, num_envs: int, mode: AutoresetMode) -> AnyVectorEnv:
    """Atari, native: one frame per observation (stacks are ours), raw rewards, no sticky actions unless asked for."""
    gymnasium.register_envs(ale_py)
    if settings.id not in gymnasium.registry:
        raise _unknown(settings.id)
    if unknown := sorted(set(settings.kwargs) - set(_ATARI_KWARGS)):
        raise ConfigError("env.kwargs not known for Atari", found=unknown, wanted=f"some of {_ATARI_KWARGS}", fix="see env.*")
    try:
        return AtariVectorEnv(
            game=gymnasium.registry[settings.id].kwargs["game"],
            num_envs=num_envs,
            autoreset_mode=mode,
            num_threads=settings.threads,
            img_height=settings.height,
            img_width=settings.width,
            stack_num=1,
            frameskip=settings.frame_skip,
            noop_max=settings.noop_max,
            repeat_action_probability=settings.sticky_actions,
            full_action_space=settings.full_action_space,
            max_num_frames_per_episode=settings.max_episode_frames,
            reward_clipping=False,
            **settings.kwargs,
        )
    except OSError as error:
        raise ResourceError(f"no ROM for {settings.id}", found=str(error), fix="reinstall ale-py, unset ALE_ROMS_DIR") from error


def _from_registry(settings: EnvSettings, num_envs: int, mode: AutoresetMode) -> AnyVectorEnv:
    """Build a gymnasium id: its own vector environment where it has one, except for same_step, which those cannot be asked."""
    try:
        spec = gymnasium.spec(settings.id)
        if spec.vector_entry_point is not None and mode is AutoresetMode.NEXT_STEP:
            return gymnasium.make_vec(settings.id, num_envs, **settings.kwargs)
        asked = {"autoreset_mode": mode}
        return gymnasium.make_vec(settings.id, num_envs, vectorization_mode="sync", vector_kwargs=asked, **settings.kwargs)
    except gymnasium.error.DependencyNotInstalled as error:
        fix = "install it: make mujoco" if "mujoco" in str(error).lower() else ""
        raise ResourceError(f"{settings.id} needs a package that is not installed", found=str(error), fix=fix) from error
    except gymnasium.error.Error as error:
        if settings.id not in gymnasium.registry:
            raise _unknown(settings.id) from error
        raise ConfigError(f"{settings.id} cannot be built", found=str(error), fix="look at env.kwargs") from error
    except TypeError as error:
        raise ConfigError(f"{settings.id} does not take env.kwargs", found=settings.kwargs, wanted=str(error)) from error


def _from_function(settings: EnvSettings, num_envs: int, mode: AutoresetMode) -> AnyVectorEnv:
    """Call the user's function once for a vector environment, or once for each single one."""
    function = extensions.find(settings.entry_point, setting="env.entry_point")
    kwargs = settings.kwargs | ({"num_envs": num_envs} if "num_envs" in inspect.signature(function).parameters else {})
    build = extensions.bound(function, entry_point=settings.entry_point, setting="env.kwargs", kwargs=kwargs)
    env = build()
    if isinstance(env, VectorEnv):
        return env
    if not isinstance(env, gymnasium.Env):
        raise ConfigError(f"{settings.entry_point} made no environment", found=type(env), wanted="a gymnasium Env or VectorEnv")
    built = iter([env])
    return SyncVectorEnv([lambda: next(built, None) or build()] * num_envs, autoreset_mode=mode)


def _unknown(env_id: str) -> ConfigError:
    wanted = extensions.closest(env_id, gymnasium.registry)
    return ConfigError("unknown environment id", found=env_id, wanted=wanted, fix="or set env.entry_point to your own")


def _mode_of(env: AnyVectorEnv) -> AutoresetMode:
    """Read how a vector environment resets itself: it must say so, for the meaning of its rows hangs on it."""
    mode = env.metadata.get("autoreset_mode")
    if mode not in _MODES.values():
        raise ConfigError(
            f"{type(env).__name__} does not reset itself",
            found=f'metadata["autoreset_mode"] {mode}',
            wanted="AutoresetMode.NEXT_STEP or AutoresetMode.SAME_STEP",
        )
    return AutoresetMode(mode)


def _observation(space: Space[Any]) -> tuple[tuple[int, ...], str, Callable[[Array], Array]]:
    """Shape, dtype and cast of a frame: uint8 planes are images (grey, or channels first), all else float32 vectors."""
    if not isinstance(space, Box) or len(space.shape) not in _RANKS:
        raise ConfigError("observation space not supported", found=space, wanted="a Box of 1 to 3 axes", fix="wrap it")
    if space.dtype != np.uint8 or len(space.shape) not in _IMAGE_RANKS:
        size = int(np.prod(space.shape))
        return (size,), "float32", lambda batch: batch.reshape(-1, size).astype(np.float32, copy=False)
    shape = space.shape
    if len(shape) == 2:  # noqa: PLR2004 - a plane
        return shape, "uint8", lambda batch: batch
    if shape[-1] < shape[0]:  # channels are the shorter of the outer axes
        shape = (shape[-1], *shape[:-1])
        return _grey(shape), "uint8", lambda batch: np.moveaxis(batch, -1, 1).reshape(-1, *_grey(shape))
    return _grey(shape), "uint8", lambda batch: batch.reshape(-1, *_grey(shape))


def _cropped(
    shape: tuple[int, ...], observed: Callable[[Array], Array], crop: tuple[int, int]
) -> tuple[tuple[int, ...], Callable[[Array], Array]]:
    """Shape and cast of an image without `crop` rows at top and bottom: a view, so that nothing is copied here."""
    height, width = shape
    rows = slice(crop[0], height - crop[1])
    return (height - sum(crop), width), lambda batch: observed(batch)[:, rows]


def _grey(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[1:] if shape[0] == 1 else shape


def _action(space: Space[Any]) -> tuple[ActionSpec, Callable[[Array], Array]]:
    """Spec of an action, and how it becomes the environment's own."""
    if isinstance(space, Discrete):
        first = int(space.start)
        return ActionSpec(n=int(space.n), shape=()), (lambda action: action + first) if first else (lambda action: action)
    if isinstance(space, Box) and len(space.shape) == 1 and space.dtype.kind == "f" and space.is_bounded():
        low, high, dtype = space.low, space.high, space.dtype
        bounds = {"low": tuple(map(float, low)), "high": tuple(map(float, high))}
        return ActionSpec(n=0, shape=space.shape, **bounds), lambda action: np.clip(action, low, high).astype(dtype, copy=False)
    raise ConfigError(
        "action space not supported", found=space, wanted="Discrete, or a float Box of 1 axis with finite bounds", fix="wrap it"
    )
