"""The runs of a series: which are left to do, and a `rookery train` for each, one or several at a time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from typing import TextIO

from common.config.code_references import allow_code
from common.config.load import load_settings
from common.errors import ConfigError
from common.runtime.process import INTERRUPTED
from common.runtime.run_directory import RunDirectory
from common.units import Seconds
from services.cli.compare.runs import read_run, read_runs
from services.cli.compare.tables import print_runs, result
from services.cli.series.grid import Member
from services.cli.series.plan import Series
from services.cli.train import exit_with_parent
from services.cli.train.instructions import ENDED_BY_SIGTERM
from services.cli.train.outcome import own_end, read_summary
from services.cli.train.processes import stop_signals
from services.cli.train.view import outlived

POLL_SECONDS: Seconds = 0.2  # of a process of `rookery train`


def run_series(
    series: Series,
    folder: Path,
    *,
    trainer: TrainProcesses,
    show: Callable[[str], None],
    stdout: TextIO,
    environ: Mapping[str, str],
    parallel: int,
    options: Sequence[str] = (),
) -> int:
    """Run the members that have not finished, `parallel` at a time, show a table of all, and return the exit code.

    `options` of `rookery train` are of this command alone. 0: no member failed; 1: one failed; 130: a member was stopped at once.
    Members that run beside others write to a log.
    """
    members = series.members
    show(f"series of {len(members)} runs in {folder}" + (f", {parallel} at a time" if parallel > 1 else ""))
    interrupted, allowed = Event(), _allow_code(series, folder, environ)

    def run(number: int, member: Member) -> int:
        path, place = folder / member.name, f"run {number} of {len(members)}, {member.name}"
        if trainer.stopped or interrupted.is_set():
            return 0
        if is_finished(path, overrides=series.overrides_of(member), environ=environ):
            show(f"{place}: finished before: {result(read_run(path))}")
            return 0
        log = folder / f"{member.name}.log" if parallel > 1 else None
        show(place + (f": its output is in {log}" if log else ""))
        arguments = train_arguments(series.preset, series.overrides_of(member), (*series.options, *options), path)
        code = trainer.train(arguments, log=log)
        if log:
            show(f"{place}: {result(read_run(path)) if is_readable(path) else f'exit code {code}'}")
        if code == INTERRUPTED:
            interrupted.set()
        return code

    def try_run(number: int, member: Member) -> int:
        try:
            return run(number, member)
        except ConfigError as error:  # files of the run that cannot be read
            show(f"{member.name} counts as failed: {error}")
            return 1

    with ThreadPoolExecutor(parallel) as pool:
        codes = list(pool.map(try_run, range(1, len(members) + 1), members))
    _show_results(folder, members, show=show, stdout=stdout)
    left = [member.name for member in members if not _has_finished(series, folder, member, environ)]
    if left:
        show(f"  {len(left)} of {len(members)} runs have not finished: {', '.join(left[:8])}{', ...' if left[8:] else ''}")
        show(f"  go on    rookery train --resume --run-dir {folder}{allowed}")
    if INTERRUPTED in codes:
        return INTERRUPTED
    return 1 if any(codes) else 0


def _show_results(folder: Path, members: Sequence[Member], *, show: Callable[[str], None], stdout: TextIO) -> None:
    """Show a table of the `members` in `folder` that have begun, and whose files can be read."""
    begun = [folder / member.name for member in members if is_readable(folder / member.name)]
    if begun:
        with outlived(stdout):
            print_runs(read_runs(begun), stdout=stdout)
        show(f"  compare  rookery report {folder}")


def _has_finished(series: Series, folder: Path, member: Member, environ: Mapping[str, str]) -> bool:
    """Return whether a member has finished; False where its files cannot be read."""
    try:
        return is_finished(folder / member.name, overrides=series.overrides_of(member), environ=environ)
    except ConfigError:
        return False


def is_readable(path: Path) -> bool:
    """Return whether a run has begun in `path`, and its files can be read."""
    if not RunDirectory(path).begun:
        return False
    try:
        read_run(path)
    except ConfigError:
        return False
    return True


def _allow_code(series: Series, folder: Path, environ: Mapping[str, str]) -> str:
    """Return the options of the command that goes on, for code of the runs outside of the current directory."""
    overrides = map(series.overrides_of, series.combinations)
    runs = (load_settings(preset=series.preset, overrides=each, environ=environ).settings for each in overrides)
    return "".join(dict.fromkeys(allow_code(settings.model_dump(mode="json"), run=folder) for settings in runs))


def train_arguments(preset: str, overrides: Sequence[str], options: Sequence[str], path: Path) -> list[str]:
    """Return the arguments of `rookery` that begin the run in `path`, or continue it where it began.

    Its preset and settings, which may be those of a foreign series, stand last, where a word is read as what it is here.
    """
    begun = RunDirectory(path).begun
    words = overrides if begun else (preset, *overrides)
    return ["train", *(["--resume"] if begun else []), *options, "--member", "--run-dir", str(path), "--", *words]


def is_finished(path: Path, *, overrides: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Return whether the run in `path` came to its target or spent its budget, by its own settings changed by `overrides`.

    False where it was killed after it went on from there. Raises `ConfigError` where its config.yaml cannot be read.
    """
    directory = RunDirectory(path)
    summary = read_summary(directory.summary) if directory.begun else None
    if summary is None:
        return False
    target = load_settings(preset=str(directory.config), overrides=overrides, environ=environ).settings.target
    return bool(own_end(summary, target.model_dump()) and read_run(path).summary)


# --- processes ---


@contextmanager
def train_processes(command: Sequence[str] = (sys.executable, "-P", "-m", "services.cli")) -> Iterator[TrainProcesses]:
    """Yield the means to run `rookery train`, and handle stop signals while inside. For the main thread."""
    processes = TrainProcesses(command)
    with stop_signals(processes.stop):
        yield processes


class TrainProcesses:
    """Runs `rookery train`, until a stop was requested."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)
        self._requests = 0  # to stop

    @property
    def stopped(self) -> bool:
        """True once a stop was requested: no further run should start."""
        return self._requests > 0

    def stop(self) -> None:
        """Pass a request to stop on to the runs, as SIGTERM. Safe inside a signal handler."""
        self._requests += 1

    def train(self, argv: Sequence[str], *, over: Callable[[], bool] = lambda: False, log: Path | None = None) -> int:
        """Run `rookery train` with the arguments `argv`, in a process group of its own, and return its exit code.

        Its output goes to the end of the file `log`, or to the terminal. Once `over` returns True it is stopped. At the first
        `stop` the run saves and stops; the second one ends it at once. One that SIGTERM ends, because it does not handle signals
        yet, was stopped too: exit code 0. It is killed when this process ends. Safe from any thread.
        """
        with ExitStack() as stack:
            output = None if log is None else stack.enter_context(log.open("ab"))
            process = stack.enter_context(
                subprocess.Popen(
                    [*exit_with_parent.wrapper(), *self._command, *argv],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=None if output is None else subprocess.STDOUT,
                    process_group=0,
                )
            )
            sent, is_over = 0, False
            while True:
                for _ in range(sent, max(self._requests, int(is_over))):  # a second signal would lose what is not saved
                    process.terminate()
                    sent += 1
                try:
                    code = process.wait(POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    is_over = is_over or over()
                else:
                    return 0 if code in ENDED_BY_SIGTERM and (self.stopped or is_over) else code
