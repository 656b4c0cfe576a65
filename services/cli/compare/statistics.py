"""Statistics over the seeds of one configuration, by the conventions of Agarwal et al. (2021). Pure.

The paper, "Deep Reinforcement Learning at the Edge of the Statistical Precipice" (NeurIPS 2021), recommends the interquartile
mean with a stratified bootstrap interval. Here each configuration is a stratum of its own: resamples draw from its seeds alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

TRIMMED = 0.25  # share of the values cut at each end by the interquartile mean
CONFIDENCE = 0.95
RESAMPLES = 2_000
CURVE_POINTS = 100
COVERAGE = {2: 49, 3: 73, 4: 88, 5: 90, 6: 90, 7: 91}
"""Of 100 intervals those that contain the true mean, by the number of values, drawn from a normal distribution."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Interquartile mean of `count` values and the bounds of its interval, which a single value does not have."""

    value: float
    low: float | None
    high: float | None
    count: int


@dataclass(frozen=True, slots=True)
class Band:
    """Interquartile mean of several curves at `x`, all [P], and the bounds of its pointwise interval."""

    x: Floats
    value: Floats
    low: Floats
    high: Floats
    count: int


def interquartile_mean(values: Floats) -> Floats:
    """Return the mean over axis 0 [N, ...] without the floor(N / 4) smallest and as many largest values.

    Below four values nothing is cut, and it is the mean.
    """
    cut = int(TRIMMED * len(values))
    kept: Floats = np.sort(values, axis=0)[cut : len(values) - cut]
    return np.asarray(kept.mean(axis=0), dtype=np.float64)


def interval(values: Floats) -> tuple[Floats, Floats]:
    """Return the percentile bootstrap bounds of the interquartile mean over axis 0 of [N, P], each [P].

    Whole rows are drawn, so the points of one curve stay together. The draws are the same at every call.
    """
    draws = _draws(len(values))
    means = np.stack([interquartile_mean(values[draws, point].T) for point in range(values.shape[1])], axis=1)
    tail = (1.0 - CONFIDENCE) / 2.0
    low, high = np.quantile(means, [tail, 1.0 - tail], axis=0)
    return low, high


@cache
def _draws(count: int) -> NDArray[np.int64]:
    """Return the rows of each resample, [RESAMPLES, count]."""
    return np.random.default_rng(0).integers(count, size=(RESAMPLES, count))


def estimate(values: Sequence[float]) -> Estimate | None:
    """Return the estimate over `values`, one for each seed; None without any."""
    if not values:
        return None
    column = np.asarray(values, dtype=np.float64)[:, None]
    value = float(interquartile_mean(column)[0])
    if len(values) == 1:
        return Estimate(value, None, None, 1)
    low, high = interval(column)
    return Estimate(value, float(low[0]), float(high[0]), len(values))


def band(curves: Sequence[tuple[Sequence[float], Sequence[float]]], *, held: Sequence[bool], points: int = CURVE_POINTS) -> Band:
    """Return the band of `curves`, pairs of x and y, over the range in which all of them have a value; without one it is empty.

    Between its points a curve is a straight line. After its end it keeps its last value where it is `held`, and has none else.
    """
    # A late evaluation is of an older policy than the row before, and after a kill the time goes on from the checkpoint.
    known = [_sorted(np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)) for x, y in curves if len(x)]
    empty = np.empty(0)
    nothing = Band(empty, empty, empty, empty, 0)
    if not known:
        return nothing
    ends = [max(x) for (x, _), stays in zip(curves, held, strict=True) if len(x) and not stays]
    start, end = max(x[0] for x, _ in known), min(ends, default=max(x[-1] for x, _ in known))
    if end < start:
        return nothing
    grid = np.linspace(start, end, points)
    values = np.stack([np.interp(grid, x, y) for x, y in known])
    low, high = interval(values) if len(known) > 1 else (values[0], values[0])
    return Band(grid, interquartile_mean(values), low, high, len(known))


def _sorted(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    order = np.argsort(x, kind="stable")
    return x[order], y[order]
