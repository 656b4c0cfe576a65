"""What the user sees while a run goes on: a live panel on a terminal, else one plain line or one JSON line at a time.

The functions turn a `RunStatus` into something to show; the three views at the end only decide where and how often.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from common.units import Seconds
from services.cli.progress import Estimate
from services.cli.status import RunStatus

LIVE_PERIOD: Seconds = 0.5
LINE_PERIOD: Seconds = 5.0
MINUTE, HOUR = 60, 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """All that one refresh shows."""

    title: str  # preset and seed
    run_dir: str
    status: RunStatus
    estimate: Estimate


class View(Protocol):
    """Somewhere to show frames. A context manager: a terminal is given back as it was."""

    period: Seconds  # between two frames

    def __enter__(self) -> Self:
        """Begin to show."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Give the terminal back."""

    def show(self, frame: Frame) -> None:
        """Show the run as it is now."""

    def say(self, text: str) -> None:
        """Show one sentence that must not be lost."""


def clock(seconds: Seconds) -> str:
    """A duration as `1:02:03`."""
    whole = round(seconds)
    return f"{whole // HOUR}:{whole % HOUR // MINUTE:02}:{whole % MINUTE:02}"


def about(seconds: Seconds | None) -> str:
    """A duration that is only an estimate: `about 3 min left`."""
    if seconds is None:
        return "time left unknown"
    if seconds < 2 * MINUTE:
        return f"about {max(1, round(seconds))} s left"
    return f"about {seconds / MINUTE:.0f} min left" if seconds < 2 * HOUR else f"about {seconds / HOUR:.1f} h left"


def score(value: float | None) -> str:
    """A return, or a dash before there is one."""
    return "-" if value is None else f"{value:.4g}"


def returns(status: RunStatus) -> str:
    """The training score beside its target, and the last evaluation."""
    words = [f"mean100 {score(status.mean100)}"]
    if status.target.mean100 is not None:
        words.append(f"target {score(status.target.mean100)}")
    if (last := status.last_evaluation) is not None:
        words.append(f"last evaluation {score(last.mean)} ({last.mode}, {last.episodes} episodes, v{last.version})")
    return ", ".join(words)


def steps(status: RunStatus) -> str:
    """Env steps trained on, of the budget."""
    budget = f" of {status.target.env_steps:,}" if status.target.env_steps else ""
    return f"{status.env_steps:,}{budget}, {status.env_steps_per_second:,.0f} per second, {status.learner_updates:,} updates"


def lag(status: RunStatus) -> str:
    """Policy lag, or a dash before the first update."""
    seen = status.policy_lag
    return "-" if seen.mean is None else f"min {seen.min:.0f}, mean {seen.mean:.1f}, max {seen.max:.0f} versions"


def drops(status: RunStatus) -> str:
    """Env steps dropped, by reason; empty where nothing was."""
    return ", ".join(f"{reason} {count:,}" for reason, count in sorted(status.ledger.dropped.items()) if count)


def peers(status: RunStatus) -> str:
    """Who is connected, and how often somebody had to be restarted."""
    wanted = f" of {status.actors_wanted}" if status.actors_wanted else ""
    words = [f"{status.peers.get('actor', 0)}{wanted} actors connected"]
    if status.peers.get("evaluator"):
        words.append("evaluator connected")
    if status.restarts:
        words.append(f"{status.restarts} restarts (why: see logs/ of the run directory)")
    return ", ".join(words)


def facts(status: RunStatus) -> Iterator[tuple[str, str]]:
    """The rows of the live panel."""
    rate = status.frames_per_second
    yield "frames/s", f"{rate.last_10s:,.0f} (10 s)   {rate.last_60s:,.0f} (60 s)   {rate.run:,.0f} (run)"
    yield "env steps", steps(status)
    yield "return", returns(status)
    yield "policy lag", f"{lag(status)}, snapshot v{status.version}"
    yield "queue", f"{status.queue.depth} of {status.queue.capacity} messages"
    yield "peers", peers(status)
    if dropped := drops(status):
        yield "dropped", f"{dropped} (env steps)"
    yield "bottleneck", status.bottleneck or "-"


def panel(frame: Frame) -> Group:
    """The live view; fits 80x24."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", width=10)
    grid.add_column(ratio=1)
    for name, value in facts(frame.status):
        grid.add_row(name, value)
    bar = Table.grid(padding=(0, 2))
    for column in (10, 36, None):
        bar.add_column(width=column)
    percent = f"{frame.estimate.fraction:.0%}, {about(frame.estimate.seconds_left)}"
    bar.add_row(Text("to the end", style="bold"), ProgressBar(total=1.0, completed=frame.estimate.fraction, width=36), percent)
    head = Text.assemble(("rookery ", "bold"), frame.title, f"   {frame.status.phase}   {clock(frame.status.wall_seconds)}")
    foot = Text(f"{frame.run_dir}   Ctrl-C saves and stops", style="dim")
    return Group(head, Text(), grid, Text(), bar, Text(), foot)


def plain_line(frame: Frame) -> str:
    """The same in one line, for logs and pipes."""
    status = frame.status
    words = [
        f"{clock(status.wall_seconds)} {status.phase}",
        f"{status.env_steps:,} env steps",
        f"{status.frames_per_second.last_10s:,.0f} frames/s",
        returns(status),
        f"lag {lag(status)}",
        f"queue {status.queue.depth}/{status.queue.capacity}",
        f"v{status.version}",
        peers(status),
        f"dropped {dropped}" if (dropped := drops(status)) else "",
        status.bottleneck,
        f"{frame.estimate.fraction:.0%}, {about(frame.estimate.seconds_left)}",
    ]
    return " | ".join(word for word in words if word)


def json_line(frame: Frame) -> str:
    """The same for machines: the fields of `RunStatus`, flat names first."""
    progress = {"fraction": frame.estimate.fraction, "seconds_left": frame.estimate.seconds_left}
    return json.dumps({"event": "status", **frame.status.model_dump(mode="json"), "progress": progress})


class LiveView:
    """A panel that is redrawn in place."""

    period = LIVE_PERIOD

    def __init__(self, console: Console) -> None:
        """Draw on `console`, which is a terminal."""
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=False)

    def __enter__(self) -> Self:
        """Begin to draw."""
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Leave the last panel on the terminal."""
        self._live.stop()

    def show(self, frame: Frame) -> None:
        """Redraw."""
        self._live.update(panel(frame), refresh=True)

    def say(self, text: str) -> None:
        """Print above the panel."""
        self._console.print(text, markup=False, highlight=False)


class LineView:
    """One line per frame, plain or JSON."""

    period = LINE_PERIOD

    def __init__(self, stream: TextIO, *, style: Literal["plain", "json"]) -> None:
        """Write to `stream`, flushed line by line."""
        self._stream, self._style = stream, style

    def __enter__(self) -> Self:
        """Nothing to prepare."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Nothing to give back."""

    def show(self, frame: Frame) -> None:
        """Write one line."""
        self._print(json_line(frame) if self._style == "json" else plain_line(frame))

    def say(self, text: str) -> None:
        """Write one sentence."""
        self._print(json.dumps({"event": "message", "text": text}) if self._style == "json" else text)

    def _print(self, line: str) -> None:
        """A run does not end because nobody reads along any more, or because the disk of its log is full."""
        try:
            print(line, file=self._stream, flush=True)
        except OSError as error:
            # What the stream still holds must go somewhere, or each later flush fails, that of the exit included.
            with suppress(OSError), Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
            with suppress(OSError):
                print(f"rookery train: warning: nothing more is shown: {error.strerror}; the run goes on", file=sys.stderr)


def make_view(stream: TextIO, log_format: Literal["auto", "plain", "json"]) -> View:
    """The live view where `stream` is a terminal and nothing else was asked for."""
    if log_format == "auto" and stream.isatty():
        return LiveView(Console(file=stream))
    return LineView(stream, style="json" if log_format == "json" else "plain")
