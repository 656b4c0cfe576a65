"""Throughput of the whole pipeline as a share of the rate that its parts allow on this machine.

Run it with `python -m benchmarks.throughput`: presets of all algorithms but SAC. PartCosts (environment, acting, making
messages, training) and pipeline are measured in turns, since machines drift, and medians are compared:

    floor = the least of  cores / (core time per env step of all parts together)
                          1 / (core time of the learner's own training)   it has one thread
                          actors / (core time of the other parts)         so has each actor
    ratio = pipeline / floor                                                    on a machine that has nothing else to do
    core time = parts / core time of all processes per env step trained         on any machine; it does not see idle cores
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.part_costs import PartCosts, measure, warm_up
from benchmarks.pipeline import Window, running
from common.config.load import load_settings
from common.envs.trial import spec_of
from common.observability.deployment import LEARNER
from common.runtime.machine import cores
from common.units import Seconds

NO_EVALUATOR = "evaluator.enabled=false"
PONG_NATURE = str(Path(__file__).with_name("pong-nature.yaml"))
CARTPOLE_FAST = str(Path(__file__).with_name("cartpole-fast.yaml"))
PRESETS = (PONG_NATURE, CARTPOLE_FAST, "pong-impala", "pong-a3c", "pong-a3c-grad", "pong-pqn", "pong-dqn", "pendulum-td3")
COLUMNS = ("preset", *PartCosts._fields, "floor", "trained", "ratio", "core time")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """All repetitions of one benchmark."""

    parts: Sequence[PartCosts]
    windows: Sequence[Window]
    frame_skip: int
    actors: int

    @property
    def floor(self) -> float:
        """Return the env steps/s that the parts allow: the floor of the module's first lines."""
        return self.part.floor(self.actors)

    @property
    def part(self) -> PartCosts:
        """Median of each part, core seconds per env step."""
        return PartCosts(*map(median, zip(*self.parts, strict=True)))

    @property
    def trained(self) -> float:
        """Median env steps/s trained on."""
        return median(window.trained_per_second for window in self.windows)

    @property
    def ratio(self) -> float:
        """Pipeline over floor."""
        return self.trained / self.floor

    @property
    def core_time(self) -> float:
        """Core time of the parts over that of all processes, per env step."""
        return self.part.total / median(window.core_seconds_per_env_step for window in self.windows)


def benchmark(preset: str, overrides: Sequence[str], *, repeats: int, seconds: Seconds, part_seconds: Seconds) -> Result:
    """Measure parts, pipeline, parts, pipeline, ..."""
    settings = load_settings(preset=preset, overrides=overrides, environ={}).settings
    parts, windows = [], []
    for _ in range(repeats):
        parts.append(measure(settings, part_seconds))
        with running(preset, (*overrides, NO_EVALUATOR)) as run:
            # The first batches meet cold caches and late actors.
            run.wait_until_trained(warm_up(settings) + 4 * settings.scale.batch_env_steps)
            windows.append(run.watch(seconds))
    return Result(parts=parts, windows=windows, frame_skip=spec_of(settings.env).frame_skip, actors=settings.actor.count)


def report(result: Result) -> str:
    """Return the result as lines of text."""
    part, trained = result.part, result.trained
    sampled = median(window.sampled_per_second for window in result.windows)
    lines = ["", "core time per env step (median, all cores busy alike)"]
    lines += [f"  {name:8} {_us(cost):>11}   alone: {cores() / cost:8.0f} /s" for name, cost in part._asdict().items()]
    lines += [f"  sum      {_us(part.total):>11}   floor: {result.floor:8.0f} env steps/s on {cores()} cores", ""]
    lines += ["pipeline (median of runs)"]
    lines += [f"  trained  {trained:8.0f} env steps/s = {trained * result.frame_skip:.0f} frames/s"]
    lines += [f"  sampled  {sampled:8.0f} env steps/s", f"  env only {cores() / part.env:8.0f} env steps/s", ""]
    lines += [f"pipeline / floor = {result.ratio:.1%}, parts / processes in core time = {result.core_time:.1%}"]
    return "\n".join(lines)


def _us(seconds: Seconds) -> str:
    return f"{1e6 * seconds:.2f} us" if seconds < 1e-5 else f"{1e6 * seconds:.0f} us"  # noqa: PLR2004


def account(parts: PartCosts, window: Window, *, actors: int) -> str:
    """Return the line of one repetition, with the share of time in each phase."""
    spent = window.cpu_seconds()
    per_step = {child: seconds / (window.trained_per_second * window.seconds) for child, seconds in spent.items()}
    costs = " ".join(f"{name} {_us(cost)}" for name, cost in parts._asdict().items())
    trained, busy = window.trained_per_second, f"cores busy {window.cores_busy:.2f} of {cores()}"
    processes = ", ".join(f"{child} {_us(cost)}" for child, cost in per_step.items())
    floor = parts.floor(actors)
    lines = [
        f"parts {costs}, floor {floor:.0f}/s",
        f"  pipeline {trained:.0f}/s over {window.seconds:.0f} s ({trained / floor:.1%}), {busy}",
        f"  core time per env step trained: {_us(sum(per_step.values()))} ({processes})",
    ]
    for child in (LEARNER, *sorted(set(spent) - {LEARNER})):
        phases = (f"{phase} {part:.1%}" for phase, part in window.phases(child).items())
        lines.append(f"  {child}: {' '.join(phases)}")
    return "\n".join(lines)


def row(preset: str, result: Result) -> str:
    """Return the result as a row of a Markdown table: preset, parts in us, rates in env steps/s."""
    costs = map(_us, result.part)
    rates = (f"{result.floor:,.0f}", f"{result.trained:,.0f}", f"{result.ratio:.0%}", f"{result.core_time:.0%}")
    return "| " + " | ".join((Path(preset).stem, *costs, *rates)) + " |"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.throughput", description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings to try")
    parser.add_argument(
        "--preset", action="append", help="may be given several times; without it presets of all algorithms but SAC"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each pipeline, after warming up")
    parser.add_argument("--part-seconds", type=float, default=4.0, help="of each part")
    asked = parser.parse_args(argv)
    length = {"repeats": asked.repeats, "seconds": asked.seconds, "part_seconds": asked.part_seconds}
    rows = []
    for preset in asked.preset or PRESETS:
        print(f"{preset} {' '.join(asked.overrides)}; load before: {os.getloadavg()[0]:.1f}", flush=True)
        result = benchmark(preset, asked.overrides, **length)
        for parts, window in zip(result.parts, result.windows, strict=True):
            print(account(parts, window, actors=result.actors))
        print(report(result), flush=True)
        rows.append(row(preset, result))
    print("", "| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|", *rows, sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
