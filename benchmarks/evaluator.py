"""Cost of an evaluator: throughput of a run with and without one.

Run it with `python -m benchmarks.evaluator`: the preset's pipeline with and without an evaluator, in turns. Here the
evaluator plays all the time (a run lets it rest between evaluations), so the result is an upper bound. Where runs
differ by more than the cost, many pairs are needed; the evaluator's share of the core time varies less, and is printed too.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.part_costs import warm_up
from benchmarks.pipeline import PLAYED, Window, running
from common.config.load import load_settings
from common.observability.deployment import EVALUATOR
from common.units import Seconds

ALWAYS = "evaluator.every_seconds=1"  # the least; an evaluation takes longer
NEVER = "evaluator.enabled=false"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One repetition."""

    without: Window
    beside: Window

    @property
    def cost(self) -> float:
        """Return the share of the throughput that a run with an evaluator loses."""
        return 1.0 - self.beside.trained_per_second / self.without.trained_per_second

    @property
    def share(self) -> float:
        """Return the evaluator's share of the core time of all processes of its run."""
        spent = self.beside.cpu_seconds()
        return spent[EVALUATOR] / sum(spent.values())


def benchmark(preset: str, overrides: Sequence[str], *, repeats: int, seconds: Seconds) -> list[Pair]:
    """Measure pairs; each second one in the other order, so that a machine that drifts favours neither."""
    pairs = []
    for number in range(repeats):
        order = (NEVER, ALWAYS) if number % 2 == 0 else (ALWAYS, NEVER)
        windows = {setting: _watch(preset, (*overrides, setting), seconds) for setting in order}
        pairs.append(Pair(without=windows[NEVER], beside=windows[ALWAYS]))
        print(line(pairs[-1]), flush=True)
    return pairs


def _watch(preset: str, overrides: Sequence[str], seconds: Seconds) -> Window:
    settings = load_settings(preset=preset, overrides=overrides, environ={}).settings
    with running(preset, overrides) as run:
        run.wait_until_all_step(1)  # an evaluator that still starts costs something else
        run.wait_until_trained(warm_up(settings) + 8 * settings.scale.batch_env_steps)
        return run.watch(seconds)


def line(pair: Pair) -> str:
    """Return the line of one repetition."""
    return (
        f"  without {pair.without.trained_per_second:.0f}/s, beside it {pair.beside.trained_per_second:.0f}/s: {pair.cost:.1%};"
        f" it took {pair.beside.cpu_seconds()[EVALUATOR] / pair.beside.seconds:.1%} of a core"
        f" and played {pair.beside.growth[EVALUATOR][PLAYED] / pair.beside.seconds:.0f} env steps/s"
    )


def report(pairs: Sequence[Pair]) -> str:
    """Return the result as one line."""
    costs = sorted(pair.cost for pair in pairs)
    return (
        f"cost of the evaluator: {median(costs):.1%} of env steps/s trained (median; {costs[0]:.1%} to {costs[-1]:.1%});"
        f" its share of the core time: {median(pair.share for pair in pairs):.1%}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evaluator", description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings to try")
    parser.add_argument("--preset", default="pong")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=25.0, help="of each pipeline, after warming up")
    asked = parser.parse_args(argv)
    print(f"{asked.preset} {' '.join(asked.overrides)}; load before: {os.getloadavg()[0]:.1f}", flush=True)
    print(report(benchmark(asked.preset, asked.overrides, repeats=asked.repeats, seconds=asked.seconds)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
