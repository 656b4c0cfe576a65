"""Start of a run, from the command to the first env step and the first update: a figure for each process.

    python -m benchmarks.startup cartpole --repeats 5
    python -m benchmarks.startup cartpole --repeats 5 --trees ../before .       two checkouts, in turns

For each process: when it starts; when its first log line comes, which a worker writes after its imports and a learner once it
listens; when a worker is welcomed; and the core time that it has used when an actor has made its first env step. Other work on
the machine changes the seconds much and the core time little; the table names the cores that were busy with it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import psutil

from benchmarks.pipeline import LEAVE_SECONDS, POLL_SECONDS, START_SECONDS, STEPPED, TRAINED, scrape
from common.errors import ResourceError
from common.observability.deployment import ACTOR, LEARNER
from common.runtime.run_directory import RunDirectory
from common.units import Seconds

COMMAND = "rookery train"
STARTS, LOGS, WELCOMED, STEP, UPDATE, CORE_TIME = (
    "starts",
    "first log line",
    "welcomed",
    "first env step",
    "first update",
    "core time",
)
COLUMNS = (STARTS, LOGS, WELCOMED, STEP, UPDATE, CORE_TIME)
OTHER = "other cores busy"

Figures = dict[tuple[str, str], float]
"""Seconds by process and column, of one start of a run; and `OTHER`."""


class StartedRun:
    """A run from its command on, in a process of its own. `figures` grow at each `look`."""

    def __init__(self, words: Sequence[str], *, tree: Path, run_dir: Path) -> None:
        """Give the command `rookery train WORDS` of the checkout in `tree`."""
        self.figures: Figures = {}
        self._directory = RunDirectory(run_dir)
        self._busy, self._began = _busy_seconds(), time.monotonic()
        command = [sys.executable, "-m", "services.cli", "train", *words, "--run-dir", str(run_dir), "--log-format", "plain"]
        environment = {**os.environ, "PYTHONPATH": str(tree.resolve())}  # for the processes of the run too
        self._process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )

    def wait(self) -> None:
        """Wait for the first update. Raises `ResourceError` where it does not come."""
        while not any(column == UPDATE for _, column in self.figures):
            if self._process.poll() is not None or self._seconds > START_SECONDS:
                raise ResourceError("the run does not train", found=self._end(), wanted="an update")
            self._look()
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """Stop the run."""
        self._process.terminate()
        self._end()

    def _end(self) -> str:
        try:
            return self._process.communicate(timeout=LEAVE_SECONDS)[1].strip() or "nothing on stderr"
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.communicate()[1]

    @property
    def _seconds(self) -> Seconds:
        return time.monotonic() - self._began

    def _look(self) -> None:
        now = self._seconds
        processes = dict(self._processes())
        for child in processes:
            self.figures.setdefault((child, STARTS), now)
            log = self._directory.logs / f"{child}.log"
            text = log.read_text(errors="replace") if log.exists() else ""
            for column, event in ((LOGS, "_started"), (WELCOMED, " welcomed ")):
                if event in text:
                    self.figures.setdefault((child, column), now)
        for child, column, counter in self._awaited():
            with contextlib.suppress(OSError, ValueError, KeyError):
                url = json.loads(self._directory.addresses.read_text())[child]
                if scrape(url).get(counter):
                    self._reached(child, column, processes)

    def _awaited(self) -> Iterator[tuple[str, str, str]]:
        """Yield process, column and counter of each first step that is about to come."""
        for child in {child for child, column in self.figures if column == WELCOMED and child.startswith(ACTOR)}:
            if (child, STEP) not in self.figures:
                yield child, STEP, STEPPED
        if any(column == STEP for _, column in self.figures):
            yield LEARNER, UPDATE, TRAINED

    def _reached(self, child: str, column: str, processes: dict[str, psutil.Process]) -> None:
        self.figures[child, column] = self._seconds
        if not any(known == CORE_TIME for _, known in self.figures):
            own = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
            self.figures |= {(name, CORE_TIME): seconds for name, seconds in own.items()}
            self.figures[OTHER, ""] = (_busy_seconds() - self._busy - sum(own.values())) / self._seconds

    def _processes(self) -> Iterator[tuple[str, psutil.Process]]:
        """Yield name and process of the command and of its children."""
        command = psutil.Process(self._process.pid)
        yield COMMAND, command
        for child in command.children():
            with contextlib.suppress(psutil.Error, ValueError, IndexError):
                words = child.cmdline()
                role = words[words.index("-m") + 1].partition(".")[2]
                yield words[words.index("--name") + 1] if "--name" in words else role, child


def _busy_seconds() -> Seconds:
    """Core seconds that all programs of the machine have used since its start."""
    spent = psutil.cpu_times()
    return sum(spent) - spent.idle - getattr(spent, "iowait", 0.0) - getattr(spent, "guest", 0.0)


def measure(words: Sequence[str], tree: Path) -> Figures:
    """Start a run, and return its figures."""
    with TemporaryDirectory(prefix="rookery-bench-") as folder:
        run = StartedRun(words, tree=tree, run_dir=Path(folder) / "run")
        try:
            run.wait()
        finally:
            run.stop()
        return run.figures


def table(starts: Sequence[Figures]) -> str:
    """Return a row for each process: the least and the median of its figures."""
    processes = list(dict.fromkeys(name for start in starts for name, column in start if column))
    rows = [f"| process | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for name in processes:
        found = [[start[name, column] for start in starts if (name, column) in start] for column in COLUMNS]
        rows.append(f"| {name} | {' | '.join(f'{min(each):.2f} / {median(each):.2f}' if each else '' for each in found)} |")
    total = [sum(value for (_, column), value in start.items() if column == CORE_TIME) for start in starts]
    other = median(start[OTHER, ""] for start in starts)
    return "\n".join(
        [*rows, f"core time of all: {min(total):.2f} / {median(total):.2f}; {OTHER}: {other:.2f} of {os.cpu_count()}"]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="+", metavar="PRESET or section.key=value", help="what to train")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--trees", nargs="+", type=Path, default=[Path()], help="checkouts of rookery, in turns; default: this one"
    )
    asked = parser.parse_args(argv)
    starts: dict[Path, list[Figures]] = {tree: [] for tree in asked.trees}
    for _ in range(asked.repeats):
        for tree in asked.trees:
            starts[tree].append(measure(asked.words, tree))
    for tree, found in starts.items():
        print(f"{' '.join(asked.words)}, {tree.resolve().name}: seconds, least / median of {len(found)} starts\n{table(found)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
