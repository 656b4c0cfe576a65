"""Runs `rookery train` commands, each in its own process, and passes stop signals on to those that run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from common.units import Seconds
from services.cli.train import exit_with_parent
from services.cli.train.processes import stop_signals

POLL_SECONDS: Seconds = 0.2


class TrainProcesses:
    """Runs `rookery train`. Use it as a context manager, which handles stop signals, from the main thread."""

    def __init__(self, command: Sequence[str] = (sys.executable, "-m", "services.cli")) -> None:
        """No process runs; `command` is that of `rookery`."""
        self._command = tuple(command)
        self._requests = 0  # to stop
        self._signals = stop_signals(self._request)

    @property
    def stopped(self) -> bool:
        """True once Ctrl-C or SIGTERM came: no further run should start."""
        return self._requests > 0

    def __enter__(self) -> Self:
        """Handle stop signals."""
        self._signals.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the signal handlers."""
        self._signals.__exit__(None, None, None)

    def train(self, argv: Sequence[str], *, over: Callable[[], bool] = lambda: False, log: Path | None = None) -> int:
        """Run `rookery train` with the arguments `argv`, in a process group of its own, and return its exit code.

        Its output goes to the end of the file `log`, or to the terminal. Once `over` returns True it is stopped. A stop signal is
        passed on as SIGTERM: the run saves and stops; a second one ends it at once. It is killed when this process ends. Safe
        from any thread.
        """
        wrapper = [sys.executable, "-I", "-S", exit_with_parent.__file__, str(os.getpid())]
        with ExitStack() as stack:
            output = None if log is None else stack.enter_context(log.open("ab"))
            process = stack.enter_context(
                subprocess.Popen(
                    [*wrapper, *self._command, *argv],
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

    def _request(self) -> None:
        self._requests += 1
