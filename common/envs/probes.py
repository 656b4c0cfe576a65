"""Small environments with known answers, for `env.entry_point: common.envs.probes:<function>`.

A learner that misses one of the first seven has the fault that the name indicates. `counting` shows the content of a stored
transition: its observation is its position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple
from numpy.typing import NDArray

_IMAGE = (16, 16)
_MASK = "action_mask"


class Probe(gymnasium.Env[NDArray[np.float32], Any]):
    """Episodes of `length` steps that terminate; one number is seen, and the action is one of two, unless said otherwise.

    `observe(random, age)` gives the observation after `age` steps, `reward(observation, action, age)` what the action
    on it earns: a number where it has one component, else an array.
    """

    def __init__(
        self,
        *,
        length: int,
        observe: Callable[[np.random.Generator, int], float],
        reward: Callable[[float, Any, int], float],
        actions: Space[Any] | None = None,
    ) -> None:
        self.observation_space: Space[Any] = Box(-1, 1, (1,), np.float32)
        self.action_space = actions or Discrete(2)
        self._length, self._observe, self._reward = length, observe, reward
        self._age, self._seen = 0, 0.0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed, options=options)
        self._age = 0
        return self._look(), {}

    def step(self, action: np.int64 | NDArray[Any]) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Earn what the action on the current observation is worth."""
        reward = self._reward(self._seen, action.item() if action.size == 1 else action, self._age)
        self._age += 1
        return self._look(), reward, self._age == self._length, False, {}

    def _look(self) -> NDArray[np.float32]:
        self._seen = self._observe(self.np_random, self._age)
        return np.array([self._seen], np.float32)


def observed_value() -> Probe:
    """One step, the reward is the observation, 1 or -1 by chance: V(o) is o. Fails where observations do not arrive."""
    return Probe(length=1, observe=_coin, reward=lambda seen, _action, _age: seen)


def discounted_value() -> Probe:
    """Two steps, observations 0 then 1, reward 1 at the end: V(0) is gamma, V(1) is 1. Fails where discounting is wrong."""
    return Probe(length=2, observe=lambda _random, age: min(age, 1), reward=lambda _seen, _action, age: float(age == 1))


def matching_action() -> Probe:
    """One step, reward 1 for action 1 on observation 1 and action 0 on -1, else -1: the policy learns it and V is 1."""
    return Probe(length=1, observe=_coin, reward=_match)


class Recalled(Probe):
    """Environment whose first observation alone shows the action that pays: see `recalled_action`."""

    def __init__(self, length: int) -> None:
        super().__init__(length=length, observe=_coin, reward=self._recall)
        self._cue = 0.0

    def _look(self) -> NDArray[np.float32]:
        seen = super()._look()
        if self._age:
            return np.zeros_like(seen)
        self._cue = self._seen
        return seen

    def _recall(self, _seen: float, action: Any, age: int) -> float:
        return _match(self._cue, action, age) if age == self._length - 1 else 0.0


def recalled_action(length: int = 4) -> Recalled:
    """`length` steps, observation 1 or -1 by chance, then 0; the last action earns 1 where it matches the first one, else -1.

    A policy without memory comes to 0. Fails where states of a memory are lost, or go on from one episode to the next.
    """
    return Recalled(length)


def aimed_action() -> Probe:
    """One step, actions -1 to 3, reward -(a - (1 + o))^2: the policy learns 0 on -1 and 2 on 1. Fails where scaling is wrong."""
    actions = Box(-1, 3, (1,), np.float32)
    return Probe(length=1, observe=_coin, reward=lambda seen, action, _age: -((action - (1.0 + seen)) ** 2), actions=actions)


def joint_action(kind: str = "multi_discrete") -> Probe:
    """One step, actions of several components, each of which has to follow the observation. Fails where components are mixed up.

    `multi_discrete`: one of 4 to 6 and one of 0 and 1, the last of its choices on 1 and the first on -1, reward 1 or -1 for each;
    `multi_binary`: 2 x 2 switches, of which the first and the last are to be on for 1, and the others for -1, likewise;
    `box`: a table of 1 x 2 numbers without bounds, reward -(a - b)^2, summed, where b is (1, -2) on 1 and (-1, 2) on -1.
    """
    actions, best = {
        "multi_discrete": (MultiDiscrete([3, 2], start=[4, 0]), (np.array([4, 0]), np.array([6, 1]))),
        "multi_binary": (MultiBinary((2, 2)), (1 - np.eye(2), np.eye(2))),
        "box": (Box(-np.inf, np.inf, (1, 2), np.float32), (np.array([[-1, 2]]), np.array([[1, -2]]))),
    }[kind]

    def reward(seen: float, action: NDArray[Any], _age: int) -> float:
        wanted = best[int(seen > 0)]
        earned = -((action - wanted) ** 2) if kind == "box" else np.where(action == wanted, 1.0, -1.0)
        return float(earned.sum())

    return Probe(length=1, observe=_coin, reward=reward, actions=actions)


class Named(Probe):
    """`matching_action` with an observation of another space: see `named_action`."""

    def __init__(self, kind: str) -> None:
        super().__init__(length=1, observe=_coin, reward=_match)
        spaces = {
            "discrete": Discrete(5, start=-2),
            "multi_discrete": MultiDiscrete([3, 4], start=[0, 7]),
            "multi_binary": MultiBinary((2, 2)),
        }
        self.observation_space, self._kind = spaces[kind], kind

    def _look(self) -> Any:
        """Of two observations of the space; the larger number is not that of the larger action."""
        first = super()._look().item() > 0
        if self._kind == "multi_binary":
            return np.eye(2, dtype=np.int8) if first else 1 - np.eye(2, dtype=np.int8)
        return np.int64(-1 if first else 1) if self._kind == "discrete" else np.array([1, 8 if first else 9])


def named_action(kind: str = "discrete") -> Named:
    """One step, reward 1 for the action that a Discrete, MultiDiscrete or MultiBinary observation names, else -1.

    Fails where their one-hot codes are mixed up. `kind` is `discrete`, `multi_discrete` or `multi_binary`.
    """
    return Named(kind)


class Pictures(gymnasium.Env[NDArray[Any], np.int64]):
    """Environment of single images: see `pictured_action`."""

    def __init__(self, *, shape: tuple[int, ...], channel_axis: int | None, dtype: str) -> None:
        self.observation_space = Box(0, 255 if dtype == "uint8" else 1, shape, np.dtype(dtype).type)
        self.action_space = Discrete(2)
        self._shape, self._axis, self._dtype = shape, channel_axis, dtype
        self._kind = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[NDArray[Any], dict[str, Any]]:
        """Show one of the two kinds."""
        super().reset(seed=seed, options=options)
        return self._look(), {}

    def step(self, action: np.int64) -> tuple[NDArray[Any], float, bool, bool, dict[str, Any]]:
        """End the episode; the reward is 1 for the number of the kind, else -1."""
        reward = 1.0 if action == self._kind else -1.0
        return self._look(), reward, True, False, {}

    def _look(self) -> NDArray[Any]:
        self._kind = int(self.np_random.integers(2))
        image = self.np_random.integers(0, 150, self._shape)
        if self._axis is None:
            half = self._shape[1] // 2
            image[:, half * self._kind : half * (self._kind + 1)] += 100
        else:
            np.moveaxis(image, self._axis, 0)[2 * self._kind] += 100
        shown: NDArray[Any] = image.astype(self._dtype) if self._dtype == "uint8" else (image / 255).astype(self._dtype)
        return shown


def pictured_action(layout: str = "hwc", *, size: int = 16, dtype: str = "uint8") -> Pictures:
    """One step, reward 1 for the action that a noisy image names, else -1: the policy learns it and V is 1.

    Layout `hwc` or `chw`: action 0 where the first of three channels is brighter, 1 where the last is; `hw`: 0 where the left
    half is, 1 where the right half is. Fails where channels or columns are mixed up.
    """
    shape, axis = {"hwc": ((size, size, 3), 2), "chw": ((3, size, size), 0), "hw": ((size, size), None)}[layout]
    return Pictures(shape=shape, channel_axis=axis, dtype=dtype)


class Mixed(gymnasium.Env[Any, Any]):
    """Environment of observations of several arrays: see `mixed_action`."""

    def __init__(self, actions: str, mask: str, *, camera: bool) -> None:
        choices: dict[str, Space[Any]] = {
            "discrete": Discrete(8),
            "multi_discrete": MultiDiscrete([2, 2, 2]),
            "box": Box(-1, 1, (3,), np.float32),
        }
        self.action_space, self._mask, self._camera = choices[actions], mask, camera
        self._numbers = np.arange(8) if actions == "discrete" else np.arange(6)
        leaves: dict[str, Space[Any]] = {
            "arm": Tuple([Box(-1, 1, (2, 1), np.float32), Discrete(3, start=-1)]),
        } | ({"camera": Box(0, 255, (8, 8, 3), np.uint8)} if camera else {})
        self.observation_space = Dict(leaves | ({_MASK: MultiBinary(len(self._numbers))} if mask == "leaf" else {}))
        self._coins, self._allowed = np.zeros(3, np.int64), np.ones(len(self._numbers), np.int8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Show three coins."""
        super().reset(seed=seed, options=options)
        return self._look()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """End the episode."""
        reward = self._reward(np.asarray(action))
        observation, info = self._look()
        return observation, reward, True, False, info

    def _reward(self, action: NDArray[Any]) -> float:
        if isinstance(self.action_space, Box):
            return -float(((action - (self._coins - 0.5)) ** 2).sum())
        if isinstance(self.action_space, Discrete):
            if not self._allowed[action]:
                return -8.0
            named = [_named(int(number), self._coins) for number in np.flatnonzero(self._allowed)]
            return 1.0 if _named(int(action), self._coins) == max(named) else -1.0
        pairs = self._allowed.reshape(3, 2)
        if not pairs[np.arange(3), action].all():
            return -8.0
        best = np.where(pairs.all(axis=1), self._coins, pairs.argmax(axis=1))
        return float(np.where(action == best, 1.0, -1.0).mean())

    def _look(self) -> tuple[Any, dict[str, Any]]:
        """Show new coins; of the actions, or of each component, about half are forbidden."""
        self._coins = self.np_random.integers(2, size=3)
        number = np.float32(2 * self._coins[1] - 1)
        observation: dict[str, Any] = {"arm": (np.full((2, 1), number), np.int64(2 * self._coins[2] - 1))}
        if self._camera:
            image = self.np_random.integers(0, 50, (8, 8, 3), np.uint8)
            image[:, 4 * self._coins[0] : 4 * self._coins[0] + 4] += 200
            observation["camera"] = image
        else:
            self._coins[0] = 1
        if not self._mask:
            return observation, {}
        self._allowed = self.np_random.integers(2, size=len(self._numbers), dtype=np.int8)
        several = isinstance(self.action_space, MultiDiscrete)
        kept = self.np_random.integers(2, size=3) + np.array([0, 2, 4]) if several else self.np_random.integers(8)
        self._allowed[kept] = 1
        if self._mask == "leaf":
            return observation | {_MASK: self._allowed.copy()}, {}
        return observation, {_MASK: self._allowed.copy()}


def _named(number: int, coins: NDArray[np.int64]) -> int:
    """Return how many of three coins the binary digits of an action name."""
    return int((((number >> np.arange(3)) & 1) == coins).sum())


def mixed_action(actions: str = "discrete", mask: str = "", *, camera: bool = True) -> Mixed:
    """One step; an image, a vector and a number, in a Dict with a Tuple inside, show a coin each, and the action names all three.

    `actions` is `discrete` (one of 8, reward 1 for the best allowed one, else -1), `multi_discrete` (three of 2, the mean of 1 or
    -1 for each), or `box` (three numbers, reward the negative sum of squared distances to -0.5 or 0.5). `mask` forbids about half
    of the discrete actions, by `info` or by a `leaf`; a forbidden action earns -8. Without `camera` its coin is always 1. Fails
    where leaves or masks are mixed up or lost.
    """
    return Mixed(actions, mask, camera=camera)


class Leaving:
    """A ParallelEnv, by its attributes alone: see `leaving_agents`."""

    def __init__(self, mask: str, *, truncates: bool) -> None:
        self.possible_agents = ["short", "long"]
        self.agents: list[str] = []
        self.metadata, self.render_mode = {"render_fps": 5}, "rgb_array"
        self._mask, self._truncates = mask, truncates
        vector = Box(-1, 3, (2,), np.float32)
        self._observed: Space[Any] = Dict({"observation": vector, _MASK: MultiBinary(2)}) if mask == "leaf" else vector
        self._actions = Discrete(2)
        self._age, self._random = 0, np.random.default_rng()
        self._seen = {agent: np.zeros(2, np.float32) for agent in self.possible_agents}

    def observation_space(self, _agent: str) -> Space[Any]:
        """Return a vector, in a Dict where the mask is a leaf."""
        return self._observed

    def action_space(self, _agent: str) -> Space[Any]:
        """Return two actions."""
        return self._actions

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode with both agents."""
        del options
        self._random = np.random.default_rng(seed) if seed is not None else self._random
        self.agents, self._age = list(self.possible_agents), 0
        return self._look()

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        """Take the actions of the agents that are there, and of no others."""
        acting, self._age = self.agents, self._age + 1
        if set(actions) != set(acting):
            text = f"actions of {sorted(actions)}, agents {acting}"
            raise KeyError(text)
        rewards = {agent: 1.0 if actions[agent] == (self._seen[agent][0] > 0) else -1.0 for agent in acting}
        over = {agent: self._age == _STAY[agent] for agent in acting}
        observations, infos = self._look()
        self.agents = [agent for agent in acting if not over[agent]]
        never = dict.fromkeys(acting, False)
        return observations, rewards, never if self._truncates else over, over if self._truncates else never, infos

    def render(self) -> NDArray[np.uint8]:
        """Return a picture of the age of the episode."""
        return np.full((4, 6, 3), self._age, np.uint8)

    def close(self) -> None:
        """Do nothing."""

    def _look(self) -> tuple[dict[str, Any], dict[str, Any]]:
        for agent, seen_last in self._seen.items():  # also over what an agent saw last that has left, as some environments do
            seen_last[:] = 2 * self._random.integers(2) - 1, _STAY[agent] - self._age
        masks = {agent: np.array([self._seen[agent][0] < 0, self._seen[agent][0] > 0], np.int8) for agent in self.agents}
        seen: dict[str, Any] = {agent: self._seen[agent] for agent in self.agents}
        if self._mask == "leaf":
            seen = {agent: {"observation": seen[agent], _MASK: masks[agent]} for agent in self.agents}
        return seen, {agent: {_MASK: masks[agent]} if self._mask == "info" else {} for agent in self.agents}


_STAY = {"short": 1, "long": 3}  # env steps of each agent of `leaving_agents`


def leaving_agents(mask: str = "", *, truncates: bool = False) -> Leaving:
    """Two agents, each of which earns 1 for the action that matches its own coin, else -1; one leaves before the other.

    An agent sees its coin, 1 or -1, and the env steps that it still has, of 1 and 3: V is 1 on the last, and 1 + gamma + gamma^2
    where three are left. `truncates` cuts the episodes off instead. `mask`, by `info` or by a `leaf`, allows the best action
    alone. Fails where agents are mixed up, or where something is learned from the rows of one that has left.
    """
    return Leaving(mask, truncates=truncates)


class Counting(gymnasium.Env[NDArray[Any], np.int64]):
    """Environment whose observation is its own position: see `counting`."""

    def __init__(self, *, lengths: Sequence[int], truncates: Sequence[bool], image: bool) -> None:
        self.observation_space = Box(0, 255, _IMAGE, np.uint8) if image else Box(0, np.inf, (2,), np.float32)
        self.action_space = Discrete(2)
        self._lengths, self._truncates, self._image = tuple(lengths), tuple(truncates), image
        self._episode, self._count = -1, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[NDArray[Any], dict[str, Any]]:
        """Begin the next episode of the plan; a seed begins the plan anew."""
        super().reset(seed=seed, options=options)
        self._episode = 0 if seed is not None else self._episode + 1
        self._count = 0
        return self._look(), {}

    def step(self, _action: np.int64) -> tuple[NDArray[Any], float, bool, bool, dict[str, Any]]:
        """Count; the reward is the count before."""
        self._count += 1
        over = self._count == self._lengths[self._episode % len(self._lengths)]
        truncates = self._truncates[self._episode % len(self._truncates)]
        return self._look(), float(self._count - 1), over and not truncates, over and truncates, {}

    def _look(self) -> NDArray[Any]:
        if not self._image:
            return np.array([self._count, self._episode], np.float32)
        # no pixel is 0, so that a zero in a stack can only come from stacking
        return np.random.default_rng((self._episode, self._count)).integers(1, 256, _IMAGE, np.uint8)


def counting(lengths: Sequence[int] = (3, 1, 5), truncates: Sequence[bool] = (False, True), *, image: bool = False) -> Counting:
    """Observation (count of steps in the episode, number of the episode), reward the count.

    Episode k lasts `lengths[k % len(lengths)]` steps and is truncated, else terminated, by `truncates` in the same way.
    With `image` the observation is a picture that no other count or episode has.
    """
    return Counting(lengths=lengths, truncates=truncates, image=image)


def _coin(random: np.random.Generator, _age: int) -> float:
    return 1.0 if random.random() < 0.5 else -1.0  # noqa: PLR2004 - a fair coin


def _match(seen: float, action: Any, _age: int) -> float:
    return 1.0 if (seen > 0) == (action == 1) else -1.0
