"""The end of a process as a value that is passed in: who works looks at it, who waits waits on it.

Nobody calls `sys.exit` from the middle: a loop sees the request, finishes what it holds, and returns.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Lock, Thread
from types import FrameType
from typing import NoReturn

from common.units import Seconds

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ECHO_SECONDS: Seconds = 0.5


class Echo:
    """Tells a second request from the first one that comes twice: `timeout` signals its child, and then the child's group."""

    def __init__(self, clock: Callable[[], Seconds] = time.monotonic) -> None:
        """Nothing was heard yet."""
        self._clock = clock
        self._first: Seconds | None = None

    def heard(self) -> bool:
        """Whether the signal that comes now, where this is called, is the first one once more."""
        now = self._clock()
        if self._first is None:
            self._first = now
            return False
        return now - self._first <= ECHO_SECONDS


class Shutdown:
    """Asked for once; the first reason stands. Safe from any thread, but see `on_signals`."""

    def __init__(self) -> None:
        """Not requested."""
        self._event, self._lock, self._reason = Event(), Lock(), ""

    def request(self, reason: str) -> None:
        """Ask for the end; later requests change nothing."""
        with self._lock:
            if not self._event.is_set():
                self._reason = reason
                self._event.set()

    @property
    def requested(self) -> bool:
        """Whether the end has been asked for."""
        return self._event.is_set()

    @property
    def reason(self) -> str:
        """Why, or "" before it was asked for."""
        return self._reason

    def wait(self, timeout: Seconds) -> bool:
        """Wait for the request, at most `timeout` seconds; whether it has come."""
        return self._event.wait(timeout)


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


def _exit(number: int, _: FrameType | None = None) -> NoReturn:
    os._exit(128 + number)  # the default action of a signal cannot end process 1


@contextmanager
def on_signals(shutdown: Shutdown, *, clock: Callable[[], Seconds] = time.monotonic) -> Iterator[None]:
    """Let SIGTERM and SIGINT request the stop while inside; a later one ends the process at once, with code 128 + its number."""
    echo, asked = Echo(clock), False

    def handle(number: int, _: FrameType | None) -> None:
        nonlocal asked
        if echo.heard():
            return
        if asked:
            _exit(number)
        asked = True
        # A handler runs between two instructions of the main thread, which may hold the very lock that `request`
        # takes: asking from a thread of its own cannot deadlock.
        name = signal.Signals(number).name
        Thread(target=shutdown.request, args=(name,), name="signal", daemon=True).start()

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
