"""The display of a run: a live panel on a terminal, plain lines or JSON lines elsewhere.

The functions format a `RunStatus`; the views decide where and how often it is shown.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Literal, Self, TextIO, TypeAlias

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from common.observability.learner_stats import Progress
from common.units import Seconds
from services.cli.train.status import RunStatus

MINUTE, HOUR = 60, 3600
FULL_MEAN = 100  # episodes


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewFrame:
    """The content of one refresh."""

    title: str  # preset and seed
    run_dir: str
    status: RunStatus
    answered: bool = True  # whether the learner has: before that only phase and time of the status are known


def clock(seconds: Seconds) -> str:
    """Format a duration as `1:02:03`."""
    whole = round(seconds)
    return f"{whole // HOUR}:{whole % HOUR // MINUTE:02}:{whole % MINUTE:02}"


def time_left(seconds: Seconds | None) -> str:
    """Format an estimate: `about 3 min left`."""
    if seconds is None:
        return "time left unknown"
    if seconds < 2 * MINUTE:
        return f"about {max(1, round(seconds))} s left"
    return f"about {seconds / MINUTE:.0f} min left" if seconds < 2 * HOUR else f"about {seconds / HOUR:.1f} h left"


def number(value: float | None, beside: float | None = None) -> str:
    """Format a number with four digits, and all before the point: `0.1235`, `475`, `12,346`; a dash for None.

    Where `beside`, another value, would look the same, it has more.
    """
    if value is None:
        return "-"
    if beside is None or value == beside or _four_digits(value) != _four_digits(beside):
        return _four_digits(value)
    return f"{value:.7g}" if f"{value:.7g}" != f"{beside:.7g}" else str(value)


def _four_digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 or float(value).is_integer() else f"{value:.4g}"  # noqa: PLR2004


def phase(status: RunStatus) -> str:
    """Format the phase; where the run waits for its last evaluation, with the number of episodes that it waits for."""
    waits = status.phase == "evaluating" and status.episodes_playing
    return f"{status.phase} ({status.episodes_playing} episodes have not ended)" if waits else status.phase


def progress_text(done: Progress) -> str:
    """Format how far the run is: `63%, about 3 min left`, at most `99%` before the end; at the end `100%` alone."""
    ended = done == Progress(1.0)
    return "100%" if ended else f"{min(done.fraction, 0.99):.0%}, {time_left(done.seconds_left)}"


MEAN_COUNTS = ("mean100_episodes", "environments_unfinished", "episodes_before_leaving")
"""The arguments of `mean_remark`, by their names in status and summary."""


def mean_remark(episodes: float, unfinished: float, before_leaving: float) -> str:
    """Return why mean100 is not a mean of 100 episodes of all environments; "" where it is one, or before the first episode."""
    remarks = {
        f"of {episodes:.0f} episodes": episodes < FULL_MEAN,
        f"{unfinished:.0f} environments have ended none": unfinished > 0,
        f"{before_leaving:.0f} of them ended before an actor left": before_leaving > 0,
    }
    return "".join(f" ({remark})" for remark, holds in remarks.items() if episodes > 0 and holds)


def returns(status: RunStatus) -> str:
    """Format the training score and the last evaluation, each with its target."""
    target, last = status.target, status.last_evaluation
    mean100 = number(status.mean100, target.mean100)
    remark = mean_remark(*(getattr(status, name) for name in MEAN_COUNTS))
    parts = [f"mean100 {mean100}{remark}"]
    if target.mean100 is not None:
        parts.append(f"target {number(target.mean100, status.mean100)}")
    if last is not None:
        mean = number(last.mean, target.evaluation)
        parts.append(f"last evaluation {mean} ({last.mode}, {last.episodes} episodes, v{last.version})")
    if target.evaluation is not None:
        parts.append(f"target of evaluations {number(target.evaluation, last.mean if last else None)}")
    return ", ".join(parts)


def steps(status: RunStatus) -> str:
    """Format the env steps trained on, with the budget."""
    budget = f" of {status.target.env_steps:,}" if status.target.env_steps else ""
    return f"{status.env_steps:,}{budget}, {status.env_steps_per_second:,.0f} per second, {status.learner_updates:,} updates"


def lag(status: RunStatus) -> str:
    """Format the policy lag, or a dash before the first update."""
    seen = status.policy_lag
    return "-" if seen.mean is None else f"min {seen.min:.0f}, mean {seen.mean:.1f}, max {seen.max:.0f} versions"


def drops(status: RunStatus) -> str:
    """Format the dropped env steps by reason; empty where none was dropped."""
    return ", ".join(f"{reason} {count:,}" for reason, count in sorted(status.ledger.dropped.items()) if count)


def workers(status: RunStatus) -> str:
    """Format the number of connected workers and of restarts."""
    wanted = f" of {status.actors_wanted}" if status.actors_wanted else ""
    parts = [f"{status.workers.get('actor', 0)}{wanted} actors connected"]
    if status.workers.get("evaluator"):
        parts.append("evaluator connected")
    if status.restarts:
        parts.append(f"{status.restarts} restarts (see logs/ of the run directory)")
    return ", ".join(parts)


def facts(status: RunStatus) -> Iterator[tuple[str, str]]:
    """Yield name and value of each row of the live panel."""
    rate = status.frames_per_second
    yield "frames/s", f"{rate.last_10s:,.0f} (10 s)   {rate.last_60s:,.0f} (60 s)   {rate.run:,.0f} (run)"
    yield "env steps", steps(status)
    yield "return", returns(status)
    yield "policy lag", f"{lag(status)}, snapshot v{status.version}"
    yield "queue", f"{status.queue.depth} of {status.queue.capacity} messages"
    yield "workers", workers(status)
    if dropped := drops(status):
        yield "dropped", f"{dropped} (env steps)"
    yield "bottleneck", status.bottleneck or "-"


def panel(frame: ViewFrame) -> Group:
    """Return the live panel, which fits 80x24."""
    head = Text.assemble(("rookery ", "bold"), frame.title, f"   {phase(frame.status)}   {clock(frame.status.wall_seconds)}")
    foot = Text(f"{frame.run_dir}   Ctrl-C saves and stops", style="dim")
    if not frame.answered:
        return Group(head, Text(), foot)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", width=10)
    grid.add_column(ratio=1)
    for name, value in facts(frame.status):
        grid.add_row(name, value)
    bar = Table.grid(padding=(0, 2))
    bar.add_column(width=10, no_wrap=True)
    bar.add_column(max_width=36)  # shrinks first on a narrow terminal
    bar.add_column(no_wrap=True)
    done = frame.status.progress
    bar.add_row(Text("to the end", style="bold"), ProgressBar(total=1.0, completed=done.fraction), progress_text(done))
    return Group(head, Text(), grid, Text(), bar, Text(), foot)


def plain_line(frame: ViewFrame) -> str:
    """Return the same in one line, for logs and pipes."""
    status = frame.status
    begin = f"{clock(status.wall_seconds)} {phase(status)}"
    if not frame.answered:
        return begin
    parts = [
        begin,
        f"{status.env_steps:,} env steps",
        f"{status.frames_per_second.last_10s:,.0f} frames/s",
        returns(status),
        f"lag {lag(status)}",
        f"queue {status.queue.depth}/{status.queue.capacity}",
        f"v{status.version}",
        workers(status),
        f"dropped {dropped}" if (dropped := drops(status)) else "",
        status.bottleneck,
        progress_text(status.progress),
    ]
    return " | ".join(part for part in parts if part)


def status_fields(frame: ViewFrame) -> dict[str, object]:
    """Return the fields of `RunStatus`, JSON values; those alone that are known."""
    if not frame.answered:
        return frame.status.model_dump(mode="json", include={"phase", "wall_seconds", "actors_wanted", "restarts"})
    return frame.status.model_dump(mode="json")


class LiveView:
    """A panel that is redrawn in place, and removed at the end: the result follows, and is newer than the last status."""

    period: Seconds = 0.5  # between two refreshes

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        with self._outlived():
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._outlived():
            self._live.stop()

    def show(self, frame: ViewFrame) -> None:
        """Redraw."""
        with self._outlived():
            self._live.update(panel(frame), refresh=True)

    def print_message(self, text: str) -> None:
        """Print above the panel."""
        with self._outlived():
            self._console.print(text, markup=False, highlight=False)

    def print_result(self, lines: Iterable[str], facts: Mapping[str, object]) -> None:  # noqa: ARG002
        """Print the lines."""
        for line in lines:
            self.print_message(line)

    def _outlived(self) -> AbstractContextManager[None]:
        return outlived(self._console.file, end=self._live.stop)  # until then `Live` prints stderr on the terminal that failed


class LineView:
    """One line per frame, plain or JSON; a JSON line has the time (UTC) and the id of the run."""

    period: Seconds = 5.0  # between two lines

    def __init__(self, stream: TextIO, *, style: Literal["plain", "json"], run_id: str = "") -> None:
        self._stream, self._style, self._run_id = stream, style, run_id

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: a stream has no state to restore."""

    def show(self, frame: ViewFrame) -> None:
        """Write one line."""
        self._print(self._event("status", status_fields(frame)) if self._style == "json" else plain_line(frame))

    def print_message(self, text: str) -> None:
        """Write one message."""
        self._print(self._event("message", {"text": text}) if self._style == "json" else text)

    def print_result(self, lines: Iterable[str], facts: Mapping[str, object]) -> None:
        """Write the lines, or one event."""
        for line in [self._event("result", facts)] if self._style == "json" else lines:
            self._print(line)

    def _event(self, event: str, fields: Mapping[str, object]) -> str:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        run = {"run": self._run_id} if self._run_id else {}
        return json.dumps({"time": now, **run, "event": event, **fields})

    def _print(self, line: str) -> None:
        with outlived(self._stream):
            print(line, file=self._stream, flush=True)


@contextmanager
def outlived(stream: IO[str], *, end: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Report once that `stream` is a closed pipe or terminal, or on a full disk, which does not end the run; first call `end`."""
    try:
        yield
    except OSError as error:
        discard(stream)
        end()
        try:
            print(f"rookery train: warning: the display ends: {error.strerror}; the run goes on", file=sys.stderr, flush=True)
        except OSError:
            discard(sys.stderr)


def discard(stream: IO[str]) -> None:
    """Let `stream` write nowhere from now on; else each later flush of the buffered text would fail, that at exit included."""
    with suppress(OSError), Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


View: TypeAlias = LiveView | LineView


def make_view(stream: TextIO, log_format: Literal["auto", "plain", "json"], *, run_id: str = "") -> View:
    """Return the live view where `stream` is a terminal and `log_format` is auto, else lines."""
    if log_format == "auto" and stream.isatty():
        return LiveView(Console(file=stream))
    return LineView(stream, style="json" if log_format == "json" else "plain", run_id=run_id)
