"""The interface of a tracker: a program outside of the run that shows its curves, settings and result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from common.units import EnvSteps, Seconds

Setting: TypeAlias = str | int | float | bool


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
