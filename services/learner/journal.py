"""Results of a run: learning_curve.csv, summary.json, TensorBoard events and the run's other trackers."""

from __future__ import annotations

import csv
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from common.config.layers import dotted
from common.config.schema import Settings
from common.observability import logs
from common.runtime.disk import write_atomically
from common.runtime.run_directory import RunDirectory
from common.tracking.background import BackgroundTracker, Point, TrackedRun
from common.tracking.remote import REMOTE
from common.tracking.tensorboard import TensorBoardEvents
from common.units import EnvSteps, Seconds, significant
from services.learner.record import deciding_settings

CURVE = ("wall_seconds", "env_steps", "episode_return_mean", "evaluation_return")
SCALARS_SECONDS: Seconds = 1.0  # between two points of a scalar: a fast run has hundreds of updates per second
TRACKERS_END_SECONDS: Seconds = 10.0  # for the trackers to send what is queued, when a run ends by itself
TRACKERS_STOP_SECONDS: Seconds = 3.0  # the same, when a stop is requested
RETRY_SECONDS: Seconds = 30.0  # after results could not be written, until the files are opened again

_log = logs.EventLog(__name__)


class Journal:
    """Writer of the run's results. The x axis of all of them is env steps trained on. `close` it.

    A disk that is full or read-only costs results, never the run, at the start as later. The first error is logged; the files
    are opened again after `RETRY_SECONDS`, and it is logged once results are written again. Trackers with a server have
    threads of their own. Of `run` the events have settings and hyperparameters.
    """

    def __init__(
        self,
        directory: RunDirectory,
        *,
        env_steps: EnvSteps,
        run: TrackedRun | None = None,
        tensorboard: bool = True,
        trackers: Sequence[BackgroundTracker] = (),
        clock: Callable[[], Seconds] = time.monotonic,
    ) -> None:
        """Continue from `env_steps`: points beyond them, of a process that left no checkpoint of them, are removed."""
        self._directory, self._clock = directory, clock
        self._run, self._tensorboard, self._trackers = run, tensorboard, trackers
        self._files: _Files | None = None
        self._written = env_steps  # points up to here are kept
        self._losing = self._closed = False
        self._resumes: Sequence[Mapping[str, Any]] = ()  # of settings_changed.json
        self._unwritten = 0  # rows and points
        self._open_at: Seconds = -math.inf
        self._averaged: defaultdict[str, list[float]] = defaultdict(list)  # values since the newest point, by scalar
        self._newest: dict[str, float] = {}  # the same, of scalars whose last value is recorded
        self._scalars_at: Seconds = -math.inf
        self._collected = env_steps  # of the newest update in the interval
        self._write(env_steps, lambda _: None)
        self._unwritten = 0  # the files alone were to be opened

    def update(
        self,
        env_steps: EnvSteps,
        *,
        means: Mapping[str, float],
        newest: Mapping[str, float],
        returns: Iterable[float] = (),
    ) -> None:
        """Record the scalars of one update by slash-separated names: one point per name and `SCALARS_SECONDS`, at most.

        The point of one of `means` is the mean over the updates of that time, the point of one of `newest` the last value.
        The point of `episode/return` is the mean over all episodes that ended in that time, of which `returns` has those
        of this update. Values that are not finite are left out.
        """
        for name, value in (*means.items(), *(("episode/return", value) for value in returns)):
            if math.isfinite(value):
                self._averaged[name].append(value)
        self._newest |= {name: float(value) for name, value in newest.items() if math.isfinite(value)}
        self._collected = env_steps
        if self._clock() - self._scalars_at >= SCALARS_SECONDS:
            self._write_interval()

    def evaluation(self, env_steps: EnvSteps, *, mode: str, mean: float) -> None:
        """Write the mean return of one evaluation at once."""
        if math.isfinite(mean):
            self._add_point(env_steps, {f"evaluation/return_{mode}": mean})

    def curve(self, *, wall_seconds: Seconds, env_steps: EnvSteps, mean: float, evaluation: float | None = None) -> None:
        """Write one row of the learning curve; unknown values stay empty."""
        shown = ["" if value is None or not math.isfinite(value) else significant(value) for value in (mean, evaluation)]
        self._write(env_steps, lambda files: files.add_row([round(wall_seconds, 1), env_steps, *shown]))

    def summary(self, summary: Mapping[str, Any], *, complete: bool = True) -> None:
        """Replace summary.json, whole or not at all, and send the trackers the result; a stopped run is not `complete`."""
        self._write_interval()
        result = _result(summary)
        if self._run:
            self._write(self._written, lambda files: files.add_result(result, complete=complete))
        for tracker in self._trackers:
            tracker.finish(result, complete=complete)
        if self._resumes:  # again: the disk may have been full at the start
            self._replace(self._directory.settings_changed, self._resumes)
        self._replace(self._directory.summary, summary)

    def settings_changed(self, resumes: Sequence[Mapping[str, Any]]) -> None:
        """Replace settings_changed.json, which a run without changes does not have."""
        self._resumes = resumes
        if resumes or self._directory.settings_changed.exists():
            self._replace(self._directory.settings_changed, resumes)

    def close(self, seconds: Seconds = TRACKERS_STOP_SECONDS) -> None:
        """Write the scalars of the last interval, close the files, and give the trackers `seconds`.

        Only the first call has an effect.
        """
        if self._closed:
            return
        self._closed = True
        self._write_interval()
        self._close_files()
        self._open_at = math.inf
        deadline = time.monotonic() + seconds
        for tracker in self._trackers:
            tracker.close(deadline)

    @property
    def points_dropped(self) -> dict[str, int]:
        """Return the number of points that were not sent, by tracker."""
        return {tracker.name: tracker.dropped for tracker in self._trackers}

    @property
    def lost(self) -> list[str]:
        """Return a sentence for each part of the results that was not written, or once this is closed, not sent."""
        records = "rows and points of learning_curve.csv and TensorBoard were not written"
        files = [f"{self._unwritten:,} {records}"] if self._unwritten else []
        return [*files, *(tracker.lost for tracker in self._trackers if tracker.lost)]

    def _write_interval(self) -> None:
        self._scalars_at = self._clock()
        if values := {name: sum(found) / len(found) for name, found in self._averaged.items()} | self._newest:
            self._averaged.clear()
            self._newest = {}
            self._add_point(self._collected, values)

    def _add_point(self, env_steps: EnvSteps, values: Mapping[str, float]) -> None:
        point = Point(env_steps=env_steps, unix_seconds=time.time(), values=values)
        self._write(env_steps, lambda files: files.add_point(point))
        for tracker in self._trackers:
            tracker.write(point)

    def _close_files(self) -> None:
        if self._files is not None:
            self._files.close()
            self._files = None

    def _write(self, env_steps: EnvSteps, write: Callable[[_Files], None]) -> None:
        if self._files is None and self._clock() < self._open_at:
            self._unwritten += 1
            return
        try:
            if self._files is None:
                run, tensorboard = self._run, self._tensorboard
                self._files = _Files(self._directory, env_steps=self._written, run=run, tensorboard=tensorboard)
            self._directory.learning_curve_csv.stat()  # raises where the run directory was deleted: an open file still takes rows
            write(self._files)
            self._written = max(self._written, env_steps)
        except OSError as error:
            self._close_files()
            self._open_at = self._clock() + RETRY_SECONDS
            self._unwritten += 1
            self._lost(error)
            return
        if self._losing:
            self._losing = False
            _log.info("results_resumed")

    def _replace(self, path: Path, value: Any) -> None:
        try:
            write_atomically(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())
        except OSError as error:
            self._lost(error)

    def _lost(self, error: OSError) -> None:
        if not self._losing:
            self._losing = True
            _log.warning("results_lost", error=error, consequence="the run goes on; its curve and events have holes")


class _Files:
    """The learning curve and one event file, open. All methods but `close` raise `OSError`; written points are flushed."""

    def __init__(self, directory: RunDirectory, *, env_steps: EnvSteps, run: TrackedRun | None, tensorboard: bool) -> None:
        """Open both so that existing points beyond `env_steps` are not shown."""
        _remove_later_rows(directory, env_steps)
        with ExitStack() as opened:
            self._curve = opened.enter_context(directory.learning_curve_csv.open("a", newline=""))
            self._rows = csv.writer(self._curve)
            if self._curve.tell() == 0:
                self.add_row(CURVE)
            self._events = TensorBoardEvents(directory.tensorboard, env_steps=env_steps, run=run) if tensorboard else None
            opened.pop_all()

    def add_row(self, row: list[Any] | tuple[Any, ...]) -> None:
        self._rows.writerow(row)
        self._curve.flush()

    def add_point(self, point: Point) -> None:
        if self._events:
            self._events.write([point])

    def add_result(self, result: Mapping[str, float], *, complete: bool) -> None:
        if self._events:
            self._events.finish(result, complete=complete)

    def close(self) -> None:
        with suppress(OSError):  # data that could not be flushed is lost, and was reported
            self._curve.close()
        if self._events:
            self._events.close()


def _result(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a summary by which runs are compared; unknown ones are left out."""
    evaluation = summary.get("last_evaluation") or {}
    known = {name: summary.get(name) for name in ("mean100", "solved", "env_steps", "episodes", "wall_seconds")}
    known |= {"evaluation_return": evaluation.get("mean"), "policy_lag": (summary.get("policy_lag") or {}).get("mean")}
    return {name: float(value) for name, value in known.items() if value is not None}


def _remove_later_rows(directory: RunDirectory, env_steps: EnvSteps) -> None:
    """Leave only the whole rows of a learning curve up to `env_steps`; the file is replaced at once, or not at all."""
    path = directory.learning_curve_csv
    text = path.read_bytes().decode(errors="replace") if path.exists() else ""
    rows = text.splitlines(keepends=True)
    kept = "".join([*rows[:1], *(row for row in rows[1:] if _env_steps(row) <= env_steps)])
    if kept != text:
        write_atomically(path, kept.encode())


def _env_steps(row: str) -> float:
    """Return the env steps of a row; infinity for one that a kill, a full disk or a power loss left damaged."""
    fields = row.split(",")
    whole = row.endswith("\n") and "\ufffd" not in row and len(fields) == len(CURVE) and fields[1].isdecimal()
    return int(fields[1]) if whole else math.inf


# --- trackers ---


def tracked_run(settings: Settings, *, run_id: str, folder: Path) -> TrackedRun:
    """Return what trackers get of a run. Settings that are empty are left out."""
    named = dotted(settings.model_dump(mode="json"))
    filled = {key: value for key, value in named.items() if value not in (None, "", [], {})}
    known = {key: value if isinstance(value, str | int | float) else json.dumps(value) for key, value in filled.items()}
    return TrackedRun(
        run_id=run_id,
        name=folder.absolute().name,
        folder=folder,
        settings=known,
        hyperparameters={key: known[key] for key in deciding_settings(settings) if key in known},
    )


def open_trackers(settings: Settings, run: TrackedRun) -> list[BackgroundTracker]:
    """Return the trackers that have a package of their own, each with its thread started."""
    remote = [name for name in dict.fromkeys(settings.run.tracking) if name in REMOTE]
    return [BackgroundTracker(name, partial(REMOTE[name], run)) for name in remote]
