"""What a run leaves for people to look at: TensorBoard events, learning_curve.csv and summary.json."""

from __future__ import annotations

import csv
import json
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from common.runtime.disk import write_atomically
from common.runtime.run_directory import RunDirectory
from common.units import EnvSteps, Seconds

CURVE = ("wall_seconds", "env_steps", "episode_return_mean", "evaluation_return")
RETRY_SECONDS: Seconds = 30.0  # after records could not be written, until the files are opened again


class Journal:
    """Writer of the run directory's records. The x axis of all of them is env steps trained on. `close` it.

    A disk that is full or read-only costs records, never the run, at the start as later. `on_loss` is called with the first
    error; the files are opened again after `RETRY_SECONDS`, and `on_recovery` is called once records are written again.
    """

    def __init__(
        self,
        directory: RunDirectory,
        *,
        env_steps: EnvSteps,
        on_loss: Callable[[OSError], None],
        on_recovery: Callable[[], None] = lambda: None,
        clock: Callable[[], Seconds] = time.monotonic,
    ) -> None:
        """Go on from `env_steps`: records beyond them, of a life that left no checkpoint of them, are taken back."""
        self._directory, self._clock = directory, clock
        self._on_loss, self._on_recovery = on_loss, on_recovery
        self._files: _Files | None = None
        self._written = env_steps  # records up to here are kept
        self._losing = False
        self._open_at: Seconds = -math.inf
        self._write(env_steps, lambda _: None)

    def scalars(self, env_steps: EnvSteps, values: Mapping[str, float]) -> None:
        """One point for each finite value, under its slash-separated name."""
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        self._write(env_steps, lambda files: files.add_scalars(env_steps, finite))

    def curve(self, *, wall_seconds: Seconds, env_steps: EnvSteps, mean: float, evaluation: float | None = None) -> None:
        """One row of the learning curve; what is not known stays empty."""
        shown = ["" if value is None or not math.isfinite(value) else round(value, 3) for value in (mean, evaluation)]
        self._write(env_steps, lambda files: files.add_row([round(wall_seconds, 1), env_steps, *shown]))

    def summary(self, summary: Mapping[str, Any]) -> None:
        """Replace summary.json, whole or not at all."""
        text = json.dumps(summary, indent=2, allow_nan=False) + "\n"
        try:
            write_atomically(self._directory.summary, text.encode())
        except OSError as error:
            self._lost(error)

    def close(self) -> None:
        """Close the files. May be called twice."""
        if self._files is not None:
            self._files.close()
            self._files = None
        self._open_at = math.inf

    def _write(self, env_steps: EnvSteps, write: Callable[[_Files], None]) -> None:
        if self._files is None and self._clock() < self._open_at:
            return
        try:
            if self._files is None:
                self._files = _Files(self._directory, env_steps=self._written)
            write(self._files)
            self._written = env_steps
        except OSError as error:
            self.close()
            self._open_at = self._clock() + RETRY_SECONDS
            self._lost(error)
            return
        if self._losing:
            self._losing = False
            self._on_recovery()

    def _lost(self, error: OSError) -> None:
        if not self._losing:
            self._losing = True
            self._on_loss(error)


class _Files:
    """The learning curve and one event file, open. All methods but `close` raise `OSError`; written records are flushed."""

    def __init__(self, directory: RunDirectory, *, env_steps: EnvSteps) -> None:
        """Open both so that existing records beyond `env_steps` are not shown."""
        _take_back(directory, env_steps)
        with ExitStack() as opened:
            self._curve = opened.enter_context(directory.learning_curve_csv.open("a", newline=""))
            self._rows = csv.writer(self._curve)
            if self._curve.tell() == 0:
                self.add_row(CURVE)
            # TensorBoard reads the event files of a folder in the order of their names.
            name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
            path = directory.tensorboard / name
            path.parent.mkdir(exist_ok=True)
            self._events = opened.enter_context(path.open("ab"))
            self._records = RecordWriter(self._events)
            try:
                self._add_event(Event(file_version="brain.Event:2"))
                self._add_event(Event(step=env_steps + 1, session_log=SessionLog(status=SessionLog.START)))
                self._records.flush()
            except OSError:
                path.unlink(missing_ok=True)  # an empty file for each attempt on a full disk would add up
                raise
            opened.pop_all()

    def add_row(self, row: list[Any] | tuple[Any, ...]) -> None:
        self._rows.writerow(row)
        self._curve.flush()

    def add_scalars(self, env_steps: EnvSteps, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._add_event(Event(step=env_steps, summary=Summary(value=[Summary.Value(tag=name, simple_value=value)])))
        self._records.flush()

    def close(self) -> None:
        for file in (self._curve, self._events):
            with suppress(OSError):  # what could not be flushed is lost, and was reported
                file.close()

    def _add_event(self, event: Event) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())


def _take_back(directory: RunDirectory, env_steps: EnvSteps) -> None:
    """Leave only the whole rows of a learning curve up to `env_steps`; the file is replaced at once, or not at all."""
    path = directory.learning_curve_csv
    text = path.read_bytes().decode() if path.exists() else ""
    rows = text.splitlines(keepends=True)
    kept = "".join([*rows[:1], *(row for row in rows[1:] if _env_steps(row) <= env_steps)])
    if kept != text:
        write_atomically(path, kept.encode())


def _env_steps(row: str) -> float:
    """Where a row stands; infinity for one that a kill or a full disk cut short."""
    fields = row.split(",")
    whole = row.endswith("\n") and len(fields) == len(CURVE) and fields[1].isdecimal()
    return int(fields[1]) if whole else math.inf
