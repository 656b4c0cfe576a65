"""TensorBoard events: scalars, the settings as text, and hyperparameters with the result. Written records are flushed."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from common.tracking.background import Point, TrackedRun
from common.units import EnvSteps, Seconds

EVENTS = re.compile(r"events\.out\.tfevents\.(\d{10}\.\d{6})\.")


class TensorBoardEvents:
    """One event file, open. All methods but `close` raise `OSError`."""

    def __init__(self, folder: Path, *, env_steps: EnvSteps, run: TrackedRun | None) -> None:
        """Open a file after which records of earlier files beyond `env_steps` are not shown."""
        # TensorBoard reads event files in the order of their names: this one is the last, even where the clock was set back.
        newest = max((float(found[1]) for path in folder.glob("*") if (found := EVENTS.match(path.name))), default=0.0)
        path = folder / f"events.out.tfevents.{max(time.time(), newest + 1e-6):017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._run, self._env_steps = run, env_steps
        folder.mkdir(exist_ok=True)
        self._file = path.open("ab")
        self._records = RecordWriter(self._file)
        try:
            self._add(Event(file_version="brain.Event:2"))
            self._add(Event(step=env_steps + 1, session_log=SessionLog(status=SessionLog.START)))
            if run:
                from torch.utils.tensorboard.summary import text  # noqa: PLC0415

                self._add(Event(step=env_steps, summary=text("settings", _table(run.settings))))  # type: ignore[no-untyped-call]
            self._records.flush()
        except OSError:
            self.close()
            path.unlink(missing_ok=True)  # an empty file for each attempt on a full disk would add up
            raise

    def write(self, points: Sequence[Point]) -> None:
        """Write each value of each point."""
        for point in points:
            self._env_steps = max(self._env_steps, point.env_steps)  # a late evaluation is of an older policy
            for name, value in point.values.items():
                summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
                self._add(Event(step=point.env_steps, summary=summary), point.unix_seconds)
        self._records.flush()

    def finish(self, result: Mapping[str, float], *, complete: bool = True) -> None:  # noqa: ARG002
        """Write the hyperparameters of the run with its result, whose names begin with `result/`."""
        if self._run is None:
            return
        from torch.utils.tensorboard.summary import hparams  # noqa: PLC0415

        named = {f"result/{name}": value for name, value in result.items()}
        for summary in hparams(dict(self._run.hyperparameters), named):  # type: ignore[no-untyped-call]
            self._add(Event(step=self._env_steps, summary=summary))
        self.write([Point(env_steps=self._env_steps, unix_seconds=time.time(), values=named)])

    def close(self) -> None:
        """Close the file. May be called twice."""
        with suppress(OSError):  # data that could not be flushed is lost, and was reported
            self._file.close()

    def _add(self, event: Event, unix_seconds: Seconds | None = None) -> None:
        event.wall_time = time.time() if unix_seconds is None else unix_seconds
        self._records.write(event.SerializeToString())


def _table(settings: Mapping[str, object]) -> str:
    rows = (f"| {key} | {str(value).replace('|', '&#124;')} |" for key, value in settings.items())
    return "\n".join(["| setting | value |", "|---|---|", *rows])
