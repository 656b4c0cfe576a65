"""Estimates how far a run is, and the time until it ends: by its target `target.mean100` or by a budget, whichever is nearer.

The one source of both for `GET /status`, the metrics, and the commands that show them.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import linear_regression

from common.config.schema import Settings
from common.units import EnvSteps, Seconds

MEASURED_UPDATES = 3  # of this process after its first one, which is slow, before its rate counts
TREND_SPACING: Seconds = 1.0
MIN_TREND, MAX_TREND = 10, 120  # points of the trend of mean100


@dataclass(frozen=True, slots=True)
class Progress:
    """`fraction` in [0, 1] of the way to the nearer end; `seconds_left` is None where it cannot be estimated."""

    fraction: float = 0.0
    seconds_left: Seconds | None = None


@dataclass(slots=True)
class ProgressEstimator:
    """Estimates the progress of a run with these settings from its counters so far; one process has one."""

    settings: Settings
    _first_updates: int | None = None
    _lowest: float = math.inf  # mean100
    _trend: deque[tuple[Seconds, float]] = field(default_factory=lambda: deque(maxlen=MAX_TREND))
    _slope: float = 0.0  # of mean100, per second

    def update(self, elapsed: Seconds, *, env_steps: EnvSteps, updates: int, rate: float, mean: float | None) -> Progress:
        """Return the progress after `elapsed` seconds of the run.

        `rate` is in env steps per second. `mean` is mean100, or None while it is one of too few episodes to reach the target.
        """
        target, left = self.settings.target, []
        self._first_updates = updates if self._first_updates is None else self._first_updates
        fraction = env_steps / target.env_steps
        if updates - self._first_updates > MEASURED_UPDATES and rate > 0:
            left.append(max(0.0, target.env_steps - env_steps) / rate)
        if target.wall_seconds is not None:
            fraction = max(fraction, elapsed / target.wall_seconds)
            left.append(max(0.0, target.wall_seconds - elapsed))
        if target.mean100 is not None and mean is not None:
            self._observe(elapsed, mean)
            rise = 1.0 if mean >= target.mean100 else (mean - self._lowest) / (target.mean100 - self._lowest)
            fraction = max(fraction, rise)
            if self._slope > 0:
                left.append(max(0.0, target.mean100 - mean) / self._slope)
        return Progress(min(1.0, fraction), min(left, default=None))

    def _observe(self, elapsed: Seconds, mean: float) -> None:
        self._lowest = min(self._lowest, mean)
        if self._trend and elapsed - self._trend[-1][0] < TREND_SPACING:
            return
        self._trend.append((elapsed, mean))
        if len(self._trend) >= MIN_TREND:
            self._slope = linear_regression(*zip(*self._trend, strict=True)).slope
