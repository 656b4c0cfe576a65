"""Number of actors that `--actors auto` chooses, compared with the number that gives the highest throughput.

    python -m benchmarks.actors --preset pong --numbers 1 2 3 4 --repeats 2

A sweep measures the preset with each number of actors, in turns, and each time a run with `--actors auto` names its own. What
counts is how fast the number it names is in the sweep, beside the fastest. The machine must be idle.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.part_costs import warm_up
from benchmarks.pipeline import ENDLESS, running
from common.config.load import load_settings
from common.errors import ResourceError
from common.units import Seconds

SPOKEN = "--actors auto: "


def main() -> None:
    """Measure, and print a line for each run and a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="pong")
    parser.add_argument("--numbers", nargs="+", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--set", nargs="*", default=[], metavar="section.key=value")
    options = parser.parse_args()
    print(f"{options.preset}, {os.cpu_count()} cores; load before: {os.getloadavg()[0]:.1f}")
    rates: dict[int, list[float]] = {number: [] for number in options.numbers}
    named = []
    for _ in range(options.repeats):
        for number in options.numbers:
            rates[number].append(rate_with(options.preset, number, options.set, seconds=options.seconds))
            print(f"  {number} actors: {rates[number][-1]:,.0f} env steps/s", flush=True)
        named.append(found(options.preset, options.set))
        print(f"  auto: {named[-1]}", flush=True)
    print(report(rates, named))


def rate_with(preset: str, actors: int, overrides: Sequence[str], *, seconds: Seconds) -> float:
    """Return the env steps/s trained by a run with that many actors."""
    words = (*overrides, f"actor.count={actors}")
    settings = load_settings(preset=preset, overrides=words, environ={}).settings
    with running(preset, words) as run:
        run.wait_until_trained(warm_up(settings) + 8 * settings.scale.batch_env_steps)
        return run.watch(seconds).trained_per_second


def found(preset: str, overrides: Sequence[str]) -> int:
    """Return the number of actors that `--actors auto` chooses; the run ends there."""
    with TemporaryDirectory(prefix="rookery-bench-") as folder:
        words = [sys.executable, "-m", "services.cli", "train", preset, "--actors", "auto", "--log-format", "json"]
        words += ["--run-dir", str(Path(folder) / "run"), *(word for word in ENDLESS if not word.startswith("log.")), *overrides]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = (json.loads(line) for line in process.stdout)
            said = next((line["text"] for line in lines if SPOKEN in line.get("text", "")), None)
            process.send_signal(signal.SIGINT)
            process.communicate()
    if said is None:
        raise ResourceError("the run ended before it had found a number of actors", found=f"exit code {process.returncode}")
    print(f"  {said}", flush=True)
    number = said.removeprefix(SPOKEN).split()[0]
    if not number.isdigit():
        raise ResourceError("no number of actors was found", found=said)
    return int(number)


def report(rates: Mapping[int, Sequence[float]], named: Sequence[int]) -> str:
    """Return the table of the sweep, and the throughput of the chosen number relative to the highest."""
    speed = {number: median(each) for number, each in rates.items()}
    best = max(speed, key=lambda number: speed[number])
    lines = ["", "| actors | env steps/s | of the fastest |", "|---|---|---|"]
    lines += [f"| {number} | {rate:,.0f} | {rate / speed[best]:.0%} |" for number, rate in speed.items()]
    for number in named:
        share = f"{speed[number] / speed[best]:.0%} of the fastest" if number in speed else "not in the sweep"
        lines.append(f"\nauto found {number}: {share}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
