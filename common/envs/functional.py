"""Environments written in JAX as pure functions, of gymnasium or of gymnax: all B of them are one compiled step.

    env: {id: phys2d/CartPole-v1, num_envs: 1024}
    env: {entry_point: "common.envs.functional:gymnax", kwargs: {id: CartPole-v1}, num_envs: 1024}

They run on JAX's default device. Actions go there and rows come back as numpy arrays once for each step, without a copy where
that device is the CPU. Between two steps the states are numpy arrays too, so that lockstep can save and restore them.
JAX is an optional package (extra `jax`): nothing else imports this module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.envs.functional_jax_env import FunctionalJaxEnv
from gymnasium.spaces import Box, Space
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit
from numpy.typing import NDArray

from common import extensions
from common.errors import ConfigError

jax: Any = import_module("jax")
jnp: Any = import_module("jax.numpy")

_OF_MAKE = (OrderEnforcing, PassiveEnvChecker, TimeLimit)  # what `gymnasium.make` itself adds


@dataclass(frozen=True, kw_only=True)
class Rules:
    """One environment as pure functions of JAX. States are trees of arrays; `key` is a raw one, of `jax.random.PRNGKey`."""

    observation_space: Space[Any]
    action_space: Space[Any]
    begin: Callable[[Any], tuple[Any, Any]]  # key -> state, observation
    step: Callable[[Any, Any, Any], tuple[Any, ...]]  # key, state, action -> state, observation, reward, terminated, truncated


class _Rows(NamedTuple):
    """Of B environments between two steps."""

    key: Any  # of all random numbers to come
    state: list[Any]  # arrays [B, ...] of the tree of states
    age: Any  # [B] env steps in the episode
    ended: Any  # [B]: the next step resets


class FunctionalVectorEnv(VectorEnv[Any, Any, Any]):
    """Environments by the same `Rules`, each reset in the step after its end."""

    def __init__(self, rules: Rules, num_envs: int, *, limit: int = 0) -> None:
        """Build `num_envs` (B) of them; an episode is truncated after `limit` env steps, 0: by the rules alone."""
        self.num_envs, self.metadata = num_envs, {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space, self.single_action_space = rules.observation_space, rules.action_space
        self.observation_space = batch_space(rules.observation_space, num_envs)
        self.action_space = batch_space(rules.action_space, num_envs)
        self._begin, self._advance = _compiled(rules, num_envs, limit)
        self._rows: tuple[Any, ...] = ()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin B episodes, whose random numbers follow from `seed`; None: from one that is drawn."""
        del options
        chosen = int(np.random.default_rng().integers(2**31)) if seed is None else seed
        rows, observation = self._begin(jax.random.PRNGKey(chosen))
        self._rows = _on_host(rows)
        return _on_host(observation), {}

    def step(self, actions: NDArray[Any]) -> tuple[Any, NDArray[Any], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Actions [B, ...] → observations, rewards [B] float32, terminated and truncated [B]."""
        rows, *seen = self._advance(_Rows(*self._rows), actions)
        self._rows = _on_host(rows)
        observation, reward, terminated, truncated = map(_on_host, seen)
        return observation, reward, terminated, truncated, {}


def _compiled(rules: Rules, count: int, limit: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The two functions of `FunctionalVectorEnv`, compiled at their first call for B = `count`."""
    begin_all, step_all = jax.vmap(rules.begin), jax.vmap(rules.step)
    _, tree = jax.tree.flatten(jax.eval_shape(rules.begin, jax.random.PRNGKey(0))[0])

    def begin(key: Any) -> tuple[_Rows, Any]:
        key, drawn = jax.random.split(key)
        state, observation = begin_all(jax.random.split(drawn, count))
        return _Rows(key, jax.tree.leaves(state), jnp.zeros(count, int), jnp.zeros(count, bool)), observation

    def advance(rows: _Rows, action: Any) -> tuple[Any, ...]:
        key, moved, begun = jax.random.split(rows.key, 3)
        state = jax.tree.unflatten(tree, rows.state)
        state, *seen = step_all(jax.random.split(moved, count), state, action)
        observation, reward, terminated, truncated = seen
        age = jnp.where(rows.ended, 0, rows.age + 1)
        terminated = terminated.astype(bool) & ~rows.ended
        truncated = (truncated.astype(bool) | ((age >= limit) & (limit > 0))) & ~terminated & ~rows.ended

        def first(new: Any, old: Any) -> Any:
            return jnp.where(rows.ended.reshape(count, *[1] * (new.ndim - 1)), new, old)

        state, observation = jax.tree.map(first, begin_all(jax.random.split(begun, count)), (state, observation))
        after = _Rows(key, jax.tree.leaves(state), age, terminated | truncated)
        return after, observation, reward.astype(jnp.float32), terminated, truncated

    return partial(jax.jit(begin)), partial(jax.jit(advance))  # for lockstep a partial is a constant, a compiled function is not


def _on_host(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tuple(tree) if isinstance(tree, _Rows) else tree)


def gymnax(*, id: str, num_envs: int, render_mode: str | None = None, **params: Any) -> FunctionalVectorEnv:  # noqa: A002
    """An environment of gymnax (1.0 or later) by its `id`; `params` replace those of its `default_params`, such as a time limit.

    It draws no pictures. Images come with their channels first.
    """
    del render_mode
    package, spaces = import_module("gymnax"), import_module("gymnax.environments.spaces")
    if id not in package.registered_envs:
        raise ConfigError("unknown environment of gymnax", found=id, wanted=extensions.similar_names(id, package.registered_envs))
    env, chosen = package.make(id)
    chosen = chosen.replace(**params)

    space = spaces.gymnax_space_to_gym_space(env.observation_space(chosen))
    image = isinstance(space, Box) and len(space.shape) == 3  # noqa: PLR2004 - height, width, channels

    def shown(observation: Any) -> Any:
        return jnp.moveaxis(observation, -1, 0) if image else observation

    def begin(key: Any) -> tuple[Any, Any]:
        observation, state = env.reset_env(key, chosen)
        return state, shown(observation)

    def step(key: Any, state: Any, action: Any) -> tuple[Any, ...]:
        observation, state, reward, terminated, _ = env.step_env(key, state, action, chosen)
        return state, shown(observation), reward, terminated, env.is_truncated(state, chosen)

    if image:
        space = Box(np.moveaxis(space.low, -1, 0), np.moveaxis(space.high, -1, 0), dtype=space.dtype)
    acted = spaces.gymnax_space_to_gym_space(env.action_space(chosen))
    rules = Rules(observation_space=space, action_space=acted, begin=begin, step=step)
    return FunctionalVectorEnv(rules, num_envs)


def of_gymnasium(env_id: str, num_envs: int, **kwargs: Any) -> FunctionalVectorEnv | None:
    """A functional environment of gymnasium by its id; `kwargs` are those of the id. None where it is more than its functions.

    Gymnasium's own vector environment compiles nothing: 256 CartPoles took 177 env steps/s beside 1.5 million.
    """
    made = gymnasium.make(env_id, **kwargs)
    if not _is_bare(made):
        return None
    env, spec = getattr(made.unwrapped, "func_env"), made.spec  # noqa: B009  of its own kind alone

    def begin(key: Any) -> tuple[Any, Any]:
        state = env.initial(rng=key)
        return state, env.observation(state, key)

    def step(key: Any, state: Any, action: Any) -> tuple[Any, ...]:
        after = env.transition(state, action, key)
        ended = env.terminal(after, key)
        return after, env.observation(after, key), env.reward(state, action, after, key), ended, jnp.zeros_like(ended)

    rules = Rules(observation_space=env.observation_space, action_space=env.action_space, begin=begin, step=step)
    return FunctionalVectorEnv(rules, num_envs, limit=(spec and spec.max_episode_steps) or 0)


def _is_bare(made: gymnasium.Env[Any, Any]) -> bool:
    """Whether nothing stands around the functions of an environment but `_OF_MAKE`: a wrapper would not be compiled."""
    around: list[type] = []
    while isinstance(made, gymnasium.Wrapper):
        around.append(type(made))
        made = made.env
    inner = type(made)
    alone = (inner.step, inner.reset) == (FunctionalJaxEnv.step, FunctionalJaxEnv.reset)
    return alone and set(around) <= set(_OF_MAKE) and around.count(TimeLimit) <= 1
