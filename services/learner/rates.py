"""Rates of env steps from readings of their counter, and the policy lag of those trained on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from common.units import EnvSteps, Seconds

SHORT_WINDOW, LONG_WINDOW = 10.0, 60.0
RATE_SPACING: Seconds = 0.5  # readings that come faster replace one another: memory is bounded by LONG_WINDOW / RATE_SPACING


@dataclass(slots=True)
class PolicyLag:
    """Policy lag in versions of the env steps trained on, over the whole run."""

    low: int = 0
    high: int = 0
    weighted: float = 0.0  # sum of lag x env steps
    env_steps: EnvSteps = 0

    def add(self, lag: int, env_steps: EnvSteps) -> None:
        """Count `env_steps` that were `lag` versions old when they were trained on."""
        self.low = min(self.low, lag) if self.env_steps else lag
        self.high = max(self.high, lag)
        self.weighted += lag * env_steps
        self.env_steps += env_steps

    @classmethod
    def of_ranks(cls, lags: Iterable[Self]) -> Self:
        """Return the lag of the env steps of all of them."""
        seen = [lag for lag in lags if lag.env_steps]
        low, high = min((lag.low for lag in seen), default=0), max((lag.high for lag in seen), default=0)
        return cls(low, high, sum(lag.weighted for lag in seen), sum(lag.env_steps for lag in seen))

    def as_dict(self) -> dict[str, float | None]:
        """Return min, mean and max; None before the first update."""
        if not self.env_steps:
            return {"min": None, "mean": None, "max": None}
        return {"min": self.low, "mean": round(self.weighted / self.env_steps, 3), "max": self.high}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRates:
    """Env steps per second over three windows; 0 before two updates. A window that is not full yet is as long as the run."""

    last_10s: float
    last_60s: float
    run: float


class RateWindow:
    """Readings of one counter, which grows by updates and never falls, by one thread.

    The rates are from update to update, so that the part of an update at either end of a window makes no difference. They are
    up to now, and fall, once the next update is overdue: after twice the time between the last two.
    """

    def __init__(self, before: Sequence[float] = (0.0, 0.0)) -> None:
        """Begin without readings; `before` is `timed` of the processes before, which the rate of the run includes."""
        self._before_seconds, self._before_total = before
        self._kept: deque[tuple[Seconds, float]] = deque()  # of updates
        self._first = self._newest = (0.0, 0.0)
        self._update, self._interval = self._newest, 0.0  # the newest update, and the time from the one before to it

    def add(self, now: Seconds, total: float) -> None:
        """Add a reading of the counter."""
        self._newest = (now, total)
        if not self._kept:
            self._first = self._update = self._newest
            self._kept.append(self._newest)
        if total == self._update[1]:
            return
        self._interval, self._update = now - self._update[0], self._newest
        if now - self._kept[-1][0] >= RATE_SPACING:
            self._kept.append(self._newest)
        # One reading older than the window stays, so that the rate is over the whole window.
        while len(self._kept) > 1 and self._kept[1][0] <= now - LONG_WINDOW:
            self._kept.popleft()

    def rates(self) -> StepRates:
        """Return the rates up to the newest update, or the newest reading where the next update is overdue."""
        end = self._newest if self._newest[0] - self._update[0] > 2 * self._interval else self._update
        last_10s, last_60s = (self._rate(end, window) for window in (SHORT_WINDOW, LONG_WINDOW))
        seconds, total = self.timed
        return StepRates(last_10s=last_10s, last_60s=last_60s, run=total / seconds if seconds > 0 else 0.0)

    @property
    def timed(self) -> tuple[Seconds, float]:
        """Time from the first to the newest reading, and how far the counter grew in it, with those of the processes before."""
        seconds, total = (newest - first for newest, first in zip(self._newest, self._first, strict=True))
        return self._before_seconds + seconds, self._before_total + total

    def _rate(self, end: tuple[Seconds, float], span: Seconds) -> float:
        """Return the rate since the newest update that was at least `span` before `end`, else since the first."""
        since = next((kept for kept in reversed(self._kept) if kept[0] <= end[0] - span), self._first)
        return (end[1] - since[1]) / (end[0] - since[0]) if end[0] > since[0] else 0.0
