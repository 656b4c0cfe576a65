"""The progress of a run to its target or its budget, and the time until its end. Pure: statuses in, estimates out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import StatisticsError, linear_regression

from common.units import Seconds
from services.cli.train.status import RunStatus

MEASURED: Seconds = 30.0  # of training, before the end of a run is estimated
TREND_SAMPLES = 120  # at one a second: the trend of the last two minutes


@dataclass(frozen=True, slots=True)
class Estimate:
    """`fraction` in [0, 1] of the way to the nearer end of the run; `seconds_left` is None where it cannot be estimated."""

    fraction: float
    seconds_left: Seconds | None


@dataclass(slots=True)
class ProgressEstimator:
    """Estimates the end of a run, at its target or its budget, from the statuses so far; times after `MEASURED`."""

    _trains_since: Seconds | None = None  # time of the first status with an update
    _lowest: float | None = None  # mean return
    _recent: deque[tuple[Seconds, float]] = field(default_factory=lambda: deque(maxlen=TREND_SAMPLES))

    def update(self, status: RunStatus) -> Estimate:
        """Take one more status into account."""
        target, mean = status.target.mean100, status.mean100
        if mean is not None and (not self._recent or self._recent[-1] != (status.wall_seconds, mean)):
            self._lowest = mean if self._lowest is None else min(self._lowest, mean)
            self._recent.append((status.wall_seconds, mean))
        if status.learner_updates and self._trains_since is None:
            self._trains_since = status.wall_seconds
        measured = self._trains_since is not None and status.wall_seconds - self._trains_since >= MEASURED
        budget, left = status.target.env_steps, []
        if measured and budget and status.env_steps_per_second > 0:
            left.append(max(0.0, budget - status.env_steps) / status.env_steps_per_second)
        if measured and target is not None and mean is not None and (slope := self._slope()) > 0:
            left.append(max(0.0, target - mean) / slope)
        spent = status.env_steps / budget if budget else 0.0
        reached = self._reached(target, mean) if target is not None and mean is not None else 0.0
        return Estimate(fraction=min(1.0, max(spent, reached)), seconds_left=min(left, default=None))

    def _reached(self, target: float, mean: float) -> float:
        """Return the share of the way from the lowest mean return to the target."""
        lowest = self._lowest if self._lowest is not None else mean
        return 1.0 if mean >= target else (mean - lowest) / (target - lowest)

    def _slope(self) -> float:
        """Return the recent gain of the mean return per second; 0 where there are too few points."""
        try:
            return linear_regression(*zip(*self._recent, strict=True)).slope if len(self._recent) > 1 else 0.0
        except StatisticsError:  # all points have the same time
            return 0.0
