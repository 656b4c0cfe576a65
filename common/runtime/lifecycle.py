"""The life of a process: the request to stop it, which is a value that is passed in, and time limits.

No function calls `sys.exit` in the middle: a loop reads `Shutdown`, finishes its work, and returns. Imports nothing that
is slow, because `begin_process` runs before the imports of a service.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Event, Lock, Thread
from types import FrameType
from typing import NoReturn

from common.units import Seconds

STARTED: Seconds = time.monotonic()  # of this process: a service imports this module first
SIGNALS = (signal.SIGTERM, signal.SIGINT)
ECHO_SECONDS: Seconds = 0.5
SLOW_SECONDS: Seconds = 5.0  # of work with a time limit, before a log line
BUILD_SECONDS: Seconds = 300.0  # limit for environments to be built and reset: a simulator may take its time
CLOSE_SECONDS: Seconds = 4.0  # the same, to be closed: a process that was asked to end is killed after 6 s


class Shutdown:
    """Request to stop the process: made once, the first reason stands. Safe from any thread, but see `on_signals`."""

    def __init__(self) -> None:
        self._event, self._lock = Event(), Lock()
        self.reason = ""  # "" before the request

    def request(self, reason: str) -> None:
        """Request the stop; later requests change nothing."""
        with self._lock:
            if not self._event.is_set():
                self.reason = reason
                self._event.set()

    @property
    def requested(self) -> bool:
        """Return whether the stop has been requested."""
        return self._event.is_set()

    def wait(self, timeout: Seconds) -> bool:
        """Wait for the request, at most `timeout` seconds; return whether it has come."""
        return self._event.wait(timeout)


# --- signals ---


def begin_process() -> None:
    """Let SIGTERM and SIGINT end the process at once, with code 128 + their number, until `on_signals` takes over; pause the gc.

    Call it before the imports of a service: they take seconds, and process 1 of a container ignores a signal that has no handler.
    A signal that `block_signals` kept pending is delivered here. Garbage collection, which would go again and again through all
    that was imported, pauses until `process.run`.
    """
    for number in SIGNALS:
        signal.signal(number, _exit)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    gc.disable()


def block_signals() -> None:
    """Keep SIGTERM and SIGINT pending, also across `exec`, which removes handlers, until `begin_process`."""
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

    `on_slow` is called after `SLOW_SECONDS`, or half of a shorter limit, and `on_limit` before the end, both from another thread
    and with their seconds.
    """
    done, slow = Event(), min(SLOW_SECONDS, limit / 2)

    def watch() -> None:
        if done.wait(slow):
            return
        on_slow(slow)
        if not done.wait(limit - slow):
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
