"""Build environments that are stepped side by side from `EnvSettings`, for every origin and autoreset mode.

Three origins: Atari on ale-py's native vector environment, a gymnasium id, a function of the user's. All of them end in
one `VectorEnvironment`, whose `Transition` describes a row so that code after it is the same for both modes:

    next_step   the row after an end ignores its action and only brings the reset: valid False, start True
    same_step   the row that ends an episode brings the next one's first observation: start True; the last
                observation of a truncated episode, which is bootstrapped from, comes apart in `final_observation`
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import Any, NamedTuple, TypeAlias

import ale_py
import gymnasium
import numpy as np
from ale_py.vector_env import AtariVectorEnv
from gymnasium.spaces import Space
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from numpy.typing import NDArray

from common import extensions
from common.envs import state
from common.envs.spaces import cropped, describe_action, describe_observation
from common.envs.spec import EnvSettings, EnvSpec
from common.errors import ConfigError, ResourceError, RookeryError
from common.units import Seconds

Array: TypeAlias = NDArray[Any]
AnyVectorEnv: TypeAlias = VectorEnv[Any, Any, Any]

_MODES = {"next_step": AutoresetMode.NEXT_STEP, "same_step": AutoresetMode.SAME_STEP}
_ATARI_KWARGS = ("maxpool", "thread_affinity_offset", "use_fire_reset")  # the rest has a setting, or breaks a row's meaning
SEEDS = 2**31  # ale-py takes no larger seed
PICTURE = "rgb_array"  # gymnasium's render mode
TRIED_SECONDS: Seconds = 0.5  # for the env steps of a first look at an environment
LEAST_TRIED = 2  # env steps, however slow: enough for a step that always raises, or a reward that is always NaN


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
        shape, dtype, self._observed = describe_observation(env.single_observation_space)
        if isinstance(env, AtariVectorEnv):
            shape, self._observed = cropped(shape, self._observed, settings.crop)
        action, self.to_native = describe_action(env.single_action_space)
        self.num_envs: int = env.num_envs
        self.action_space: Space[Any] = env.single_action_space  # of one environment, as `to_native` gives it
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
        """Begin B episodes, environment b with `seed + b` where it is seeded alone; return the first observations [B, *frame]."""
        observation, info = self._env.reset(seed=seed % (SEEDS - self.num_envs))
        if self._counts_lives:
            self._lives = info["lives"].copy()
        self._ended = np.zeros(self.num_envs, np.bool_)
        return self._observed(observation)

    def step(self, action: Array) -> Transition:
        """Take `action`: [B] int64 from 0, or [B, A] float32, clipped to the space's bounds here."""
        observed, rewards, terminated, truncated, info = self._env.step(self.to_native(action))
        observation, reward = self._observed(observed), np.asarray(rewards, np.float32)
        after_end, self._ended = self._ended, terminated | truncated
        life_lost = self._life_lost(info)
        if self._same_step:
            final = self._finals(truncated, info)
            return Transition(observation, reward, terminated, truncated, self._all_valid, self._ended, *final, life_lost)
        if after_end.any():  # a reset row has no meaning beside its observation
            alive = ~after_end
            reward, terminated, truncated = np.where(alive, reward, np.float32(0)), terminated & alive, truncated & alive
            self._ended = self._ended & alive
        final = self._no_index, self._no_frames
        return Transition(observation, reward, terminated, truncated, ~after_end, after_end, *final, life_lost)

    @property
    def native(self) -> AnyVectorEnv:
        """The environments as gymnasium knows them."""
        return self._env

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


def make(settings: EnvSettings, *, num_envs: int | None = None, render: bool = False) -> VectorEnvironment:
    """Build `num_envs` (default: the setting) environments, outside Atari with pictures where `render` asks for them.

    Raises `ConfigError` or `ResourceError`, saying what to do.
    """
    wanted = settings.num_envs if num_envs is None else num_envs
    environment = _make(settings, wanted, render=render)
    if environment.num_envs != wanted:
        environment.close()
        raise ConfigError(
            f"{settings.name} makes another number of environments",
            found=environment.num_envs,
            wanted=wanted,
            fix="let its function take num_envs, or set env.num_envs to what it makes",
        )
    return environment


def spec_of(settings: EnvSettings, *, env_steps: int = 0) -> EnvSpec:
    """Describe the environment: build one, begin an episode, take random actions, and close it again.

    It takes `env_steps` of them, or as many as fit into `TRIED_SECONDS`, and two at least. Errors as in `make`, and `ConfigError`
    where the environment itself fails, shows another shape than its space, or returns numbers that are not finite.
    """
    with tried_out(settings, env_steps=env_steps) as environment:
        return environment.spec


@contextmanager
def tried_out(settings: EnvSettings, *, env_steps: int = 0) -> Iterator[VectorEnvironment]:
    """Yield one environment that began an episode and took actions as in `spec_of`; close it afterwards. Errors as there."""
    wanted = "an environment"
    with ExitStack() as stack:
        try:
            environment = stack.enter_context(closing(_make(settings, 1)))
            wanted = f"observations of shape {environment.spec.observation_shape}"
            _require_observation(environment.reset(0), environment.spec, settings)
            random, until = np.random.default_rng(0), time.monotonic() + TRIED_SECONDS
            for number in range(env_steps):
                if number >= LEAST_TRIED and time.monotonic() >= until:
                    break
                transition = environment.step(_random_actions(environment, random))
                _require_observation(transition.observation, environment.spec, settings)
                _require_finite(transition.reward, "reward", settings)
        except RookeryError:
            raise
        except Exception as error:  # a user's own code may raise anything, and no restart helps
            found = f"{type(error).__name__}: {error}"
            stage = "is built or begins an episode" + (", or in its first env steps" if env_steps else "")
            fact = f"{settings.name} fails when it {stage}"
            raise ConfigError(fact, found=found, wanted=wanted, fix="mend it, or env.kwargs") from error
        yield environment


def _require_observation(observation: Array, spec: EnvSpec, settings: EnvSettings) -> None:
    shown = observation.shape[1:]
    if shown != spec.observation_shape:
        fact = f"{settings.name} shows what its observation space does not say"
        raise ConfigError(fact, found=f"shape {shown}", wanted=f"shape {spec.observation_shape}", fix="mend it")
    _require_finite(observation, "observation", settings)


def _require_finite(values: Array, what: str, settings: EnvSettings) -> None:
    if not np.isfinite(values).all():
        fact, found = f"{settings.name} returns a {what} that is not finite", str(values[~np.isfinite(values)][0])
        raise ConfigError(fact, found=found, wanted="finite numbers", fix="mend it")


def example_frames(settings: EnvSettings, *, seed: int, num_envs: int = 2, steps: int = 512) -> Array:
    """Return observations of random play, [steps * num_envs, *frame], as they are before training.

    Few environments and many steps, since an Atari environment takes as long to begin as to play 700 steps.
    """
    environment = _make(settings, num_envs)
    random = np.random.default_rng(seed)
    environment.reset(seed)
    frames = [environment.step(_random_actions(environment, random)).observation.copy() for _ in range(steps)]
    environment.close()
    return np.concatenate(frames)


def _random_actions(environment: VectorEnvironment, random: np.random.Generator) -> Array:
    """Return an action for each environment, uniform over its space."""
    action, num_envs = environment.spec.action, environment.num_envs
    if action.discrete:
        return random.integers(action.n, size=num_envs)
    return random.uniform(action.low, action.high, size=(num_envs, *action.shape)).astype(np.float32)


def _make(settings: EnvSettings, num_envs: int, *, render: bool = False) -> VectorEnvironment:
    mode = _MODES[settings.autoreset]
    if settings.entry_point:
        env = _from_function(settings, num_envs, mode, render=render)
    elif settings.id.startswith("ALE/"):
        env = make_atari(settings, num_envs, mode)
    else:
        env = _from_registry(settings, num_envs, mode, render=render)
    try:
        # ale-py writes its mode into metadata shared by all its environments: there the setting is the truth
        return VectorEnvironment(env, settings=settings, mode=mode if isinstance(env, AtariVectorEnv) else _mode_of(env))
    except ConfigError:
        env.close()
        raise


def make_atari(settings: EnvSettings, num_envs: int, mode: AutoresetMode, **changed: Any) -> AtariVectorEnv:
    """Atari, native: one frame per observation (stacks are ours), raw rewards, no sticky actions unless asked for.

    `changed` are arguments of `AtariVectorEnv` that replace those of the settings.
    """
    gymnasium.register_envs(ale_py)
    if settings.id not in gymnasium.registry:
        raise _unknown(settings.id)
    if unknown := sorted(set(settings.kwargs) - set(_ATARI_KWARGS)):
        raise ConfigError("env.kwargs not known for Atari", found=unknown, wanted=f"some of {_ATARI_KWARGS}", fix="see env.*")
    arguments: dict[str, Any] = {
        "autoreset_mode": mode,
        "num_threads": settings.threads,
        "img_height": settings.height,
        "img_width": settings.width,
        "stack_num": 1,
        "frameskip": settings.frame_skip,
        "noop_max": settings.noop_max,
        "repeat_action_probability": settings.sticky_actions,
        "full_action_space": settings.full_action_space,
        "max_num_frames_per_episode": settings.max_episode_frames,
        "reward_clipping": False,
    }
    game = gymnasium.registry[settings.id].kwargs["game"]
    try:
        return AtariVectorEnv(game, num_envs, **(arguments | settings.kwargs | changed))
    except OSError as error:
        fix = "pip install --force-reinstall ale-py, and unset ALE_ROMS_DIR"
        raise ResourceError(f"no ROM for {settings.id}", found=str(error), fix=fix) from error


def _from_registry(settings: EnvSettings, num_envs: int, mode: AutoresetMode, *, render: bool) -> AnyVectorEnv:
    """Build a gymnasium id: its own vector environment where it has one, except for same_step and pictures, which it may lack.

    For `module:Env-v0` the module is imported first, which registers the id.
    """
    module, colon, env_id = settings.id.rpartition(":")
    if colon and not (module and env_id):
        raise ConfigError("env.id is not complete", found=repr(settings.id), wanted="module:Env-v0")
    if colon:
        extensions.import_module(module, setting="env.id")
    kwargs = settings.kwargs | ({"render_mode": PICTURE} if render else {})
    try:
        spec = gymnasium.spec(env_id)
        if spec.vector_entry_point is not None and mode is AutoresetMode.NEXT_STEP and not render:
            return gymnasium.make_vec(env_id, num_envs, **kwargs)
        asked = {"autoreset_mode": mode}
        return gymnasium.make_vec(env_id, num_envs, vectorization_mode="sync", vector_kwargs=asked, **kwargs)
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        raise _not_installed(settings.id, error) from error
    except gymnasium.error.Error as error:
        if env_id not in gymnasium.registry:
            raise _unknown(env_id) from error
        raise ConfigError(f"{settings.id} cannot be built", found=str(error), fix="look at env.kwargs") from error
    except TypeError as error:
        raise ConfigError(f"{settings.id} does not take env.kwargs", found=kwargs, wanted=str(error)) from error


def _from_function(settings: EnvSettings, num_envs: int, mode: AutoresetMode, *, render: bool) -> AnyVectorEnv:
    """Call the user's function once for a vector environment, or once for each single one."""
    function = extensions.import_attribute(settings.entry_point, setting="env.entry_point")
    taken = inspect.signature(function).parameters
    offered = {"num_envs": num_envs} | ({"render_mode": PICTURE} if render else {})
    kwargs = settings.kwargs | {name: value for name, value in offered.items() if name in taken}
    build = extensions.bind_arguments(function, entry_point=settings.entry_point, setting="env.kwargs", kwargs=kwargs)
    env = build()
    if isinstance(env, VectorEnv):
        return env
    if not isinstance(env, gymnasium.Env):
        raise ConfigError(f"{settings.entry_point} made no environment", found=type(env), wanted="a gymnasium Env or VectorEnv")
    built = iter([env])
    return SyncVectorEnv([lambda: next(built, None) or build()] * num_envs, autoreset_mode=mode)


def _unknown(env_id: str) -> ConfigError:
    wanted = extensions.similar_names(env_id, gymnasium.registry)
    fix = "or, for an environment of another package, env.id=PACKAGE:ID, or env.entry_point"
    return ConfigError("unknown environment id", found=env_id, wanted=wanted, fix=fix)


def _not_installed(env_id: str, error: Exception) -> ResourceError:
    """Name the package: gymnasium's messages name an extra of its own, Python's the module."""
    text = str(error)
    extra = re.search(r"gymnasium\[[a-z0-9-]+\]", text)
    package = extra[0] if extra else getattr(error, "name", None)
    found = f"no {package}" if package else text
    fix = f'pip install "{package}"' if package else ""
    return ResourceError(f"{env_id} needs a package that is not installed", found=found, fix=fix)


def _mode_of(env: AnyVectorEnv) -> AutoresetMode:
    """Return the autoreset mode of a vector environment, which must declare it: the meaning of its rows depends on it."""
    mode = env.metadata.get("autoreset_mode")
    if mode not in _MODES.values():
        raise ConfigError(
            f"{type(env).__name__} does not reset itself",
            found=f'metadata["autoreset_mode"] {mode}',
            wanted="AutoresetMode.NEXT_STEP or AutoresetMode.SAME_STEP",
        )
    return AutoresetMode(mode)
