"""Starts, signals and reaps the child processes of a run, as `supervisor.py` decides.

Every child runs in its own process group, so that the terminal's Ctrl-C reaches only the supervisor. It writes to its own log
file, and is killed when the supervisor ends (`exit_with_parent.py`).
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeAlias

from common.observability.deployment import LEARNER
from common.runtime.lifecycle import Echo, handled
from common.units import KIB, MIB, Seconds
from services.cli.train import exit_with_parent
from services.cli.train.instructions import NOT_STARTED, Instruction, Kill, Report, Start, Terminate
from services.cli.train.supervisor import Supervisor

POLL_SECONDS: Seconds = 0.2
LOG_END_BYTES = 16 * KIB
LOG_BYTES = 10 * MIB  # of one log file; a child has two
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(kw_only=True)
class Processes:
    """The child processes of one run. Use it from the main thread: a child is killed when the thread that started it ends."""

    command: Callable[[Start], Sequence[str]]  # the line that starts a child
    logs: Path  # folder of `<child>.log`
    environment: Mapping[str, str]  # of all children
    added: Callable[[str], Mapping[str, str]] = lambda _: {}  # variables of one child
    lock: int | None = None  # descriptor that the learner inherits
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _not_started: dict[str, int] = field(default_factory=dict)  # child -> its exit code, until `exited` returns it
    _terminated: set[str] = field(default_factory=set)  # running children that were sent SIGTERM

    def __post_init__(self) -> None:
        with suppress(OSError):
            self.logs.mkdir(parents=True, exist_ok=True)

    def start(self, instruction: Start) -> None:
        """Start one child, which appends to its log. Where the log cannot be opened, as on a full disk, its output is lost.

        A process that cannot be made, as at a limit of processes or of memory, counts as one that ended with `NOT_STARTED`.
        """
        child = instruction.child
        self._terminated.discard(child)
        inherited = () if self.lock is None or child != LEARNER else (self.lock,)
        with self._output(child) as log:
            try:
                self._running[child] = subprocess.Popen(
                    [*exit_with_parent.wrapper(), *self.command(instruction)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**self.environment, **self.added(child)},
                    process_group=0,
                    pass_fds=inherited,
                )
            except OSError as error:
                self._not_started[child] = NOT_STARTED
                with suppress(OSError):
                    log.write(f"process_not_started error={json.dumps(str(error))}\n".encode())
                    log.flush()

    def terminate(self, child: str) -> None:
        """Send SIGTERM, once, because a service aborts at the second; a child that has ended is no error."""
        if child in self._running and child not in self._terminated:
            self._terminated.add(child)
            self._running[child].terminate()

    def kill(self, child: str) -> None:
        """Send SIGKILL to the child and all processes of its group."""
        with suppress(KeyError, ProcessLookupError):
            os.killpg(self._running[child].pid, signal.SIGKILL)

    def exited(self) -> dict[str, int]:
        """Return the exit codes of the children that ended since the last call, negative for a signal.

        Processes that such a child has started and left, such as the engines of environments, are killed.
        """
        ended = {name: code for name, process in self._running.items() if (code := process.poll()) is not None}
        for name in ended:
            self.kill(name)
            del self._running[name]
        not_started, self._not_started = self._not_started, {}
        return {**ended, **not_started}

    def pids(self) -> dict[str, int]:
        """Return the process id of each running child."""
        return {name: process.pid for name, process in self._running.items()}

    def log(self, child: str) -> Path:
        """Return the file that has the child's output."""
        return self.logs / f"{child}.log"

    def _output(self, child: str) -> BinaryIO:
        try:
            return self.log(child).open("ab")
        except OSError:
            return Path(os.devnull).open("ab")

    def log_end(self, child: str, lines: int = 12) -> list[str]:
        """Return the last `lines` lines of the child's log, or one line that states why it cannot be read."""
        log = self.log(child)
        try:
            end = b"".join(_end_of(path, LOG_END_BYTES) for path in (_older(log), log))[-LOG_END_BYTES:]
        except OSError as error:
            return [f"its log cannot be read: {error.strerror}"]
        return list(deque(end.decode(errors="replace").splitlines(), maxlen=lines))

    def rotate_logs(self) -> None:
        """Copy the end of each log larger than `LOG_BYTES` to `<child>.log.1`, and empty the log.

        A child appends to a descriptor of the file, which cannot be replaced. Output between the two steps is lost.
        """
        for log in map(self.log, self._running):
            with suppress(OSError):
                if log.stat().st_size > LOG_BYTES:
                    end = _end_of(log, LOG_BYTES)
                    os.truncate(log, 0)  # first, because on a full disk this frees the space
                    _older(log).write_bytes(end)

    def drain(self, *, learner: Seconds, others: Seconds) -> None:
        """Send the learner SIGTERM, and once it has ended all others; wait up to so many seconds for each of the two."""
        for children, seconds in (([LEARNER], learner), ([*self._running], others)):
            until = time.monotonic() + seconds
            for child in children:
                self.terminate(child)
            for child in children:
                with suppress(KeyError, subprocess.TimeoutExpired):
                    self._running[child].wait(max(0.0, until - time.monotonic()))

    def kill_all(self) -> None:
        """Kill the children that still run, and wait for them."""
        for child, process in list(self._running.items()):
            self.kill(child)
            process.wait()


def _older(log: Path) -> Path:
    return log.with_name(f"{log.name}.1")


def _end_of(path: Path, size: int) -> bytes:
    """Return the last `size` bytes of a file, empty where there is none. Raises `OSError`."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - size))
        return file.read(size)
    return b""


Event: TypeAlias = Callable[[Seconds], list[Instruction]]
"""The method of the supervisor for an event, with all its arguments but the time."""

Requests = queue.SimpleQueue[Event]
"""Events for the supervisor. The `put` of a SimpleQueue is safe inside a signal handler."""


@contextmanager
def stop_signals(on_stop: Callable[[], object]) -> Iterator[None]:
    """Call `on_stop` at SIGINT, SIGTERM and SIGHUP while inside; repeated signals within moments count once.

    SIGHUP stays ignored where it was, as by nohup, so that the end of a terminal does not end the run.
    """
    echo = Echo()
    heeded = [number for number in STOP_SIGNALS if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]

    def handle(*_: object) -> None:
        if not echo.heard():
            on_stop()

    with handled(heeded, handle):
        yield


def supervise(
    supervisor: Supervisor,
    processes: Processes,
    *,
    requests: Requests,
    on_tick: Callable[[], None],
    on_report: Callable[[Report], None],
) -> None:
    """Pass events to `supervisor` and execute its instructions until all children have ended. `on_tick` must not block.

    Whatever is raised in here, the learner has time to save its state, and the others to end, before they are killed.
    """
    events: list[Event] = [supervisor.begin]
    try:
        while True:
            for event in events:
                for instruction in event(time.monotonic()):
                    match instruction:
                        case Start():
                            processes.start(instruction)
                        case Terminate(child):
                            processes.terminate(child)
                        case Kill(child):
                            processes.kill(child)
                        case report:
                            on_report(report)
            processes.rotate_logs()
            on_tick()
            if supervisor.done:
                return
            received: list[Event] = []
            with suppress(queue.Empty):
                received.append(requests.get(timeout=POLL_SECONDS))
            exited = [partial(supervisor.exited, child, code) for child, code in processes.exited().items()]
            events = [*exited, *received, supervisor.tick]
    except BaseException:
        processes.drain(learner=supervisor.timeouts.learner_stop, others=supervisor.timeouts.terminate)
        raise
    finally:
        processes.kill_all()
