"""How far a run is and how long it may still take: pure arithmetic on the statuses seen so far."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import StatisticsError, linear_regression

from common.units import Seconds
from services.cli.status import RunStatus

TREND_SAMPLES = 120  # at one a second: the trend of the last two minutes


@dataclass(frozen=True, slots=True)
class Estimate:
    """`fraction` in [0, 1] of the way to the end nearest by; `seconds_left` None where nothing can be said."""

    fraction: float
    seconds_left: Seconds | None


@dataclass(slots=True)
class Progress:
    """Remembers the first and the latest mean returns; a run ends at the target or at its budget, whichever comes first."""

    _first: float | None = None
    _recent: deque[tuple[Seconds, float]] = field(default_factory=lambda: deque(maxlen=TREND_SAMPLES))

    def update(self, status: RunStatus) -> Estimate:
        """Take one more status into account."""
        target, mean = status.target.mean100, status.mean100
        if mean is not None and (not self._recent or self._recent[-1] != (status.wall_seconds, mean)):
            self._first = mean if self._first is None else min(self._first, mean)
            self._recent.append((status.wall_seconds, mean))
        budget, left = status.target.env_steps, []
        if budget and status.env_steps_per_second > 0:
            left.append(max(0.0, budget - status.env_steps) / status.env_steps_per_second)
        if target is not None and mean is not None and (slope := self._slope()) > 0:
            left.append(max(0.0, target - mean) / slope)
        spent = status.env_steps / budget if budget else 0.0
        reached = self._reached(target, mean) if target is not None and mean is not None else 0.0
        return Estimate(fraction=min(1.0, max(spent, reached)), seconds_left=min(left, default=None))

    def _reached(self, target: float, mean: float) -> float:
        """Share of the way from the lowest mean return so far to the target."""
        first = self._first if self._first is not None else mean
        return 1.0 if mean >= target else (mean - first) / (target - first)

    def _slope(self) -> float:
        """Mean return gained per second of late; 0 where there are too few points to tell."""
        try:
            return linear_regression(*zip(*self._recent, strict=True)).slope if len(self._recent) > 1 else 0.0
        except StatisticsError:  # all points at one moment
            return 0.0
