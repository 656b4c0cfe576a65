"""What a run leaves for people to look at: TensorBoard events, learning_curve.csv and summary.json."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from common.runtime.disk import write_atomically
from common.runtime.run_directory import RunDirectory
from common.units import EnvSteps, Seconds

CURVE = ("wall_seconds", "env_steps", "episode_return_mean", "evaluation_return")


class Journal:
    """Writer of the run directory's records. The x axis of all of them is env steps trained on. `close` it.

    A disk that is full costs records, never the run: the first loss is told to `on_loss`, later ones are silent.
    """

    def __init__(self, directory: RunDirectory, *, env_steps: EnvSteps, on_loss: Callable[[OSError], None]) -> None:
        """Go on from `env_steps`: records beyond them, of a life that left no checkpoint of them, are taken back."""
        self._on_loss: Callable[[OSError], None] | None = on_loss
        self._directory = directory
        self._events = SummaryWriter(log_dir=str(directory.tensorboard), flush_secs=10, purge_step=env_steps + 1)
        path = directory.learning_curve_csv
        with self._going_on():
            _take_back(path, env_steps)
        fresh = not path.exists() or path.stat().st_size == 0
        self._file = path.open("a", newline="")
        self._rows = csv.writer(self._file)
        if fresh:
            self._rows.writerow(CURVE)

    def scalars(self, env_steps: EnvSteps, values: Mapping[str, float]) -> None:
        """One point for each finite value, under its slash-separated name."""
        with self._going_on():
            for name, value in values.items():
                if math.isfinite(value):
                    self._events.add_scalar(name, value, env_steps)

    def curve(self, *, wall_seconds: Seconds, env_steps: EnvSteps, mean: float, evaluation: float | None = None) -> None:
        """One row of the learning curve; what is not known stays empty."""
        shown = ["" if value is None or not math.isfinite(value) else round(value, 3) for value in (mean, evaluation)]
        with self._going_on():
            self._rows.writerow([round(wall_seconds, 1), env_steps, *shown])
            self._file.flush()

    def summary(self, summary: Mapping[str, Any]) -> None:
        """Replace summary.json, whole or not at all."""
        path = self._directory.summary
        partial = path.with_suffix(".json.partial")
        with self._going_on():
            partial.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n")
            partial.replace(path)

    def close(self) -> None:
        """Write out what is buffered."""
        for closing in (self._events.close, self._file.close):
            with self._going_on():
                closing()

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            on_loss, self._on_loss = self._on_loss, None
            if on_loss is not None:
                on_loss(error)


def _take_back(path: Path, env_steps: EnvSteps) -> None:
    """Leave only the whole rows of a learning curve up to `env_steps`; the file is replaced at once, or not at all."""
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
