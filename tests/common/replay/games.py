"""Games that are played by random, as messages and as lists of episodes, for tests of the replay memories."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from common.algorithms.payload import check_trajectory
from common.envs.spec import EnvSpec

GAMMA = 0.9
Mode = Literal["next_step", "same_step", "agents"]
Key = tuple[int, int, int]  # game, episode, step: a frame says where it is from, and so does the action on it


@dataclass
class Game:
    """One environment with episodes of random length, and what really happened in it."""

    number: int
    rng: np.random.Generator
    mode: Mode
    episode: int = 0
    step: int = 0
    over: bool = False
    rewards: dict[Key, float] = field(default_factory=dict)
    ends: dict[Key, str] = field(default_factory=dict)  # only of steps that ended an episode

    @property
    def key(self) -> Key:
        """Of the frame that is seen now."""
        return self.number, self.episode, self.step

    def act(self) -> dict[str, Any]:
        """One row of the vector environment, in gymnasium's two ways of resetting, or of an agent that others outlast."""
        row = {"reward": 0.0, "terminated": False, "truncated": False, "valid": True, "start": False, "final": None}
        if self.over and self.mode == "agents" and self.rng.random() < 0.7:
            return row | {"valid": False}
        if self.over:
            self._reset()
            return row | {"valid": False, "start": True}
        key = self.key
        row["reward"] = self.rewards[key] = float(self.rng.integers(-3, 4))
        self.step += 1
        if self.rng.random() < 0.25:
            end = self.ends[key] = str(self.rng.choice(["terminated", "truncated"]))
            row[end] = self.over = True
            if self.mode == "same_step":
                row["final"] = self.key if end == "truncated" else None
                row["start"] = True
                self._reset()
        return row

    def _reset(self) -> None:
        self.episode, self.step, self.over = self.episode + 1, 0, False


def frame(key: Key | None, env: EnvSpec) -> np.ndarray:
    """The picture of a step; no part of it is 0. None: no frame, all 0."""
    return np.zeros(env.observation_shape, np.float32) if key is None else np.full(env.observation_shape, code(key), np.float32)


def code(key: Key) -> int:
    """A number for a key."""
    game, episode, step = key
    return 1 + game + 10 * (step + 200 * episode)


def stacked(key: Key, env: EnvSpec) -> np.ndarray:
    """The input of the network at a step: the newest S frames of the episode, zeros where it had not begun."""
    game, episode, step = key
    past = [(game, episode, at) if at >= 0 else None for at in range(step - env.frame_stack + 1, step + 1)]
    return np.stack([frame(each, env) for each in past]).reshape(env.network_input_shape)


class Player:
    """Plays B games and writes trajectory messages down, as an actor does, in the plainest way."""

    def __init__(self, games: list[Game], env: EnvSpec, length: int) -> None:
        self.games, self.env, self.length = games, env, length

    def message(self) -> tuple[dict[str, np.ndarray], list[list[Key]]]:
        """Arrays, and per game the env steps that they hold."""
        env, games = self.env, self.games
        rows: list[list[dict[str, Any]]] = [[] for _ in games]
        steps: list[list[Key]] = [[] for _ in games]
        obs = [list(self._context(game)) for game in games]
        start = [[game.step == 0] for game in games]
        finals: list[tuple[int, Key]] = []
        for t in range(self.length):
            for b, game in enumerate(games):
                key = game.key
                row = game.act()
                if row["valid"]:
                    steps[b].append(key)
                if row["final"] is not None:
                    finals.append((t * len(games) + b, row["final"]))
                rows[b].append(row | {"action": code(key)})
                obs[b].append(frame(game.key, env))
                start[b].append(row["start"])
        names = ("action", "reward", "terminated", "truncated", "valid")
        arrays = {name: np.array([[column[t][name] for column in rows] for t in range(self.length)]) for name in names}
        arrays |= {"obs": np.stack([np.stack(column) for column in obs], 1), "start": np.array(start).T}
        arrays["reward"] = arrays["reward"].astype(np.float32)
        arrays["final_index"] = np.array([index for index, _ in finals], np.int32)
        arrays["final_obs"] = np.array([frame(key, env) for _, key in finals], np.float32).reshape(-1, *env.observation_shape)
        check_trajectory(env, arrays)
        return arrays, steps

    def _context(self, game: Game) -> np.ndarray:
        """The S frames of the stack that is seen now."""
        return stacked(game.key, self.env).reshape(self.env.frame_stack, *self.env.observation_shape)


@dataclass(frozen=True)
class Expected:
    """A window as the list of episodes has it."""

    reward: float
    discount: float
    after: Key


def window(steps: list[Key], at: int, game: Game, n_step: int) -> Expected | None:
    """The window that begins at `steps[at]`, walked step by step; None where steps that it needs are missing."""
    total = 0.0
    for j in range(n_step):
        if at + j == len(steps):
            return None
        key = steps[at + j]
        assert key == (key[0], steps[at][1], steps[at][2] + j), "the model itself crossed a reset"
        total += GAMMA**j * game.rewards[key]
        end = game.ends.get(key)
        if end or j == n_step - 1:
            return Expected(total, 0.0 if end == "terminated" else GAMMA ** (j + 1), (key[0], key[1], key[2] + 1))
    return None
