"""Estimates how far a run is, and the time until it ends: by its target `target.mean100` or by a budget, whichever is nearer.

`GET /status`, the metrics and the commands show these estimates, and make none of their own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import linear_regression

from common.config.sections import TargetSettings
from common.observability.learner_stats import Progress
from common.units import EnvSteps, Seconds

SHORTEST_WINDOW: Seconds = 120.0
WINDOW_SHARE = 0.2  # of the elapsed time: the trend of mean100 is over the longer of the two, or half of it at least
MIN_POINTS, MAX_POINTS = 10, 60  # of the trend
REACH = 3  # a trend that is extrapolated to more than this multiple of its span is mostly noise


@dataclass(slots=True)
class ProgressEstimator:
    """Estimates the progress of one run from its counters so far."""

    mean: float | None = None  # newest mean100; a resumed run goes on from that of its checkpoint
    lowest: float | None = None  # likewise
    _trend: deque[tuple[Seconds, float]] = field(default_factory=deque)  # points of mean100 within the window
    _slope: float = 0.0  # of mean100, per second

    def update(
        self, elapsed: Seconds, target: TargetSettings, *, env_steps: EnvSteps, rate: float, mean: float | None
    ) -> Progress:
        """Return the progress after `elapsed` seconds; `rate` is in env steps per second, and 0 before it is known.

        `mean` is mean100, or None while it is one of too few episodes to reach the target, as after a restart of an actor: the
        last one counts meanwhile.
        """
        left, fraction = [], env_steps / target.env_steps
        if rate > 0:
            left.append(max(0.0, target.env_steps - env_steps) / rate)
        if target.wall_seconds is not None:
            fraction = max(fraction, elapsed / target.wall_seconds)
            left.append(max(0.0, target.wall_seconds - elapsed))
        window = max(SHORTEST_WINDOW, WINDOW_SHARE * elapsed)
        while self._trend and self._trend[0][0] < elapsed - window:
            self._trend.popleft()
        if mean is not None:
            self.mean = mean
            self.lowest = mean if self.lowest is None else min(self.lowest, mean)
            if not self._trend or elapsed - self._trend[-1][0] >= window / MAX_POINTS:
                self._trend.append((elapsed, mean))
                self._slope = linear_regression(*zip(*self._trend, strict=True)).slope if len(self._trend) >= MIN_POINTS else 0.0
        if target.mean100 is not None and self.mean is not None and self.lowest is not None:
            missing = max(0.0, target.mean100 - self.mean)
            fraction = max(fraction, 1.0 - missing / (target.mean100 - self.lowest) if missing else 1.0)
            span = self._trend[-1][0] - self._trend[0][0] if self._trend else 0.0
            if self._slope > 0 and span >= window / 2 and missing / self._slope <= REACH * span:
                left.append(missing / self._slope)
        return Progress(min(1.0, fraction), min(left, default=None))
