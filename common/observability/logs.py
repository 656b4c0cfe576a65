"""Events instead of sentences: `log.info("snapshot_published", version=7, bytes=1234)`.

Any adapter may make an `EventLog`; only a root calls `configure`, which decides where events go and how they look.
Lines that a remote party can cause (`EventLog.log_event`, and `bug` with a `sender`) are limited; all others are written.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Literal, TextIO

from common.protocol.events import LogEvent
from common.units import Seconds

REMOTE_CHARACTERS = 300  # of one field of a note
INTERVAL_SECONDS: Seconds = 10.0  # one line for each event, sender and reason
BURST = 32  # lines of one kind at once, over all senders
LINES_PER_SECOND = 0.5  # of one kind in the long run, over all senders

_FIELDS = "rookery_fields"  # attribute of the log record that carries the fields
_LIMITED = "rookery_limited"  # attribute of a limited record: its kind and its sender


_run = ""  # id of the run to which all lines of this process belong


def belong_to(run_id: str) -> None:
    """Add the id of the run to every JSON line of this process from now on. For roots only."""
    global _run  # noqa: PLW0603  a process serves one run
    _run = str(_short(run_id))


class EventLog:
    """A named source of events. Threads may share one."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, /, *, error: BaseException | None = None, **fields: object) -> None:
        """Log a detail for a search for faults."""
        self._log(logging.DEBUG, event, error, fields)

    def info(self, event: str, /, *, error: BaseException | None = None, **fields: object) -> None:
        """Log a step of the service."""
        self._log(logging.INFO, event, error, fields)

    def warning(self, event: str, /, *, error: BaseException | None = None, **fields: object) -> None:
        """Log a loss or a delay after which the service continues."""
        self._log(logging.WARNING, event, error, fields)

    def error(self, event: str, /, *, error: BaseException | None = None, **fields: object) -> None:
        """Log that the service cannot do its work."""
        self._log(logging.ERROR, event, error, fields)

    def bug(self, event: str, /, *, error: BaseException, sender: Hashable = None) -> None:
        """Log an unforeseen exception with its traceback; where a `sender` can cause it, once in an interval."""
        self._log(logging.CRITICAL, event, error, {}, None if sender is None else (event, sender))

    def log_event(self, event: LogEvent) -> None:
        """Log an event of a session, which a remote party can cause: limited by its sender and reason, its text short ASCII.

        Events with different members of an enum are of different kinds: senders that are refused as `full` hide no other refusal.
        """
        fields = {name: _short(value) for name, value in event.fields.items()}
        sender = tuple(fields.get(name) for name in ("worker", "route", "code", "reason"))
        kind = ":".join([event.event, *(value for value in event.fields.values() if isinstance(value, StrEnum))])
        self._log(logging.WARNING if event.warning else logging.INFO, event.event, None, fields, (kind, sender))

    def _log(
        self,
        level: int,
        event: str,
        error: BaseException | None,
        fields: Mapping[str, object],
        limited: tuple[str, Hashable] | None = None,
    ) -> None:
        if self._logger.isEnabledFor(level):
            said = {**fields, "error": f"{type(error).__name__}: {error}"} if error is not None else fields
            self._logger.log(level, "%s", event, exc_info=error, extra={_FIELDS: said, _LIMITED: limited})


def configure(
    service: str,
    *,
    level: str = "info",
    form: Literal["auto", "plain", "json"] = "auto",
    debug: bool = False,
    stream: TextIO | None = None,
    clock: Callable[[], Seconds] = time.monotonic,
) -> None:
    """Send the events of this process to `stream` (stderr). For roots only; a second call replaces the first.

    `auto` is plain: people read a service's own output, and what collects it asks for json. With `debug`
    every error shows its traceback.
    """
    flush()
    belong_to("")
    handler = _LimitedHandler(stream or sys.stderr, clock)
    handler.setFormatter((JsonFormatter if form == "json" else PlainFormatter)(service, tracebacks=debug))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def flush() -> None:
    """Write how many lines were left out and not reported yet. For the end of a process."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _LimitedHandler):
            handler.report()


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """The number of lines of a kind that were not written."""

    kind: str
    lines: int
    seconds: Seconds  # since the first line of the kind in this interval


@dataclass(slots=True)
class _Kind:
    tokens: float = BURST
    refilled_at: Seconds = -math.inf
    began_at: Seconds = 0.0
    seen: set[Hashable] = field(default_factory=set)  # senders with a line in this interval: at most as many as tokens
    left_out: int = 0


class LogLimit:
    """Decides which events become lines: one for each sender and interval, and a token bucket for each kind over all senders.

    Every line that is left out is in one `LeftOut`. Memory is bounded by the number of kinds, fixed in the code: a sender
    is remembered only if it got a line. Not thread-safe. `now` is the time on any monotonic clock.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, _Kind] = {}

    def admit(self, kind: str, sender: Hashable, now: Seconds) -> bool:
        """Return whether this event is to be written; an event that is not is counted."""
        state = self._kinds.setdefault(kind, _Kind(began_at=now))
        state.tokens = min(BURST, state.tokens + (now - state.refilled_at) * LINES_PER_SECOND)
        state.refilled_at = now
        if sender in state.seen or state.tokens < 1.0:
            state.left_out += 1
            return False
        state.tokens -= 1.0
        state.seen.add(sender)
        return True

    def ended(self, now: Seconds, *, every: bool = False) -> list[LeftOut]:
        """Return the left-out lines of the intervals that have ended by `now` (`every`: of all intervals), each once."""
        out = []
        for kind, state in self._kinds.items():
            if every or now - state.began_at >= INTERVAL_SECONDS:
                if state.left_out:
                    out.append(LeftOut(kind=kind, lines=state.left_out, seconds=now - state.began_at))
                state.began_at, state.left_out = now, 0
                state.seen.clear()
        return out


class _LimitedHandler(logging.StreamHandler[TextIO]):
    """Writes limited records within their limit, and before any record the counts of lines left out, or lost on a full disk."""

    def __init__(self, stream: TextIO, clock: Callable[[], Seconds]) -> None:
        super().__init__(stream)
        self._limit, self._clock = LogLimit(), clock
        self._lost = 0  # lines that the stream refused, not reported yet

    def emit(self, record: logging.LogRecord) -> None:
        now = self._clock()
        limited: tuple[str, Hashable] | None = getattr(record, _LIMITED, None)
        self._write(self._limit.ended(now))
        if limited is None or self._limit.admit(*limited, now):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        if isinstance(sys.exception(), OSError):
            self._lost += 1
        else:
            super().handleError(record)

    def report(self) -> None:
        assert self.lock
        with self.lock:
            self._write(self._limit.ended(self._clock(), every=True))

    def _write(self, left_out: list[LeftOut]) -> None:
        if lost := self._lost:
            with suppress(OSError):
                self.stream.write("\n")  # ends a line that was cut
            self._warn("lines_lost", lines=lost)
            self._lost = lost if self._lost > lost else 0
        for each in left_out:
            self._warn("lines_left_out", of=each.kind, lines=each.lines, seconds=round(each.seconds, 1))

    def _warn(self, event: str, **fields: object) -> None:
        super().emit(logging.makeLogRecord({"levelno": logging.WARNING, "levelname": "WARNING", "msg": event, _FIELDS: fields}))


class _Formatter(logging.Formatter):
    """Formats lines of `service`; tracebacks other than a bug's are shown only with `tracebacks`."""

    def __init__(self, service: str, *, tracebacks: bool) -> None:
        super().__init__()
        self._service, self._tracebacks = service, tracebacks

    def _traceback(self, record: logging.LogRecord) -> str:
        wanted = self._tracebacks or record.levelno >= logging.CRITICAL
        return self.formatException(record.exc_info) if wanted and record.exc_info else ""


class PlainFormatter(_Formatter):
    """`10:23:54.120 learner snapshot_published version=7 bytes=1234`, with the level where it is more than info."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever the fields hold."""
        at = datetime.fromtimestamp(record.created).astimezone()
        loud = [record.levelname] if record.levelno > logging.INFO else []
        said = [f"{name}={_plain(value)}" for name, value in _fields(record).items()]
        line = " ".join([at.strftime("%H:%M:%S.") + f"{int(record.msecs):03d}", self._service, *loud, _event(record), *said])
        trace = self._traceback(record)
        return f"{line}\n{trace}" if trace else line


class JsonFormatter(_Formatter):
    """One JSON object a line: time (UTC), level, service, the run once it is known, event, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """One line of strict JSON, whatever the fields hold."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            **({"run": _run} if _run else {}),
            "event": _event(record),
        }
        for name, value in _fields(record).items():
            if name == "run" and value == _run:
                continue
            line[f"{name}_" if name in line else name] = _finite(value)
        if trace := self._traceback(record):
            line["traceback"] = trace
        return json.dumps(line, default=str, allow_nan=False)


def _event(record: logging.LogRecord) -> str:
    # Libraries log sentences, some of several lines.
    return " ".join(record.getMessage().split())


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    fields: Mapping[str, object] = getattr(record, _FIELDS, {})
    return fields


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    # Text of a worker may hold line breaks or control characters, which must not fake a line of this log.
    return text if text and text.isprintable() and not set(text) & set(' "=') else json.dumps(text)


def _short(value: object) -> object:
    """Return a field of a note; text, which may quote bytes of a worker, as short ASCII that a formatter at most doubles."""
    if not isinstance(value, str):
        return value
    ascii_ = value[:REMOTE_CHARACTERS].encode("ascii", "replace").decode()
    return "".join(character if character.isprintable() else "?" for character in ascii_)


def _finite(value: object) -> object:
    """NaN and infinity are no JSON: they become text, in nested values too."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
