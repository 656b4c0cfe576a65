"""The end of a process as a value that is passed in: who works looks at it, who waits waits on it.

Nobody calls `sys.exit` from the middle: a loop sees the request, finishes what it holds, and returns within the grace.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Lock, Thread
from types import FrameType

from common.units import Seconds

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Shutdown:
    """Asked for once; the first reason and its deadline stand. Safe from any thread, but see `on_signals`."""

    def __init__(self, *, clock: Callable[[], Seconds] = time.monotonic) -> None:
        """Not requested."""
        self._clock, self._event, self._lock = clock, Event(), Lock()
        self._reason, self._deadline = "", math.inf

    def request(self, reason: str, *, grace: Seconds) -> None:
        """Ask for the end within `grace` seconds; later requests change nothing."""
        with self._lock:
            if not self._event.is_set():
                self._reason, self._deadline = reason, self._clock() + grace
                self._event.set()

    @property
    def requested(self) -> bool:
        """Whether the end has been asked for."""
        return self._event.is_set()

    @property
    def reason(self) -> str:
        """Why, or "" before it was asked for."""
        return self._reason

    @property
    def remaining(self) -> Seconds:
        """Seconds left of the grace, never below 0; infinite before it was asked for."""
        return max(0.0, self._deadline - self._clock())

    def wait(self, timeout: Seconds) -> bool:
        """Wait for the request, at most `timeout` seconds; whether it has come."""
        return self._event.wait(timeout)


@contextmanager
def on_signals(shutdown: Shutdown, *, grace: Seconds) -> Iterator[None]:
    """SIGTERM and SIGINT ask for the end while inside; a second signal ends the process at once, as if never caught."""
    seen: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        seen.append(number)
        if len(seen) > 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        # A handler runs between two instructions of the main thread, which may hold the very lock that `request`
        # takes: asking from a thread of its own cannot deadlock.
        name = signal.Signals(number).name
        Thread(target=shutdown.request, args=(name,), kwargs={"grace": grace}, name="signal", daemon=True).start()

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
