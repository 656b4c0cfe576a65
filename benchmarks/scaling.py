"""Env steps per second by the number of actors, on an environment that waits instead of computing.

    python -m benchmarks.scaling --actors 1 2 4 8 16 32 --out benchmarks/results

A slow simulator leaves the CPU to others: here a step sleeps for 20 ms. So one machine can hold as many actors as a cluster would
have, and what is seen is the cost of the system itself: its learner, its messages and its snapshots. An actor steps one
environment; a rollout of 64 env steps is a message, and each message is an update, so that the policy lag is about the number of
actors.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

from benchmarks.learning import machine
from benchmarks.pipeline import Window, running
from benchmarks.throughput import NO_EVALUATOR
from common.units import Seconds

PRESET = "cartpole-impala"
STEP: Seconds = 0.02
ROLLOUT, EPISODE = 64, 500  # env steps
OVERRIDES = (
    *("env.id=", "env.entry_point=benchmarks.scaling:SleepingEnv", "env.num_envs=1", f"rollout.length={ROLLOUT}"),
    *("learner.batch=1", "learner.credits=2", "learner.max_policy_lag=100", NO_EVALUATOR),
)


class SleepingEnv(gymnasium.Env[NDArray[np.float32], np.int64]):
    """Episodes of `EPISODE` steps of `STEP` seconds each, with four floats to see, two actions, and a reward of 1 for a step."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = Box(-1, 1, (4,), np.float32), Discrete(2)
        self._age = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Begin an episode at once."""
        super().reset(seed=seed, options=options)
        self._age = 0
        return np.zeros(4, np.float32), {}

    def step(self, _action: np.int64) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Sleep for the length of a step."""
        time.sleep(STEP)
        self._age += 1
        return np.full(4, self._age / EPISODE, np.float32), 1.0, self._age == EPISODE, False, {}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure each number of actors, print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--seconds", type=float, default=20.0, help="of each number, after all actors have begun")
    parser.add_argument("--out", type=Path, help="folder for scaling.md, such as benchmarks/results")
    options = parser.parse_args(argv)
    windows = {}
    for actors in options.actors:
        windows[actors] = measured(actors, seconds=options.seconds)
        print(f"  {actors} actors: {windows[actors].trained_per_second:,.0f} env steps/s", flush=True)
    print(text := report(windows))
    if options.out:
        (options.out / "scaling.md").write_text(text)


def measured(actors: int, *, seconds: Seconds) -> Window:
    """Run with that many actors, and watch once each of them has made a rollout."""
    with running(PRESET, (*OVERRIDES, f"actor.count={actors}")) as run:
        run.wait_until_all_step(ROLLOUT)
        return run.watch(seconds)


def report(windows: Mapping[int, Window]) -> str:
    """Return the page: env steps per second trained, times those of the smallest number, and the cores that were busy."""
    least = min(windows)
    lines = [
        "# Scaling",
        "",
        "    python -m benchmarks.scaling",
        "",
        f"Each actor steps one environment, which sleeps for {1000 * STEP:.0f} ms in each step. {machine()}.",
        "",
        "| actors | env steps/s trained | times | cores busy | of the time that environments allow |",
        "|---|---|---|---|---|",
    ]
    for actors, window in sorted(windows.items()):
        rate = window.trained_per_second
        times = rate / windows[least].trained_per_second * least
        busy = f"{window.cores_busy:.2f} of {os.cpu_count()}"
        lines.append(f"| {actors} | {rate:,.0f} | {times:.1f} | {busy} | {rate * STEP / actors:.0%} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
