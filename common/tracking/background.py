"""The interface of a tracker, a program outside of the run that shows its curves, settings and result, and the thread of each.

A tracker has a thread of its own, so that a server that is slow or unreachable costs points and never the run's time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from common.observability import logs
from common.units import EnvSteps, Seconds

Setting: TypeAlias = str | int | float | bool
QUEUED_POINTS = 3600  # kept while the server is unreachable: an hour at one point per second
POINTS_AT_ONCE = 50
RETRY_SECONDS: Seconds = 30.0  # after an error, until the tracker is opened again
LAST_RETRY_SECONDS: Seconds = 1.0  # the same, at the end of the run

_log = logs.EventLog(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """Identity and settings of a run. A tracker finds the run again by `run_id` after a resume."""

    run_id: str
    name: str
    folder: Path  # of the run
    settings: Mapping[str, Setting]  # by dotted key; lists and objects as JSON, without those that have no value
    hyperparameters: Mapping[str, Setting]  # the settings that decide what is learned


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Scalars at one moment of a run, finite, by slash-separated names. The x axis is env steps trained on."""

    env_steps: EnvSteps
    unix_seconds: Seconds
    values: Mapping[str, float]


class Tracker(Protocol):
    """A tracker that was opened for a run and has its settings. One thread uses it; all methods may block and raise."""

    def write(self, points: Sequence[Point]) -> None:
        """Add points in the order in which they came; evaluations are points too."""

    def finish(self, result: Mapping[str, float], *, complete: bool) -> None:
        """Set the result of the run; `complete` is False where the run was stopped and may be resumed."""

    def close(self) -> None:
        """Release what is open."""


class BackgroundTracker:
    """Queue of points for one tracker, and the thread that opens the tracker and sends them.

    The first error is logged, and the tracker is opened again every `retry_seconds` until the points were sent; then that is
    logged. Of more than `capacity` points the oldest are dropped.
    """

    def __init__(
        self,
        name: str,
        open_tracker: Callable[[], Tracker],
        *,
        capacity: int = QUEUED_POINTS,
        retry_seconds: Seconds = RETRY_SECONDS,
    ) -> None:
        self.name, self._open, self._capacity, self._retry_seconds = name, open_tracker, capacity, retry_seconds
        self._changed = threading.Condition()
        self._points: deque[Point] = deque()
        self._sending: list[Point] = []  # they have left the queue, and return to it where the tracker fails
        self.dropped = 0  # points that were never sent
        self._end: tuple[Mapping[str, float], bool] | None = None  # result, and whether the run is complete
        self._closing = False
        self._deadline: Seconds = 0.0  # on the monotonic clock, while closing
        self._tracker: Tracker | None = None  # of the thread
        self._losing = False
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> str:
        """Return what the server did not get, once this is closed; "" where it got all."""
        points = f"{self.dropped:,} point{'s' if self.dropped > 1 else ''}" if self.dropped else ""
        parts = [part for part in (points, "the result" if self._end else "") if part]
        return f"{self.name} did not get {' and '.join(parts)}" if parts else ""

    def write(self, point: Point) -> None:
        """Queue a point; does not block."""
        with self._changed:
            self._points.append(point)
            self._drop_oldest()
            self._changed.notify()

    def finish(self, result: Mapping[str, float], *, complete: bool) -> None:
        """Set the result, to be sent after the points; does not block."""
        with self._changed:
            self._end = result, complete
            self._changed.notify()

    def close(self, deadline: Seconds) -> None:
        """Send what is queued, until the monotonic clock shows `deadline`; what is left then is dropped. May be called twice."""
        with self._changed:
            self._closing, self._deadline = True, deadline
            self._changed.notify()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        with self._changed:
            self.dropped += len(self._sending) + len(self._points)
            self._sending = []
            self._points.clear()

    def _run(self) -> None:
        while self._send_next():
            pass
        with suppress(Exception):
            if self._tracker:
                self._tracker.close()

    def _send_next(self) -> bool:
        """Wait for something to send and send it; return False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._points or self._end or self._closing or not (self._tracker or self._losing))
            points = [self._points.popleft() for _ in range(min(POINTS_AT_ONCE, len(self._points)))]
            self._sending = points
            end = None if self._points else self._end
            if self._closing and not points and end is None:
                return False
        try:
            self._tracker = self._tracker or self._open()
            if points:
                self._tracker.write(points)
                with self._changed:
                    self._sending = []
            if end:
                self._tracker.finish(end[0], complete=end[1])
                self._end = None
        except Exception as error:  # noqa: BLE001  packages of trackers raise anything; none of it may end the run
            return self._failed(error)
        if self._losing:
            self._losing = False
            _log.info("tracker_resumed", tracker=self.name)
        return True

    def _failed(self, error: Exception) -> bool:
        """Log the first error of an outage, keep the points and wait; return False where the run ends."""
        with self._changed:
            self._points.extendleft(reversed(self._sending))
            self._sending = []
            self._drop_oldest()
        if not self._losing:
            self._losing = True
            consequence = "the run goes on; points are kept and sent later"
            _log.warning("tracker_lost", tracker=self.name, error=error, consequence=consequence)
        broken, self._tracker = self._tracker, None
        with suppress(Exception):
            if broken:
                broken.close()
        with self._changed:
            if not self._closing:
                self._changed.wait_for(lambda: self._closing, self._retry_seconds)
                return True
            self._changed.wait(min(LAST_RETRY_SECONDS, self._retry_seconds))
        return time.monotonic() < self._deadline

    def _drop_oldest(self) -> None:
        while len(self._points) > self._capacity:
            self._points.popleft()
            self.dropped += 1
