"""A policy with trained weights: a function from observations to actions, and the environment that it was trained for."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.wrappers import HumanRendering
from numpy.typing import ArrayLike, NDArray
from pydantic import ValidationError
from torch import Tensor, nn

from common.algorithms.api import NetworkPolicy, Policy
from common.conditions import unmet
from common.config.errors import config_error
from common.config.layers import merge
from common.config.schema import Settings
from common.envs.leaves import components_allowed, join_inputs, split
from common.envs.make import PICTURE
from common.envs.spec import ONE_ARRAY, EnvSettings, EnvSpec, Leaf
from common.errors import ConfigError
from common.policies.environment import RunEnvironment
from common.units import EnvSteps, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedPolicy:
    """A policy with the weights of one checkpoint: call it with one observation, or with a batch. One thread uses it."""

    env: EnvSpec
    agents: int  # of one environment, each a row
    version: Version
    env_steps: EnvSteps  # that the weights were trained on
    run_id: str
    settings: Settings  # of the run; `model` as the weights were trained with
    policy: Policy
    to_native: Callable[[NDArray[Any]], NDArray[Any]]  # from the policy's actions to those of the environment

    def __call__(self, observation: ArrayLike | Mapping[str, ArrayLike], *, greedy: bool = True) -> Any:
        """Return the action for one observation, or the actions [N, ...] for a batch [N, *input], as the environment takes them.

        Of several arrays an observation is a dict of them by path, as `make_env` returns it, the action mask as "action_mask".
        `greedy` takes the best action; otherwise actions are drawn as an evaluator draws them. Raises `ConfigError` for an
        observation of other names, shapes or types than `env.inputs`, with discrete values outside of their choices, or with
        numbers that are not finite, and for one that gives a continuous action that is not finite.

        A policy with memory takes the batches of the same N environments one after the other: see `reset`.
        """
        batch, single = self.batch(observation)
        self._require_begun(len(batch))
        actions = self.to_native(self.act(batch, greedy=greedy))
        return actions[0] if single else actions

    def act(self, batch: Tensor, *, greedy: bool) -> NDArray[Any]:
        """Return the policy's actions [N, ...] for the input [N, *input] of the network.

        Raises `ConfigError` where an observation or a continuous action is not finite: a discrete policy would act on NaN.
        """
        for leaf in split(self.env, batch.numpy()):
            _require_finite(f"observations {leaf.path}".strip(), leaf.values, fix="correct the environment")
        actions = self.policy.act(batch, greedy=greedy)["action"].numpy()
        _require_finite("actions", actions, fix="name another checkpoint")
        return actions

    def reset(self, start: ArrayLike | None = None) -> None:
        """Forget earlier observations: of all environments, or of those where `start` [N] is True.

        To be called before the first observation of each episode. Without memory it has no effect. Raises `ConfigError` for a
        `start` of another number of environments than the last batch had.
        """
        if not (isinstance(self.policy, NetworkPolicy) and len(self.policy.memory)):
            return
        memory = self.policy.memory
        if start is None:
            self.policy.memory = memory[:0]
        elif np.shape(start) != (len(memory),):
            raise ConfigError("start of other environments", found=list(np.shape(start)), wanted=[len(memory)])
        else:
            self.policy.memory = memory.masked_fill(torch.tensor(start, dtype=torch.bool).unsqueeze(1), 0.0)

    def _require_begun(self, count: int) -> None:
        """Let a policy that has forgotten all begin `count` episodes. Raises `ConfigError` where it remembers another number."""
        if not (self.settings.model.recurrent and isinstance(self.policy, NetworkPolicy)):
            return
        if not len(self.policy.memory):
            self.policy.begin_episodes(torch.ones(count, dtype=torch.bool))
        elif len(self.policy.memory) != count:
            wanted, fix = f"{len(self.policy.memory)}, as before", "call policy.reset() before other environments"
            raise ConfigError("observations of another number of environments", found=count, wanted=wanted, fix=fix)

    def batch(self, observation: ArrayLike | Mapping[str, ArrayLike]) -> tuple[Tensor, bool]:
        """Return the input [N, *input] of the network for a call, and whether it is one observation alone. Errors as there."""
        inputs = self.env.inputs
        given = observation if isinstance(observation, Mapping) else {inputs[0].path: observation}
        if set(given) != {leaf.path for leaf in inputs}:
            found = f"{sorted(map(str, given))}" if isinstance(observation, Mapping) else "one array"
            raise ConfigError("observation of other arrays", found=found, wanted=f"{[leaf.path for leaf in inputs]}")
        arrays = [_array(leaf, given[leaf.path]) for leaf in inputs]
        single = arrays[0].shape == inputs[0].shape
        batches = [_batch(leaf, array, single=single) for leaf, array in zip(inputs, arrays, strict=True)]
        if len(set(map(len, batches))) > 1:
            found = ", ".join(f"{len(batch)} of {leaf.path}" for leaf, batch in zip(inputs, batches, strict=True))
            raise ConfigError("a batch of observations", found=found, wanted="as many of each array")
        if self.env.action_mask:
            allowed = components_allowed(self.env.action.choices, batches[-1])
            rows = allowed.all(axis=1)
            if not rows.all() and (self.agents == 1 or not rows.any()):  # several agents: those that have left may have zeros
                row = rows.argmin()
                found, wanted = f"no choice of component {allowed[row].argmin()} in row {row}", "one of each component"
                raise ConfigError("an action mask allows no action", found=found, wanted=wanted)
        return torch.from_numpy(join_inputs(self.env, batches)), single

    @property
    def module(self) -> nn.Module:
        """The network that acts. Raises `ConfigError` for a policy of a user's own that has none."""
        if not isinstance(self.policy, NetworkPolicy):
            found = type(self.policy).__name__
            raise ConfigError("the policy has no network that could be named", found=found, wanted="a rookery.NetworkPolicy")
        module: nn.Module = self.policy.network
        return module

    def env_settings(self, **overrides: Any) -> EnvSettings:
        """Return the section `env` of the run with `overrides` merged in. Raises `ConfigError` for a value that is not valid."""
        changes = merge(self.settings.env.model_dump(mode="json"), overrides)
        settings = with_changes(self.settings, "env", changes, source="argument")
        idle, fields = {key for key, *_ in unmet(settings)}, EnvSettings.model_fields
        changed = {key for key in overrides if getattr(settings.env, key) != fields[key].get_default()}
        require_heeded(settings.env, changed, [key.removeprefix("env.") for key in idle])
        return settings.env

    def make_env(self, render_mode: str | None = None, **overrides: Any) -> gymnasium.Env[Any, Any]:
        """Return one environment of the run, its observations prepared and stacked as the policy takes them.

        Args:
            render_mode: None, "rgb_array", "rgb_array_list" (all pictures since the last call of `render`) or "human".
            overrides: settings of section `env`, such as `sticky_actions=0.25`; `kwargs` add to the run's, `{}` removes those.

        Raises:
            ConfigError: a setting is not valid, the environment cannot be drawn, or it does not fit the policy.
        """
        environment = RunEnvironment(
            self.env_settings(**overrides), render_mode=PICTURE if render_mode == "human" else render_mode
        )
        try:
            require_heeded(self.settings.env, overrides, environment.unheeded)
            require_fit(environment.run_spec, self.env, overrides)
        except ConfigError:
            environment.close()
            raise
        return HumanRendering(environment) if render_mode == "human" else environment


def _require_finite(name: str, rows: NDArray[Any], *, fix: str) -> None:
    """Raise `ConfigError` where a row of `rows` [N, ...] is not finite."""
    if rows.dtype.kind == "f" and (bad := int((~np.isfinite(rows)).any(axis=tuple(range(1, rows.ndim))).sum())):
        raise ConfigError(f"{name} are not finite", found=f"{bad} of {len(rows)}", wanted="finite numbers", fix=fix)


def _array(leaf: Leaf, given: ArrayLike) -> NDArray[Any]:
    """Return one array of an observation. Raises `ConfigError` for what is none, such as lists of several lengths."""
    try:
        return np.asarray(given)
    except (ValueError, TypeError, RuntimeError) as error:  # the last one is of a tensor that requires a gradient
        found, wanted = f"{type(given).__name__}: {error}", f"numbers of shape {leaf.shape}, or a batch of them"
        raise ConfigError(f"{_name(leaf)} is no array", found=found, wanted=wanted) from error


def _name(leaf: Leaf) -> str:
    return "observation" if leaf.path == ONE_ARRAY else f"observation {leaf.path}"


def _batch(leaf: Leaf, array: NDArray[Any], *, single: bool) -> NDArray[Any]:
    """Return a copy [N, *shape] of one array of an observation, or of a batch."""
    name = _name(leaf)
    if (array.shape if single else array.shape[1:]) != leaf.shape:
        wanted = f"{leaf.shape}, or a batch (N, {', '.join(map(str, leaf.shape))})"
        fix = "take observations of `make_env`, which stacks frames as the run did"
        raise ConfigError(f"{name} of another shape", found=str(array.shape), wanted=wanted, fix=fix)
    whole = leaf.choices and array.dtype.kind in "biu"  # of any type, such as the int8 of gymnasium's masks: the values decide
    if not (whole or np.can_cast(array.dtype, np.dtype(leaf.dtype), "same_kind")):
        raise ConfigError(f"{name} of another type", found=str(array.dtype), wanted=leaf.dtype)
    if leaf.choices and not ((array >= 0) & (array < np.array(leaf.choices))).all():
        wanted, fix = f"0 to below {leaf.choices}", "take off the start of the space, as `make_env` does"
        raise ConfigError(f"{name} outside of its choices", found=f"{array.min()} to {array.max()}", wanted=wanted, fix=fix)
    cast = np.array(array.reshape(-1, *leaf.shape), leaf.dtype)
    if cast.dtype.kind in "iu" and not np.array_equal(cast.ravel(), array.ravel()):
        raise ConfigError(f"{name} outside of its type", found=f"{array.min()} to {array.max()}", wanted=leaf.dtype)
    return cast


def with_changes(settings: Settings, section: str, changes: Mapping[str, Any], *, source: str) -> Settings:
    """Return `settings` with `changes` of one section, as JSON values. Raises `ConfigError`."""
    values = settings.model_dump(mode="json")
    values[section] |= changes
    try:
        return type(settings).model_validate_json(json.dumps(values), strict=True)
    except TypeError as error:  # of a value that JSON does not have
        wanted = "text, numbers, true, false, null, and lists and mappings of them"
        raise ConfigError(f"settings of {section} ({source})", found=str(error), wanted=wanted) from error
    except ValidationError as error:
        raise config_error(error, values, {f"{section}.{key}": source for key in changes}) from error


def require_heeded(env: EnvSettings, overrides: Iterable[str], unheeded: Collection[str]) -> None:
    """Refuse (ConfigError) overrides, as keys or "env.key=value", of settings without effect on how a policy is played here."""
    if idle := _keys(overrides).intersection(unheeded):
        found = ", ".join(f"env.{key}" for key in sorted(idle))
        raise ConfigError(f"settings without effect on {env.name}", found=found, wanted="none", fix="leave them out")


def require_fit(env: EnvSpec, trained: EnvSpec, overrides: Iterable[str]) -> None:
    """Refuse (ConfigError) `overrides` by which an environment has other observations or actions than that of the training."""
    if (env.inputs, env.action, env.action_mask) != (trained.inputs, trained.action, trained.action_mask):
        found, wanted = f"other settings of {sorted(_keys(overrides))}", "observations and actions of the run"
        raise ConfigError("the environment does not fit the policy", found=found, wanted=wanted, fix="leave them as they are")


def _keys(overrides: Iterable[str]) -> set[str]:
    return {text.partition("=")[0].removeprefix("env.") for text in overrides}
