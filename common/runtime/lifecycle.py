"""The life of a process as values that are passed in: the request to stop it, and whether it is alive and ready.

No function calls `sys.exit` in the middle: a loop reads `Shutdown`, finishes its work, and returns. Imports nothing that
is slow, because `exit_on_signals` runs before the imports of a service.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Lock, Thread
from types import FrameType
from typing import NoReturn

from common.units import Seconds

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ECHO_SECONDS: Seconds = 0.5
SLOW_SECONDS: Seconds = 5.0  # of work with a time limit, before a log line
BUILD_SECONDS: Seconds = 300.0  # limit for environments to be built and reset: a simulator may take its time
CLOSE_SECONDS: Seconds = 10.0  # the same, to be closed: nobody waits longer for a process that has been asked to end


class Shutdown:
    """Request to stop the process: made once, the first reason stands. Safe from any thread, but see `on_signals`."""

    def __init__(self) -> None:
        """Not requested."""
        self._event, self._lock, self._reason = Event(), Lock(), ""

    def request(self, reason: str) -> None:
        """Request the stop; later requests change nothing."""
        with self._lock:
            if not self._event.is_set():
                self._reason = reason
                self._event.set()

    @property
    def requested(self) -> bool:
        """Return whether the stop has been requested."""
        return self._event.is_set()

    @property
    def reason(self) -> str:
        """Return the reason, "" before the request."""
        return self._reason

    def wait(self, timeout: Seconds) -> bool:
        """Wait for the request, at most `timeout` seconds; return whether it has come."""
        return self._event.wait(timeout)


# --- signals ---


def exit_on_signals() -> None:
    """Let SIGTERM and SIGINT end the process at once, with code 128 + their number, until `on_signals` takes over.

    Call it before the imports of a service: they take seconds, and process 1 of a container ignores a signal that has no handler.
    A signal that `block_signals` kept pending is delivered here.
    """
    for number in SIGNALS:
        signal.signal(number, _exit)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def block_signals() -> None:
    """Keep SIGTERM and SIGINT pending, also across `exec`, which removes handlers, until `exit_on_signals`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


@contextmanager
def on_signals(shutdown: Shutdown, *, clock: Callable[[], Seconds] = time.monotonic) -> Iterator[None]:
    """Let SIGTERM and SIGINT request the stop while inside; a later one ends the process at once, with code 128 + its number."""
    echo, requested = Echo(clock), False

    def handle(number: int, _: FrameType | None) -> None:
        nonlocal requested
        if echo.heard():
            return
        if requested:
            _exit(number)
        requested = True
        # A handler runs between two instructions of the main thread, which may hold the lock that `request` takes: a request
        # from another thread cannot deadlock.
        name = signal.Signals(number).name
        Thread(target=shutdown.request, args=(name,), name="signal", daemon=True).start()

    with handled(SIGNALS, handle):
        yield


@contextmanager
def handled(signals: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call `handler` at each of these signals while inside."""
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


# --- time limits ---


@contextmanager
def time_limit(
    limit: Seconds,
    *,
    on_slow: Callable[[Seconds], None],
    on_limit: Callable[[Seconds], None],
    exit_process: Callable[[int], object] = os._exit,
) -> Iterator[None]:
    """End the process with exit code 1 where the work inside takes `limit` seconds, even if it cannot be interrupted.

    `on_slow` is called after `SLOW_SECONDS`, and `on_limit` before the end, both from another thread and with their seconds.
    """
    done = Event()

    def watch() -> None:
        if done.wait(SLOW_SECONDS):
            return
        on_slow(SLOW_SECONDS)
        if not done.wait(limit - SLOW_SECONDS):
            on_limit(limit)
            exit_process(1)

    Thread(target=watch, name="time-limit", daemon=True).start()
    try:
        yield
    finally:
        done.set()


class Echo:
    """Separates a second request from a repetition of the first: `timeout` signals its child, and then the child's group."""

    def __init__(self, clock: Callable[[], Seconds] = time.monotonic) -> None:
        """No signal has come yet."""
        self._clock = clock
        self._first: Seconds | None = None

    def heard(self) -> bool:
        """Return whether the signal that comes now, where this is called, repeats the first one."""
        now = self._clock()
        if self._first is None:
            self._first = now
            return False
        return now - self._first <= ECHO_SECONDS


def _exit(number: int, _: FrameType | None = None) -> NoReturn:
    os._exit(128 + number)  # the default action of a signal cannot end process 1


# --- health ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answer to a probe: whether all is well, and one sentence; `age` is the time since the last tick."""

    ok: bool
    sentence: str
    age: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class _Tick:
    at: Seconds
    within: Seconds
    doing: str


class Health:
    """Ticks of the loop of one service, from which probes are answered. Every method may be called from any thread.

    A loop that waits for credit or for experience is healthy: it goes round at its timeout and ticks. Work that takes longer than
    the usual deadline must be announced (`within`). Liveness never depends on another process: Kubernetes must not restart actors
    because their learner does not answer. Readiness may.
    """

    def __init__(self, *, deadline: Seconds = 15.0, clock: Callable[[], Seconds] = time.monotonic) -> None:
        """The loop owes a tick at most `deadline` seconds after the last one, the first counted from here."""
        self._clock, self._deadline = clock, deadline
        self._tick = _Tick(clock(), deadline, "starts")  # replaced as a whole, so that no reader needs a lock
        self._obstacle: Callable[[], str] = lambda: "starting"

    def tick(self, *, doing: str = "", within: Seconds | None = None) -> None:
        """Report that the loop goes round. It is `doing` something (reported if it hangs) and ticks again `within` seconds."""
        self._tick = _Tick(self._clock(), self._deadline if within is None else within, doing)

    def ready(self, unless: Callable[[], str] = lambda: "") -> None:
        """Report the service as ready from now on, except while `unless`, called at each probe, returns a reason; "" is none."""
        self._obstacle = unless

    def liveness(self) -> Answer:
        """Return not ok once the loop is overdue."""
        tick = self._tick
        age = self._clock() - tick.at
        if age <= tick.within:
            return Answer(ok=True, sentence="ok", age=age)
        doing = f" while it {tick.doing}" if tick.doing else ""
        return Answer(ok=False, sentence=f"loop has not ticked for {age:.1f} s{doing}; wanted every {tick.within:g} s", age=age)

    def readiness(self) -> Answer:
        """Return not ok until the service has reported that it is ready, and while there is a reason against it."""
        obstacle = self._obstacle()
        return Answer(ok=not obstacle, sentence=obstacle or "ok")
