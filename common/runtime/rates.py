"""From readings of a counter to rates: over the last 10 s, the last 60 s, and the whole run."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from common.units import Seconds

SHORT, LONG = 10.0, 60.0
SPACING: Seconds = 0.5  # readings that come faster replace one another: memory is bounded by LONG / SPACING


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Per second; 0 until two readings are apart. A window that is not full yet is as long as the run."""

    last_10s: float
    last_60s: float
    run: float


class RateWindow:
    """Readings of one counter, by one thread. A counter that falls has started again from 0, as after a restart."""

    def __init__(self) -> None:
        """No reading yet."""
        self._kept: deque[tuple[Seconds, float]] = deque()
        self._first = self._newest = (0.0, 0.0)
        self._raw, self._lost = 0.0, 0.0

    def add(self, now: Seconds, total: float) -> None:
        """The counter showed `total` at `now`."""
        if total < self._raw:
            self._lost += self._raw
        self._raw = total
        self._newest = (now, total + self._lost)
        if not self._kept:
            self._first = self._newest
        if not self._kept or now - self._kept[-1][0] >= SPACING:
            self._kept.append(self._newest)
        # One reading older than the window stays, or the window would be shorter than it says.
        while len(self._kept) > 1 and self._kept[1][0] <= now - LONG:
            self._kept.popleft()

    def rates(self) -> Rates:
        """The rates up to the newest reading."""
        return Rates(
            last_10s=self._rate(self._before(SHORT)), last_60s=self._rate(self._before(LONG)), run=self._rate(self._first)
        )

    def _before(self, span: Seconds) -> tuple[Seconds, float]:
        """The newest reading at least `span` old, else the first."""
        limit = self._newest[0] - span
        return next((kept for kept in reversed(self._kept) if kept[0] <= limit), self._first)

    def _rate(self, since: tuple[Seconds, float]) -> float:
        seconds = self._newest[0] - since[0]
        return (self._newest[1] - since[1]) / seconds if seconds > 0 else 0.0
