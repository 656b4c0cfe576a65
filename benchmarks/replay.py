"""Rate of minibatches of stacked frames, compared with a plain copy of as many bytes.

Run it with `python -m benchmarks.replay`. A memory of 84x84 frames is filled through `insert`
and sampled: draw, n-step rewards, stacks of both observations. In turns with it numpy copies as many bytes:
the very frames of such a sample, scattered as they lie; one contiguous stretch of the frames' memory, another each time; and
one array again and again, which a large cache may hold. Each is done several times in a row, as training samples, so that
none begins with the caches that another left. Times are core time of the one thread, so that what else the machine runs counts
only as far as it takes memory and caches away.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from common.algorithms.payload import trajectory_schema
from common.envs.spec import ActionSpec, EnvSpec
from common.protocol.messages import Arrays
from common.replay.buffer import Replay
from common.units import MIB, Seconds

ENV = EnvSpec(
    observation_shape=(84, 84), observation_dtype="uint8", action=ActionSpec(choices=(6,), shape=()), frame_stack=4, frame_skip=4
)
LENGTH, NUM_ENVS, ACTORS = 16, 16, 2
MESSAGES_PER_EPISODE = 47  # 750 env steps
IN_A_ROW = 4
N_STEP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Sizes of the memory and of a minibatch."""

    capacity: int  # env steps
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Medians over the repetitions."""

    insert: Seconds  # one env step
    sample: Seconds  # one minibatch
    copy_scattered: Seconds  # of the frames of a minibatch, from where they lie
    copy: Seconds  # of as many bytes, one stretch of the frames' memory
    copy_again: Seconds  # of as many bytes, always the same
    batch_bytes: int  # of both observations
    memory_bytes: int
    transitions: int


def benchmark(load: Load, *, repeats: int) -> Result:
    """Fill the memory once over, then measure in turns."""
    streams = ACTORS * NUM_ENVS
    replay = Replay(env=ENV, capacity=load.capacity, n_step=N_STEP, gamma=0.99, streams=streams)
    rng = np.random.default_rng(0)
    insert = _fill(replay, rng)
    times = _measure(replay, load.batch, rng, repeats=repeats)
    found = replay.sample(load.batch, rng)
    return Result(
        insert=insert,
        batch_bytes=found.observation.nbytes + found.next_observation.nbytes,
        memory_bytes=replay.layout.nbytes,
        transitions=len(replay),
        **times,
    )


def _measure(replay: Replay, batch: int, rng: np.random.Generator, *, repeats: int) -> dict[str, Seconds]:
    """Median time of everything but inserting, once."""
    frames = replay._blocks.frames  # noqa: SLF001 - the floors read what a sample reads
    stack, n_step = ENV.frame_stack, replay.layout.n_step
    offsets = np.arange(stack) + np.array([[0], [n_step]])  # [2, S]: both ends of a window
    target = np.zeros((batch, 2, stack, frames.shape[1]), np.uint8)
    again, flat = np.ones_like(target), target.reshape(-1, frames.shape[1])

    def copy_scattered() -> Callable[[], object]:
        rows = np.sort(rng.integers(len(frames) - stack - n_step, size=batch))[:, None, None] + offsets
        return lambda: np.take(frames, rows, axis=0, out=target, mode="clip")

    def copy() -> Callable[[], object]:
        at = int(rng.integers(len(frames) - len(flat)))
        return lambda: np.copyto(flat, frames[at : at + len(flat)])

    parts: dict[str, Callable[[], Callable[[], object]]] = {
        "sample": lambda: lambda: replay.sample(batch, rng),
        "copy_scattered": copy_scattered,
        "copy": copy,
        "copy_again": lambda: lambda: np.copyto(target, again),
    }
    spent: dict[str, list[Seconds]] = {name: [] for name in parts}
    for _ in range(repeats):
        for name, prepare in parts.items():
            spent[name] += [_seconds(prepare()) for _ in range(IN_A_ROW)]
    return {name: median(seconds) for name, seconds in spent.items()}


def _fill(replay: Replay, rng: np.random.Generator) -> Seconds:
    """Until blocks have been recycled; returns the time of one env step, pages touched for the first time included."""
    going, ending = rollout(rng, ends=False), rollout(rng, ends=True)
    spent, env_steps, number = 0.0, 0, 0
    while env_steps < replay.layout.capacity + replay.layout.capacity // 8:
        number += 1
        arrays = going if number % MESSAGES_PER_EPISODE else ending
        began = time.thread_time()
        env_steps += sum(replay.insert(arrays, stream=actor, seq=number) for actor in range(ACTORS))
        spent += time.thread_time() - began
    return spent / env_steps


def rollout(rng: np.random.Generator, *, ends: bool) -> Arrays:
    """One message of noise; where it `ends`, an episode of each environment does in the middle of it, and the next begins."""
    schema = trajectory_schema(ENV, length=LENGTH, num_envs=NUM_ENVS, recorded=())
    arrays: dict[str, np.ndarray] = {spec.name: np.zeros(np.maximum(spec.shape, 0), spec.dtype) for spec in schema}
    arrays["obs"][:] = rng.integers(256, size=arrays["obs"].shape, dtype=np.uint8)
    arrays["action"][:] = rng.integers(ENV.action.n, size=arrays["action"].shape)
    arrays["valid"][:] = True
    arrays["terminated"][LENGTH // 2 - 1] = arrays["start"][LENGTH // 2] = ends
    return arrays


def _seconds(part: Callable[[], object]) -> Seconds:
    began = time.thread_time()
    part()
    return time.thread_time() - began


def report(load: Load, result: Result) -> str:
    """Return the result as lines of text."""

    def line(name: str, seconds: Seconds) -> str:
        return f"  {name:<26}{seconds * 1e3:7.2f} ms   {result.batch_bytes / seconds / MIB:7,.0f} MiB/s"

    copies = {
        "copy, frames as they lie": result.copy_scattered,
        "copy, one stretch": result.copy,
        "copy, the same again": result.copy_again,
    }
    lines = [
        f"{result.transitions:,} transitions in {result.memory_bytes / 1e9:.2f} GB, 84x84 in stacks of 4, n = {N_STEP}",
        line(f"sample of {load.batch}", result.sample),
        *(line(name, seconds) for name, seconds in copies.items()),
        f"  sampling / copying         {', '.join(f'{seconds / result.sample:.0%}' for seconds in copies.values())}",
        f"  insert                     {result.insert * 1e6:7.2f} us per env step",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=__doc__.splitlines()[0])
    parser.add_argument("--capacity", type=int, default=1_000_000, help="env steps of the memory")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=200)
    asked = parser.parse_args(argv)
    load = Load(capacity=asked.capacity, batch=asked.batch)
    print(f"load before: {os.getloadavg()[0]:.1f}", flush=True)
    print(report(load, benchmark(load, repeats=asked.repeats)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
