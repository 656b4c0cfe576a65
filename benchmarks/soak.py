"""A long run under mild disturbance: memory, descriptors and threads must not grow, and no process may end by itself.

    python -m benchmarks.soak --minutes 120

Every five minutes an actor, never the first, is killed or asked to leave at random, and replaced. Every 10 s each process is
sampled into a CSV; after the warm-up the Theil-Sen slope of each series is taken with its 95 % interval. Goals: the upper end of
each process's memory slope below 1 MB/h, descriptors and threads flat, no exit that the soak did not cause, an exact ledger.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.chaos.books import Books, close_books
from benchmarks.chaos.deployment import Deployment, Exit, Setup, deployed
from benchmarks.chaos.measure import usage
from benchmarks.learning import machine
from common.units import MIB, Seconds

EVERY: Seconds = 10.0
REPLACED: Seconds = 300.0  # between two replacements of an actor
WARM_UP = 0.1  # of the whole time, 10 minutes at most: caches and allocators fill
GOAL = 1.0  # MB per hour
STEADY = ("learner", "actor-0", "evaluator")  # are never replaced
POINTS = 720  # of a series, at most: the slopes of all pairs are taken
RESULTS = Path(__file__).parent / "results" / "soak.md"
FIELDS = ("seconds", "name", "pid", "rss_mb", "descriptors", "threads")
KILOBYTE, MEGABYTE = 1e3, 1e6

Sample = dict[str, float | str]  # of one process, by `FIELDS`


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """Median slope over all pairs of points, and its 95 % interval, per hour."""

    median: float
    low: float
    high: float


def theil_sen(seconds: NDArray[np.float64], values: NDArray[np.float64]) -> Slope:
    """Return the slope of `values` [N] over `seconds` [N], per hour. NaN for fewer than two points.

    The interval is Sen's (1968): ranks of the pairwise slopes at the normal quantile of Kendall's statistic.
    """
    step = max(1, len(seconds) // POINTS)
    seconds, values = seconds[::step], values[::step]
    first, second = np.triu_indices(len(seconds), k=1)
    apart = seconds[second] - seconds[first]
    slopes = np.sort((values[second] - values[first])[apart > 0] / apart[apart > 0]) * 3600.0
    if not len(slopes):
        return Slope(median=math.nan, low=math.nan, high=math.nan)
    count = len(seconds)
    half = 1.96 * math.sqrt(count * (count - 1) * (2 * count + 5) / 18.0) / 2.0
    low, high = max(0, int(len(slopes) / 2 - half)), min(len(slopes) - 1, math.ceil(len(slopes) / 2 + half))
    return Slope(median=float(np.median(slopes)), low=float(slopes[low]), high=float(slopes[high]))


def soak(deployment: Deployment, *, minutes: float, seed: int, out: Path) -> tuple[list[Sample], dict[str, float]]:
    """Run for `minutes`, with samples to the CSV `out`; return the samples, and bytes of the run directory by part."""
    chance = random.Random(seed)  # noqa: S311  seeded
    samples: list[Sample] = []
    began = time.monotonic()
    replace_at = began + REPLACED
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        while (now := time.monotonic()) < began + 60 * minutes:
            if now >= replace_at:
                replace_at += REPLACED
                deployment.kill(chance.choice(deployment.actors[1:]), chance.choice((signal.SIGTERM, signal.SIGKILL)))
            for name in deployment.names:
                if used := usage(pid := deployment.pid(name)):
                    rss = used.rss_mib * MIB / MEGABYTE
                    sample: Sample = {"seconds": round(now - began, 1), "name": name, "pid": pid, "rss_mb": rss}
                    samples.append(sample | {"descriptors": used.descriptors, "threads": used.threads})
                    writer.writerow(samples[-1])
            file.flush()
            time.sleep(max(0.0, EVERY - (time.monotonic() - now)))
    return samples, sizes(deployment.run_dir)


def sizes(folder: Path) -> dict[str, float]:
    """Return the bytes below each entry of `folder`."""
    found: dict[str, float] = defaultdict(float)
    for path in folder.rglob("*"):
        if path.is_file():
            found[path.relative_to(folder).parts[0]] += path.stat().st_size
    return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Resources of one process over its life after the warm-up; each life of a replaced actor is separate."""

    name: str
    pid: int
    minutes: float
    rss_mb: float  # at the end
    slope: Slope
    descriptors: tuple[int, int]  # least and most
    threads: tuple[int, int]

    @property
    def judged(self) -> bool:
        """Return whether the process lived long enough for a meaningful slope."""
        return self.minutes >= 5.0  # noqa: PLR2004

    @property
    def passes(self) -> bool:
        """Return whether the process meets the goals; a life that is too short for a slope does."""
        flat = all(most - least <= 2 for least, most in (self.descriptors, self.threads))  # noqa: PLR2004  a scrape, a hand-over
        return not self.judged or (self.slope.high < GOAL and flat)


def lines(samples: Sequence[Sample], *, minutes: float) -> list[Line]:
    """Return a line for each process that ran after the warm-up."""
    start = min(600.0, 60 * minutes * WARM_UP)
    by_pid: dict[tuple[str, int], list[Sample]] = defaultdict(list)
    births: dict[int, float] = {}
    for sample in samples:
        born = births.setdefault(int(sample["pid"]), float(sample["seconds"]))
        if float(sample["seconds"]) >= born + start:  # a later life warms up too
            by_pid[str(sample["name"]), int(sample["pid"])].append(sample)
    found = []
    for (name, pid), series in sorted(by_pid.items()):
        seconds, rss, descriptors, threads = (
            np.array([float(sample[field]) for sample in series]) for field in ("seconds", "rss_mb", "descriptors", "threads")
        )
        found.append(
            Line(
                name=name, pid=pid, minutes=(seconds[-1] - seconds[0]) / 60, rss_mb=rss[-1], slope=theil_sen(seconds, rss),
                descriptors=(int(descriptors.min()), int(descriptors.max())), threads=(int(threads.min()), int(threads.max())),
            )
        )  # fmt: skip
    return found


def missed(found: Sequence[Line], books: Books, exits: Sequence[Exit]) -> list[str]:
    """Return the goals that the soak missed, each with the value found."""
    judged = {line.name for line in found if line.judged}
    sentences = [f"{line.name} ({line.pid}) grows" for line in found if not line.passes]
    sentences += [f"{name} did not live long enough to be judged" for name in STEADY if name not in judged]
    sentences += [f"{end.name} ended with {end.code}: {end.words[-300:]}" for end in exits if not end.caused]
    if books.unaccounted or books.note:
        sentences.append(f"{books.unaccounted:,} env steps unaccounted {books.note}".rstrip())
    return sentences


def page(found: Sequence[Line], parts: Mapping[str, float], books: Books, faults: Sequence[str], *, minutes: float) -> str:
    """Return the result as Markdown; `faults` are the missed goals."""
    judged = [line for line in found if line.judged]
    passed = sum(line.passes for line in judged)
    text = [
        f"""# Soak

`python -m benchmarks.soak --minutes {minutes:g}` on {datetime.now(UTC):%Y-%m-%d}, {machine()}.
{passed} of {len(judged)} processes pass: upper end of the 95 % interval of the Theil-Sen slope of RSS below {GOAL:g} MB/h,
descriptors and threads flat (within 2). Lives shorter than 5 minutes after the warm-up are shown, not judged.

Ledger: {books.stepped:,} env steps stepped, {books.trained:,} trained, {books.dropped:,} dropped, {books.unseen:,} unseen,
{books.unaccounted:,} unaccounted.

| process | minutes | RSS at the end (MB) | slope (MB/h) | 95 % interval | descriptors | threads | verdict |
|---|---|---|---|---|---|---|---|"""
    ]
    for line in found:
        slope, verdict = line.slope, ("passed" if line.passes else "MISSED") if line.judged else "short"
        cells = [f"{line.name} ({line.pid})", f"{line.minutes:.0f}", f"{line.rss_mb:.1f}", f"{slope.median:+.2f}"]
        cells += [f"{slope.low:+.2f} to {slope.high:+.2f}"]
        cells += [f"{least} to {most}" for least, most in (line.descriptors, line.threads)]
        text.append(f"| {' | '.join([*cells, verdict])} |")
    text += ["", *(f"- MISSED: {fault}" for fault in faults), *[""] * bool(faults), "| run directory | KB |", "|---|---|"]
    return "\n".join([*text, *(f"| {name} | {size / KILOBYTE:,.0f} |" for name, size in parts.items())]) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Soak and print the page; exit code 1 where a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--csv", type=Path, default=Path("soak.csv"), help="the samples")
    parser.add_argument("--write", action="store_true", help=f"keep the page in {RESULTS.name}")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with deployed(Setup()) as deployment:
        samples, parts = soak(deployment, minutes=options.minutes, seed=options.seed, out=options.csv)
        deployment.finish()
        books = close_books(deployment, claims=False)
    found = lines(samples, minutes=options.minutes)
    faults = missed(found, books, deployment.exits)
    print(text := page(found, parts, books, faults, minutes=options.minutes))
    if options.write:
        RESULTS.write_text(text)
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
