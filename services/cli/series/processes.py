"""Runs `rookery train` commands, each in its own process, and passes stop signals on to those that run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from common.units import Seconds
from services.cli.train import exit_with_parent
from services.cli.train.processes import stop_signals

POLL_SECONDS: Seconds = 0.2


@contextmanager
def train_processes(command: Sequence[str] = (sys.executable, "-m", "services.cli")) -> Iterator[TrainProcesses]:
    """Yield the means to run `rookery train`, and handle stop signals while inside. For the main thread."""
    processes = TrainProcesses(command)
    with stop_signals(processes.stop):
        yield processes


class TrainProcesses:
    """Runs `rookery train`, until a stop was requested."""

    def __init__(self, command: Sequence[str]) -> None:
        """No process runs; `command` is that of `rookery`."""
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
        `stop` the run saves and stops; the second one ends it at once. It is killed when this process ends. Safe from any thread.
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
                    return process.wait(POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    is_over = is_over or over()
