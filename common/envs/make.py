"""Build environments that are stepped side by side from `EnvSettings`.

Three origins: Atari on ale-py's native vector environment, a gymnasium id, a function of the user's, whose environment may have
several agents. All of them end in one `VectorEnvironment`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from types import MappingProxyType
from typing import Any

import ale_py
import gymnasium
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from common import extensions
from common.envs.agents import AgentRows, has_agents, takes_turns
from common.envs.observation import AnyVectorEnv
from common.envs.spec import EnvSettings
from common.envs.vector import VectorEnvironment
from common.errors import ConfigError, ResourceError

_MODES = {"next_step": AutoresetMode.NEXT_STEP, "same_step": AutoresetMode.SAME_STEP}
_ATARI_KWARGS = ("maxpool", "thread_affinity_offset", "use_fire_reset")  # the rest has a setting, or breaks a row's meaning
ATARI_START: Mapping[str, Any] = MappingProxyType({"use_fire_reset": True})  # of an episode, unless env.kwargs has another value
PICTURE = "rgb_array"  # gymnasium's render mode


def make(settings: EnvSettings) -> VectorEnvironment:
    """Build `env.num_envs` environments. Raises `ConfigError` or `ResourceError`, with what to do."""
    environment = build(settings, settings.num_envs)
    if environment.num_envs != settings.num_envs:
        environment.close()
        raise wrong_number(settings, environment)
    return environment


def wrong_number(settings: EnvSettings, made: VectorEnvironment) -> ConfigError:
    """Return the error of a function that cannot make the number of environments, or rows of agents, that one process steps."""
    found, wanted = made.num_envs, settings.num_envs
    if made.agents > 1:
        fact, fix = f"{settings.name} has {made.agents} agents, of which each has a row", "change env.num_envs"
        return ConfigError(fact, found=f"{wanted} rows in a process", wanted=f"a multiple of {made.agents}", fix=fix)
    fix = "let its function take num_envs, or set env.num_envs to what it makes, times policy_server.workers where there are any"
    return ConfigError(f"{settings.name} makes another number of environments", found=found, wanted=wanted, fix=fix)


def build(settings: EnvSettings, num_envs: int, *, render: bool = False) -> VectorEnvironment:
    """As `make`, outside Atari with pictures where `render` asks for them; a user's function may make another number.

    Of an environment of several agents it makes the least number of copies that have `num_envs` agents.
    """
    mode = _MODES[settings.autoreset]
    if entry_point := settings.entry_point or _of_pettingzoo(settings.id):
        env = _from_function(settings, entry_point, num_envs, mode, render=render)
    elif settings.is_atari:
        env = make_atari(settings, num_envs, mode)
    else:
        env = _from_registry(settings, num_envs, mode, render=render)
    try:
        _require_distinct(settings, env)
        # ale-py writes its mode into metadata shared by all its environments
        mode = env.autoreset_mode if isinstance(env, AtariVectorEnv) else _mode_of(env)
        return VectorEnvironment(env, settings=settings, mode=mode)
    except ConfigError:
        with suppress(Exception):  # one environment in several rows is closed several times
            env.close()
        raise


def _require_distinct(settings: EnvSettings, env: AnyVectorEnv) -> None:
    """Refuse (ConfigError) rows that would step the same environment, which ends an episode of all of them at once."""
    built: list[Any] = list(env.envs) if isinstance(env, SyncVectorEnv) else env.copies if isinstance(env, AgentRows) else []
    distinct = len({id(_within_wrappers(each)) for each in built})
    if distinct < len(built):
        fact, fix = f"{settings.name} returns an environment that it returned before", "let its function build one at each call"
        raise ConfigError(fact, found=distinct, wanted=f"{len(built)} environments", fix=fix)


def _within_wrappers(env: Any) -> Any:
    """Return what a function returned, without the wrappers that gymnasium and this module put around it."""
    while isinstance(env, gymnasium.Wrapper) and type(env).__module__.partition(".")[0] in {"gymnasium", "common"}:
        env = env.env
    return env


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
        **ATARI_START,
    }
    game = gymnasium.registry[settings.id].kwargs["game"]
    try:
        return AtariVectorEnv(game, num_envs, **(arguments | settings.kwargs | changed))
    except OSError as error:
        fix = "pip install --force-reinstall ale-py, and unset ALE_ROMS_DIR"
        raise ResourceError(f"no ROM for {settings.id}", found=str(error), fix=fix) from error


def _require_no_atari(spec: gymnasium.envs.registration.EnvSpec, name: str) -> None:
    """Refuse (ConfigError) a game that `make_atari` does not build: no setting of Atari would have an effect."""
    if str(spec.entry_point).startswith("ale_py"):
        game = spec.id.rpartition("/")[2].partition("-")[0].removesuffix("NoFrameskip")
        raise ConfigError("an Atari game by another id", found=name, wanted="ALE/GAME-v5", fix=f"set env.id=ALE/{game}-v5")


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
        _require_no_atari(spec, settings.id)
        if spec.vector_entry_point is not None and mode is AutoresetMode.NEXT_STEP and not render:
            made = gymnasium.make_vec(env_id, num_envs, **kwargs)
            return (_compiled(env_id, num_envs, kwargs) if hasattr(made, "func_env") else None) or made
        asked = {"autoreset_mode": mode}
        wrappers = [_KeepsLast] if mode is AutoresetMode.SAME_STEP else []
        made = gymnasium.make_vec(env_id, num_envs, vectorization_mode="sync", vector_kwargs=asked, wrappers=wrappers, **kwargs)
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        raise _not_installed(settings.id, error) from error
    except gymnasium.error.Error as error:
        if env_id not in gymnasium.registry:
            raise _unknown(env_id) from error
        raise ConfigError(f"{settings.id} cannot be built", found=str(error), fix="look at env.kwargs") from error
    except TypeError as error:
        found = f"{kwargs} ({error})"
        raise ConfigError(f"{settings.id} does not take env.kwargs", found=found, fix="correct env.kwargs") from error
    if render or not any(hasattr(each.unwrapped, "func_env") for each in getattr(made, "envs", ())):
        return made
    compiled = _compiled(env_id, num_envs, kwargs)  # of an id without a vector environment of its own
    if compiled is None or mode is AutoresetMode.NEXT_STEP:
        return compiled or made
    wanted = "next_step, where all of them are one compiled step"
    raise ConfigError(f"env.autoreset of {settings.id}, which is written in JAX", found=settings.autoreset, wanted=wanted)


def _compiled(env_id: str, num_envs: int, kwargs: dict[str, Any]) -> AnyVectorEnv | None:
    """Build an id whose environment is written in JAX: another package, which few runs need. None where it has wrappers."""
    from common.envs import functional  # noqa: PLC0415

    return functional.of_gymnasium(env_id, num_envs, **kwargs)


def _of_pettingzoo(env_id: str) -> str:
    """Return the entry point that an id such as `mpe2:simple_spread_v3` names; empty for an id of gymnasium."""
    module, _, name = env_id.rpartition(":")
    if not (module and name.isidentifier()):
        return ""
    extensions.import_module(module, setting="env.id")  # which may register the id
    return "" if name in gymnasium.registry else f"{module}.{name}:parallel_env"


def _from_function(settings: EnvSettings, entry_point: str, num_envs: int, mode: AutoresetMode, *, render: bool) -> AnyVectorEnv:
    """Call the user's function once for a vector environment, or once for each single one."""
    function = extensions.import_attribute(entry_point, setting="env.entry_point" if settings.entry_point else "env.id")
    taken = inspect.signature(function).parameters
    if "num_envs" in settings.kwargs and "num_envs" in taken:
        found, wanted = settings.kwargs["num_envs"], "other arguments, because env.num_envs has the number"
        raise ConfigError("env.kwargs has num_envs", found=found, wanted=wanted, fix="set env.num_envs")
    offered = {"num_envs": num_envs} | ({"render_mode": PICTURE} if render else {})
    kwargs = settings.kwargs | {name: value for name, value in offered.items() if name in taken}
    if render and any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        kwargs["render_mode"] = PICTURE  # as all functions `parallel_env` of PettingZoo take it
    build = extensions.bind_arguments(function, entry_point=entry_point, setting="env.kwargs", kwargs=kwargs)
    env = build()
    if isinstance(env, VectorEnv):
        inner = env.unwrapped
        if isinstance(inner, SyncVectorEnv) and inner.metadata.get("autoreset_mode") is AutoresetMode.SAME_STEP:
            inner.envs = [_KeepsLast(each) for each in inner.envs]
        return env
    if not isinstance(env, gymnasium.Env):
        return _of_agents(settings, env, build, num_envs)
    wrap = _KeepsLast if mode is AutoresetMode.SAME_STEP else lambda env: env
    return SyncVectorEnv([lambda: wrap(env), *[lambda: wrap(build())] * (num_envs - 1)], autoreset_mode=mode)


class _KeepsLast(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Gives the last observation of an episode as a copy.

    In same_step the environment is reset before that observation is used, and may write the next one to the same array.
    """

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """As of `gymnasium.Env`."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return deepcopy(observation) if terminated or truncated else observation, reward, terminated, truncated, info


def _of_agents(settings: EnvSettings, first: Any, build: Callable[[], Any], num_envs: int) -> AnyVectorEnv:
    if not has_agents(first):
        wanted = "a gymnasium Env or VectorEnv, or a PettingZoo ParallelEnv"
        raise ConfigError(f"{settings.name} made no environment", found=type(first), wanted=wanted)
    if takes_turns(first):
        fix = "let its function return pettingzoo.utils.aec_to_parallel(env)"
        raise ConfigError(f"{settings.name} has agents that take turns", found=type(first), wanted="a ParallelEnv", fix=fix)
    copies = -(-num_envs // len(first.possible_agents))
    return AgentRows([first, *(build() for _ in range(copies - 1))], name=settings.name)


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
