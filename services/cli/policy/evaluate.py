"""`rookery evaluate`: the returns of many whole episodes, their mean and its interval, and the evaluation rules."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from common.algorithms.api import begin_episodes
from common.algorithms.sections import ActionValueSection
from common.envs.make import ATARI_START, build
from common.envs.spec import EnvSettings
from common.envs.state import seed_generators
from common.errors import ConfigError, RookeryError
from common.policies.atari_scores import ATARI_SCORES, Reference
from common.policies.episodes import Episodes, of_all_agents
from common.policies.trained import TrainedPolicy
from common.runtime.process import derive_seed

_LEAST = 5  # episodes: the interval of fewer would be of little use, and its approximation would be off
_NORMAL_QUANTILE = 1.959964  # 97.5 % of a normal distribution lie below


def evaluate(policy: TrainedPolicy, *, episodes: int, seed: int, greedy: bool) -> EvaluationResult:
    """Play `episodes` in at most `env.num_envs` environments, or those of a user's function; no two seeds play the same episodes.

    Raises `ConfigError` where the environment fails, or observations, actions or returns are not finite.
    """
    settings = policy.settings.env
    seed_generators(seed)
    with environment_errors(settings.name):
        built = build(settings, min(episodes, settings.num_envs))
    with (
        closing(built) as environment,
        episode_bar("evaluating", of_all_agents(episodes, environment.agents)) as report,
    ):
        with environment_errors(settings.name):
            played = Episodes(environment, episodes=episodes, seed=environment_seed(seed))
        while not played.complete:
            begin_episodes(policy.policy, played.start)
            action = policy.act(torch.from_numpy(played.observation), greedy=greedy)
            with environment_errors(settings.name):
                played.step(action)
            report(played.tally.ended)
    if not np.isfinite(played.tally.returns).all():
        bad = int((~np.isfinite(played.tally.returns)).sum())
        raise ConfigError(
            "returns of episodes are not finite",
            found=f"{bad} of {len(played.tally.returns)}",
            wanted="numbers",
            fix="correct the environment",
        )
    return EvaluationResult(
        policy=policy,
        greedy=greedy,
        seed=seed,
        num_envs=environment.num_envs,
        agents=environment.agents,
        returns=played.tally.returns,
        lengths=played.tally.lengths,
    )


@contextmanager
def environment_errors(name: str) -> Iterator[None]:
    """Raise what the environment `name` raises inside as `ConfigError`, because a user's own may raise anything."""
    try:
        yield
    except RookeryError:
        raise
    except Exception as error:
        found, fix = f"{type(error).__name__}: {error}", "correct the environment; --debug shows the line"
        raise ConfigError(f"{name} fails while it is played", found=found, wanted="whole episodes", fix=fix) from error


def environment_seed(seed: int) -> int:
    """Return the seed of the first environment; environment b has this plus b. Two values of `seed` give unrelated seeds."""
    return derive_seed(seed, "environment", role="evaluate")


@contextmanager
def episode_bar(task: str, episodes: int) -> Iterator[Callable[[int], None]]:
    """Show on standard error how many of `episodes` have ended, while inside; yields the function that takes their number."""
    console = Console(stderr=True)
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    columns = (TextColumn(task), BarColumn(), MofNCompleteColumn(), TextColumn("episodes"), *times)
    shown = Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal, redirect_stdout=sys.stdout.isatty()
    )
    with shown:
        number = shown.add_task("", total=episodes)
        yield lambda ended: shown.update(number, completed=ended)


def interval95(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of `values` [N], by Student's distribution.

    The quantile is the expansion 26.7.5 of Abramowitz and Stegun 1964, off by less than 0.3 % for five values and more.
    """
    z, n = _NORMAL_QUANTILE, len(values) - 1
    quantile = z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    quantile += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    mean, half = float(values.mean()), quantile * float(values.std(ddof=1)) / math.sqrt(len(values))
    return mean - half, mean + half


def protocol(settings: EnvSettings) -> dict[str, Any]:
    """Return the rules of the environment without which its returns cannot be compared."""
    rules: dict[str, Any] = {"environment": settings.name}
    if atari_game(settings) is not None:
        rules |= {
            "sticky_actions": settings.sticky_actions,
            "noop_max": settings.noop_max,
            **ATARI_START,
            "frame_skip": settings.frame_skip,
            "full_action_space": settings.full_action_space,
            "max_episode_frames": settings.max_episode_frames,
        }
    elif not settings.entry_point:
        with suppress(gymnasium.error.NameNotFound):  # of PettingZoo
            rules["max_episode_steps"] = gymnasium.spec(settings.id.rpartition(":")[2]).max_episode_steps
    named = {name: value for name, value in settings.kwargs.items() if value is not None}  # null: the environment's own value
    return {name: value for name, value in (rules | named).items() if value is not None} | {"rewards": "raw"}


def atari_game(settings: EnvSettings) -> str | None:
    """Return the name of an Atari game that has been built; None for another environment."""
    return str(gymnasium.spec(settings.id).kwargs["game"]) if settings.is_atari else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """The episodes of one evaluation, and how they were played."""

    policy: TrainedPolicy
    greedy: bool
    seed: int
    num_envs: int
    agents: int  # that share an environment; their returns depend on one another
    returns: NDArray[np.float64]
    lengths: NDArray[np.int32]

    @property
    def mode(self) -> str:
        """Return the way in which actions were chosen, as messages of evaluations name it."""
        return "greedy" if self.greedy else "sampled"

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(self.returns.mean())

    @property
    def deviation(self) -> float | None:
        """Standard deviation of the returns; None for one episode."""
        return float(self.returns.std(ddof=1)) if len(self.returns) > 1 else None

    @property
    def no_interval(self) -> str:
        """Why an interval of the mean would be false; empty where the result has an interval."""
        env = self.policy.settings.env
        if len(self.returns) < _LEAST:
            return f"fewer than {_LEAST} episodes"
        if self.agents > 1:
            return f"the {self.agents} agents of an environment are not independent"
        algorithm = self.policy.settings.algorithm
        greedy = self.greedy or (isinstance(algorithm, ActionValueSection) and algorithm.epsilon == 0)
        if greedy and atari_game(env) is not None and env.sticky_actions == 0:
            return "greedy games without sticky actions differ by the no-ops alone, and many are the same game"
        return "all returns are equal" if (self.returns == self.returns[0]).all() else ""

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean; None where `no_interval` has a reason."""
        return None if self.no_interval else interval95(self.returns)

    @property
    def reference(self) -> Reference | None:
        """The scores of random play and of a human, where the game has them."""
        return ATARI_SCORES.get(atari_game(self.policy.settings.env) or "")

    def to_json(self) -> str:
        """Return one JSON object."""
        reference, interval = self.reference, self.interval
        values = {
            "run_id": self.policy.run_id,
            "version": self.policy.version,
            "env_steps": self.policy.env_steps,
            "algorithm": self.policy.settings.algorithm.name,
            "protocol": protocol(self.policy.settings.env),
            "mode": self.mode,
            "seed": self.seed,
            "environments": self.num_envs,
            "episodes": len(self.returns),
            "mean": self.mean,
            "standard_deviation": self.deviation,
            "mean_interval_95": None if interval is None else list(interval),
            "no_interval": self.no_interval or None,
            "minimum": float(self.returns.min()),
            "maximum": float(self.returns.max()),
            "mean_length": float(self.lengths.mean()),
            "human_normalized_percent": None if reference is None else reference.normalized(self.mean),
            "returns": self.returns.tolist(),
            "lengths": self.lengths.tolist(),
        }
        return json.dumps(values)

    def to_text(self) -> str:
        """Return a table for a terminal."""
        policy, settings = self.policy, self.policy.settings
        rules = protocol(settings.env).items()
        rows = {
            "run": f"{policy.run_id}, {settings.algorithm.name}, version {policy.version}, {policy.env_steps:,} env steps",
            "episodes": f"{len(self.returns)}, {self.mode}, {self.num_envs} side by side, seed {self.seed}",
            "return": ", ".join(self._return_parts()),
            "length": f"mean {self.lengths.mean():,.1f} env steps, from {self.lengths.min():,} to {self.lengths.max():,}",
            "evaluation rules": ", ".join(_WORDS[name](value) if name in _WORDS else f"{name} {value}" for name, value in rules),
        }
        if (reference := self.reference) is not None:
            percent = reference.normalized(self.mean)
            rows["human-normalised"] = (
                f"{percent:.1f} % (random play {reference.random:g} is 0 %, the human {reference.human:g} is 100 %)"
            )
        return "\n".join(f"{name:16}  {text}" for name, text in rows.items())

    def _return_parts(self) -> list[str]:
        interval = self.interval
        parts = [f"mean {self.mean:.6g}"]
        if self.deviation is not None:
            parts.append(f"standard deviation {self.deviation:.4g}")
        if interval is not None:
            parts.append(f"95 % interval of the mean {interval[0]:.6g} to {interval[1]:.6g}")
        else:
            parts.append(f"no interval: {self.no_interval}")
        return [*parts, f"from {self.returns.min():.6g} to {self.returns.max():.6g}"]


_WORDS: dict[str, Callable[[Any], str]] = {
    "environment": str,
    "sticky_actions": lambda value: f"sticky actions {value:g}",
    "noop_max": lambda value: f"up to {value} no-ops at the start",
    "frame_skip": lambda value: f"frame skip {value}",
    "full_action_space": lambda value: "all 18 actions" if value else "the game's own actions",
    "max_episode_frames": lambda value: f"at most {value:,} emulator frames",
    "max_episode_steps": lambda value: f"at most {value:,} env steps",
    "rewards": lambda value: f"{value} rewards",
}
