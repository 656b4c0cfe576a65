"""The supervisor's hands: starts, signals and reaps child processes, and keeps what they say out of the terminal.

Every child runs in its own process group (the terminal's Ctrl-C reaches only the supervisor), writes to its own log
file, and dies with the supervisor (`tether.py`). Nothing here decides anything: see `supervisor.py`.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from common.runtime.shutdown import Echo
from common.units import KIB, MIB, Seconds
from services.cli import tether
from services.cli.supervisor import (
    LEARNER,
    Begin,
    Event,
    Exited,
    GiveUp,
    Kill,
    Scale,
    Start,
    StopRequested,
    Supervisor,
    Terminate,
    Tick,
)

POLL_SECONDS: Seconds = 0.2
LAST_WORDS_BYTES = 16 * KIB
LOG_BYTES = 10 * MIB  # of one log file; a child has two
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Command = Callable[[Start], Sequence[str]]
"""What to run for a child; a function because a learner that is restarted gets `--resume`."""


class Processes:
    """The children of one run. Use from the main thread only: a child is bound to the life of the thread that starts it."""

    def __init__(self, *, command: Command, logs: Path, environment: Mapping[str, str], lock: int | None = None) -> None:
        """Log to `logs/<child>.log`; children see exactly `environment`. The learner inherits the descriptor `lock`."""
        self._command, self._logs, self._environment = command, logs, dict(environment)
        self._lock = lock
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        with suppress(OSError):
            logs.mkdir(parents=True, exist_ok=True)

    def start(self, instruction: Start) -> None:
        """Start one child, appending to its log; where the log cannot be opened, as on a full disk, its output is lost."""
        own = [sys.executable, "-I", "-S", tether.__file__, str(os.getpid())]
        inherited = () if self._lock is None or instruction.child != LEARNER else (self._lock,)
        with self._output(instruction.child) as log:
            self._running[instruction.child] = subprocess.Popen(
                [*own, *self._command(instruction)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                process_group=0,
                pass_fds=inherited,
            )

    def terminate(self, child: str) -> None:
        """Send SIGTERM; a child that is gone already is no error."""
        with suppress(KeyError, ProcessLookupError):
            self._running[child].terminate()

    def kill(self, child: str) -> None:
        """Send SIGKILL to the child and all processes of its group."""
        with suppress(KeyError, ProcessLookupError):
            os.killpg(self._running[child].pid, signal.SIGKILL)

    def exited(self) -> list[Exited]:
        """Children that ended since the last call."""
        gone = [Exited(name, code) for name, process in self._running.items() if (code := process.poll()) is not None]
        for event in gone:
            del self._running[event.child]
        return gone

    def pids(self) -> dict[str, int]:
        """Process id of each child that runs."""
        return {name: process.pid for name, process in self._running.items()}

    def log(self, child: str) -> Path:
        """Where the child's output goes."""
        return self._logs / f"{child}.log"

    def _output(self, child: str) -> BinaryIO:
        try:
            return self.log(child).open("ab")
        except OSError:
            return Path(os.devnull).open("ab")

    def last_words(self, child: str, lines: int = 12) -> list[str]:
        """The end of the child's log."""
        log = self.log(child)
        end = b"".join(_end_of(path, LAST_WORDS_BYTES) for path in (_older(log), log))[-LAST_WORDS_BYTES:]
        return list(deque(end.decode(errors="replace").splitlines(), maxlen=lines))

    def rotate_logs(self) -> None:
        """Copy the end of each log larger than `LOG_BYTES` to `<child>.log.1`, and empty the log.

        A child appends to a descriptor of the file, which cannot be exchanged. What it writes between the two steps is lost.
        """
        for log in map(self.log, self._running):
            with suppress(OSError):
                if log.stat().st_size > LOG_BYTES:
                    end = _end_of(log, LOG_BYTES)
                    os.truncate(log, 0)  # first: on a full disk this makes the room
                    _older(log).write_bytes(end)

    def kill_all(self) -> None:
        """Leave nobody behind, whatever went wrong."""
        for child, process in list(self._running.items()):
            self.kill(child)
            process.wait()


def _older(log: Path) -> Path:
    return log.with_name(f"{log.name}.1")


def _end_of(path: Path, size: int) -> bytes:
    """Return the last `size` bytes of a file, empty where there is none."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - size))
        return file.read(size)
    return b""


Inbox = queue.SimpleQueue[StopRequested | Scale]
"""What is asked of the supervisor. A SimpleQueue, since its `put` is safe inside a signal handler."""


@contextmanager
def stop_signals(inbox: Inbox) -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP into `StopRequested` while inside; one that comes twice at once into one."""
    echo = Echo()

    def handle(*_: object) -> None:
        if not echo.heard():
            inbox.put(StopRequested())

    before = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def supervise(
    core: Supervisor,
    processes: Processes,
    *,
    inbox: Inbox,
    on_tick: Callable[[], None],
    on_give_up: Callable[[GiveUp], None],
    clock: Callable[[], Seconds] = time.monotonic,
) -> None:
    """Run `core` until everybody has left: wait, tell it what happened, do what it says. `on_tick` must not block."""
    events: list[Event] = [Begin()]
    try:
        while True:
            for event in events:
                for instruction in core.handle(event, clock()):
                    match instruction:
                        case Start():
                            processes.start(instruction)
                        case Terminate(child):
                            processes.terminate(child)
                        case Kill(child):
                            processes.kill(child)
                        case GiveUp():
                            on_give_up(instruction)
            processes.rotate_logs()
            on_tick()
            if core.done:
                return
            requests: list[StopRequested | Scale] = []
            with suppress(queue.Empty):
                requests.append(inbox.get(timeout=POLL_SECONDS))
            events = [*processes.exited(), *requests, Tick()]
    finally:
        processes.kill_all()
