"""Environments of several agents, as PettingZoo's `ParallelEnv` has them: a vector environment whose rows are agents.

Nothing here imports PettingZoo: an environment is recognised by its attributes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array
from numpy.typing import NDArray

from common.envs.spaces import require_integers
from common.envs.spec import ACTION_MASK
from common.errors import ConfigError

STARTS = "agent_starts"
"""Key in `info` of the rows [B] bool that bring a first observation. Other rows without an agent bring its last one again."""


def has_agents(env: object) -> bool:
    """Return whether `env` is an environment of several agents: a `ParallelEnv`, or an `AECEnv`, which `takes_turns`."""
    known = not isinstance(env, type) and getattr(env, "possible_agents", None)
    return bool(known) and callable(getattr(env, "observation_space", None))


def takes_turns(env: object) -> bool:
    """Return whether agents of `env` act one after the other, as those of an `AECEnv`."""
    return callable(getattr(env, "agent_iter", None))


def as_bools(ends: Any, *, name: str) -> NDArray[np.bool_]:
    """Return the ends of several rows; raise `ConfigError` where they are no numbers: None would be False."""
    array = np.asarray(ends)
    if array.dtype.kind not in "biuf":
        found, wanted = str(array.ravel()[:4].tolist()), "bools, or other numbers"
        raise ConfigError(f"{name} returns other ends than bools", found=found, wanted=wanted, fix="correct the environment")
    return array.astype(np.bool_, copy=False)


class AgentRows(VectorEnv[Any, Any, Any]):
    """Copies of one environment with A agents each: row c * A + a is agent a of copy c, in the order of `possible_agents`.

    A copy is reset in the step after its last agents left. The row of an agent that left before ignores its action and repeats
    its last observation until then. One thread uses it.
    """

    def __init__(self, copies: Sequence[Any], *, name: str) -> None:
        """Take over the `copies`. Raises `ConfigError` where they have other agents, or agents other spaces, than the first."""
        first = copies[0]
        self.copies, self.name = list(copies), name
        self.agents = tuple(first.possible_agents)
        if other := [env.possible_agents for env in copies if tuple(env.possible_agents) != self.agents]:
            fact, wanted = f"{name} makes copies of other agents", f"those of the first one, {list(self.agents)}, in each"
            raise ConfigError(fact, found=list(other[0]), wanted=wanted, fix="correct the environment")
        self.num_envs = len(self.copies) * len(self.agents)
        self.metadata = {**getattr(first, "metadata", {}), "autoreset_mode": AutoresetMode.NEXT_STEP}
        self.render_mode = getattr(first, "render_mode", None)
        self.single_observation_space = self._equal("observation_space")
        self.single_action_space = self._equal("action_space")
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._last: dict[int, Any] = {}  # by row, the last observation of an agent that has left: a copy
        self._mask_size = 0  # of the masks that agents were given so far

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in each copy, copy c with `seed + c * A`; `options` are ignored."""
        del options
        seen: dict[int, Any] = {}
        masks: dict[int, Any] = {}
        for number in range(len(self.copies)):
            self._begin(number, seen, masks, seed=None if seed is None else seed + number * len(self.agents))
        return self._batch(seen), self._info(masks, np.ones(self.num_envs, np.bool_))

    def step(self, actions: NDArray[Any]) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Take `actions` [B, ...], those of agents that are there."""
        seen, masks = dict(self._last), dict[int, Any]()
        reward = np.zeros(self.num_envs)
        terminated, truncated, starts = (np.zeros(self.num_envs, np.bool_) for _ in range(3))
        for number, env in enumerate(self.copies):
            rows = self._rows(number)
            acting = {agent: row for agent, row in rows.items() if row not in self._last}
            if not acting:
                self._begin(number, seen, masks)
                starts[list(rows.values())] = True
                continue
            observations, rewards, ends, cuts, infos = env.step({agent: actions[row] for agent, row in acting.items()})
            for what, values in {"observation": observations, "reward": rewards, "terminated": ends, "truncated": cuts}.items():
                self._require(what, values, acting)
            there = list(acting.values())
            terminated[there], truncated[there] = (
                as_bools([end[agent] for agent in acting], name=self.name) for end in (ends, cuts)
            )
            for agent, row in acting.items():
                seen[row], reward[row] = observations[agent], rewards[agent]
                if terminated[row] or truncated[row]:
                    seen[row] = self._last[row] = deepcopy(seen[row])  # the environment may write the next one over it
            self._note(number, infos, masks)
        return self._batch(seen), reward, terminated, truncated, self._info(masks, starts)

    def render(self) -> tuple[Any, ...]:
        """Return the picture of each copy."""
        return tuple(env.render() for env in self.copies)

    def close_extras(self, **_: Any) -> None:
        """Close the copies."""
        for env in self.copies:
            env.close()

    def _equal(self, kind: str) -> Any:
        """Return the `kind` of space that all agents of all copies have."""
        spaces = [(agent, getattr(env, kind)(agent)) for env in self.copies for agent in env.possible_agents]
        agent, space = spaces[0]
        for other, found in spaces:
            if found != space:
                fact = f"{self.name} has agents of different {kind.replace('_', ' ')}s"
                wanted, fix = "equal ones, because all agents share one policy", "pad them in a wrapper of your own"
                raise ConfigError(fact, found=f"{agent!r} {space}, {other!r} {found}", wanted=wanted, fix=fix)
        return space

    def _rows(self, number: int) -> dict[Any, int]:
        """Return the rows of the agents of a copy."""
        return {agent: row for row, agent in enumerate(self.agents, number * len(self.agents))}

    def _begin(self, number: int, seen: dict[int, Any], masks: dict[int, Any], seed: int | None = None) -> None:
        """Begin an episode in a copy; add the first observations and the masks of its agents."""
        observations, infos = self.copies[number].reset(seed=seed)
        self._require("first observation", observations, self.agents)
        for agent, row in self._rows(number).items():
            self._last.pop(row, None)
            seen[row] = observations[agent]
        self._note(number, infos, masks)

    def _require(self, what: str, values: Any, agents: Collection[Any]) -> None:
        """Raise `ConfigError` where one of `agents` is not in `values`."""
        if lost := [agent for agent in agents if agent not in values]:
            fact, wanted = f"{self.name} returns no {what} of agent {lost[0]!r}", f"one of each of {list(agents)}"
            raise ConfigError(fact, found=f"those of {list(values)}", wanted=wanted, fix="correct the environment")

    def _note(self, number: int, infos: Any, masks: dict[int, Any]) -> None:
        """Add the masks of the agents of a copy; raise `ConfigError` where its agents are not those that have not ended."""
        rows, found = self._rows(number), self.copies[number].agents
        given = ((row, infos.get(agent, {}).get(ACTION_MASK)) for agent, row in rows.items())
        masks.update((row, mask) for row, mask in given if mask is not None)
        wanted = [agent for agent, row in rows.items() if row not in self._last]
        if set(found) == set(wanted):
            return
        back, lost = [agent for agent in found if agent not in wanted], [agent for agent in wanted if agent not in found]
        fact = f"{back[0]!r} play after its end, or without a place" if back else f"{lost[0]!r} leave without an end"
        rule = "those of possible_agents that were neither terminated nor truncated in this episode"
        fix = "correct the environment"
        raise ConfigError(
            f"{self.name} lets agent {fact}", found=f"env.agents {list(found)}", wanted=f"{wanted}: {rule}", fix=fix
        )

    def _batch(self, seen: dict[int, Any]) -> Any:
        items, space = [seen[row] for row in range(self.num_envs)], self.single_observation_space
        require_integers(self.name, space, items)
        return concatenate(space, items, create_empty_array(space, self.num_envs))  # type: ignore[arg-type]  # its own type

    def _info(self, masks: dict[int, Any], starts: NDArray[np.bool_]) -> dict[str, Any]:
        """Return the info of all rows. Where masks are given, that of an agent without one forbids all, after its end nothing."""
        self._mask_size = max([self._mask_size, *map(len, masks.values())])
        if not self._mask_size:
            return {STARTS: starts}
        mask = np.zeros((self.num_envs, self._mask_size))  # in which 0.5 stays what it is, and is refused
        mask[list(self._last)] = 1
        for row, allowed in masks.items():
            if (found := np.shape(allowed)) != mask[row].shape:
                wanted = f"one number for each choice, {self._mask_size}, in each"
                raise ConfigError(
                    f"{self.name} gives masks of several forms", found=found, wanted=wanted, fix="correct the environment"
                )
            mask[row] = allowed
        return {STARTS: starts, ACTION_MASK: mask}
