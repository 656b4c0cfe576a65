"""Events and how they look."""

from __future__ import annotations

import io
import json
import logging
from contextlib import suppress

import pytest

from common.errors import DropReason
from common.observability import logs
from common.observability.logs import EventLog, configure, flush
from common.protocol.events import LogEvent, RefusalCode

pytestmark = pytest.mark.service


@pytest.fixture
def output():
    """A stream for `configure`; the root logger is put back afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)


def raised(error):
    """The error as it looks once it was raised: with a traceback."""
    with suppress(type(error)):
        raise error
    return error


def test_a_plain_line_is_time_service_event_and_fields(output):
    """The form for a terminal."""
    configure("learner", stream=output)
    EventLog("x").info("snapshot_published", version=7, seconds=0.123456789, to="all workers", why="")
    time, line = output.getvalue().split(" ", 1)
    assert len(time) == len("10:23:54.120")
    assert line == 'learner snapshot_published version=7 seconds=0.123457 to="all workers" why=""\n'


def test_what_a_session_notes_becomes_an_event(output):
    """The state machines write no logs: they say what is worth one, and whether it is a warning."""
    configure("actor", stream=output)
    EventLog("x").log_event(LogEvent(event="welcomed", fields={"run": "pong-1"}))
    EventLog("x").log_event(LogEvent(event="learner_lost", fields={"silent_seconds": 5.0}, warning=True))
    lines = [line.split(" ", 1)[1] for line in output.getvalue().splitlines()]
    assert lines == ["actor welcomed run=pong-1", "actor WARNING learner_lost silent_seconds=5"]


class FullDisk(io.StringIO):
    """A log file on a disk without space while `full`; it takes the beginning of the first line."""

    full = False

    def write(self, text):
        if self.full:
            super().write(text[:5] if self.getvalue()[-1:] == "\n" else "")
            raise OSError(28, "No space left on device")
        return super().write(text)


@pytest.mark.usefixtures("output")
def test_lines_that_a_full_disk_refuses_are_counted_once_there_is_space():
    stream, log = FullDisk(), EventLog("x")
    configure("learner", stream=stream)
    log.info("before")
    stream.full = True
    for number in range(3):
        log.info("refused", number=number)
    stream.full = False
    log.info("after")
    log.info("later")
    lines = [line.split(" ", 1)[-1] for line in stream.getvalue().splitlines()]
    assert [lines[0], *lines[2:]] == ["learner before", "learner WARNING lines_lost lines=3", "learner after", "learner later"]


def test_what_workers_cause_is_limited_and_counted_and_what_the_service_does_is_not(output, clock):
    """8 MB in seconds: two lines for each of a hostile worker's messages."""
    configure("learner", stream=output, clock=clock)
    log = EventLog("x")
    fields = {"route": "ab", "code": RefusalCode.DECODE, "reason": "no"}
    for _ in range(1000):
        log.log_event(LogEvent(event="worker_refused", fields=fields, warning=True))
        log.info("checkpoint_saved")
    lines = [line.split(" ", 1)[1] for line in output.getvalue().splitlines()]
    assert lines.count("learner WARNING worker_refused route=ab code=decode reason=no") == 1
    assert lines.count("learner checkpoint_saved") == 1000
    clock.now += 10.0
    log.info("learner_ended")
    lines = [line.split(" ", 1)[1] for line in output.getvalue().splitlines()]
    assert lines[-2:] == ["learner WARNING lines_left_out of=worker_refused:decode lines=999 seconds=10", "learner learner_ended"]


def test_what_was_left_out_is_counted_at_the_end_too(output, clock):
    """Nothing more comes: the root flushes."""
    configure("learner", stream=output, clock=clock)
    for _ in range(3):
        EventLog("x").log_event(LogEvent(event="worker_left", fields={"worker": "a", "reason": "over"}))
        EventLog("x").bug("http_page_failed", error=raised(ZeroDivisionError()), sender="/metrics")
    clock.now += 1.0
    for _ in range(2):
        flush()
    text = output.getvalue()
    assert text.count("Traceback") == text.count("worker_left worker=") == 1
    assert text.count("lines_left_out of=worker_left lines=2 seconds=1\n") == 1
    assert text.count("lines_left_out of=http_page_failed lines=2 seconds=1\n") == 1


def test_each_worker_is_a_sender_of_its_own(output, clock):
    """Two workers that leave at once are two lines."""
    configure("learner", stream=output, clock=clock)
    for name in ("a", "b", "b"):
        EventLog("x").log_event(LogEvent(event="worker_left", fields={"worker": name, "reason": "over"}))
    assert output.getvalue().count("worker_left") == 2


def test_workers_refused_for_one_reason_hide_no_other_refusal(output, clock):
    """Workers that wait for a slot greet again every 3 s."""
    configure("learner", stream=output, clock=clock)
    waiting = [(f"{route}", RefusalCode.FULL) for route in range(logs.BURST + 1)]
    for route, code in [*waiting, ("new", RefusalCode.ENVIRONMENT)]:
        EventLog("x").log_event(LogEvent(event="worker_refused", fields={"route": route, "code": code}))
    flush()
    assert output.getvalue().count("code=full") == logs.BURST
    assert "lines_left_out of=worker_refused:full lines=1 " in output.getvalue()
    assert "worker_refused route=new code=environment" in output.getvalue()


@pytest.mark.parametrize("form", ["plain", "json"])
def test_a_minute_of_hostile_notes_is_less_than_two_megabytes(output, clock, form):
    """Every event and code that a worker can cause, each time with another sender and as long as it can be."""
    configure("learner", form=form, stream=output, clock=clock)
    log = EventLog("x")
    kinds = [("refused", code) for code in (*RefusalCode, *DropReason)] + [(f"event_{number}", "") for number in range(12)]
    for number in range(500):
        clock.now = number * 60 / 500
        text = f"{number}" + "\x00\u20ac" * 500
        for event, code in kinds:
            fields = {"route": "ff" * 8, "worker": text[:128], "code": code, "reason": text}
            log.log_event(LogEvent(event=event, fields=fields))
    flush()
    assert len(output.getvalue()) < 2_000_000


def test_more_than_info_is_marked_and_less_than_the_level_is_not_said(output):
    """Warnings stand out; debug stays away."""
    configure("actor", stream=output)
    log = EventLog("x")
    log.debug("detail")
    log.warning("learner_lost", after=3)
    log.error("gone")
    lines = [line.split(" ", 1)[1] for line in output.getvalue().splitlines()]
    assert lines == ["actor WARNING learner_lost after=3", "actor ERROR gone"]


def test_a_workers_words_cannot_fake_a_line(output):
    """A hostile name with a line break and terminal codes in it."""
    configure("learner", stream=output)
    EventLog("x").info("greeted", worker="a\n10:00:00 learner all_fine", title="\x1b[2J")
    assert len(output.getvalue().splitlines()) == 1
    assert "\x1b" not in output.getvalue()


def test_json_lines_are_strict_json(output):
    """A log collector must be able to read each line, NaN or not."""
    configure("learner", form="json", stream=output)
    EventLog("x").warning(
        "odd", loss=float("nan"), parts={"kl": float("inf")}, each=[1, float("-inf")], path=object, event="mine"
    )
    line = json.loads(output.getvalue(), parse_constant=pytest.fail)
    assert line.pop("time").endswith("+00:00")
    path = line.pop("path")
    assert "object" in path
    assert line == {
        "level": "warning", "service": "learner", "event": "odd", "loss": "nan", "parts": {"kl": "inf"}, "each": [1, "-inf"],
        "event_": "mine",
    }  # fmt: skip


@pytest.mark.parametrize("form", ["plain", "json"])
@pytest.mark.parametrize("debug", [False, True])
def test_an_errors_traceback_shows_only_with_debug(output, form, debug):
    """A checkpoint on a full disk is one line, unless somebody looks for a fault."""
    configure("learner", form=form, debug=debug, stream=output)
    EventLog("x").error("checkpoint_failed", error=raised(OSError("disk full")))
    assert "OSError: disk full" in output.getvalue()
    assert ("Traceback" in output.getvalue()) == debug


@pytest.mark.parametrize("form", ["plain", "json"])
def test_a_bug_shows_its_traceback_always(output, form):
    """Nobody asks for debug before the bug."""
    configure("learner", form=form, stream=output)
    EventLog("x").bug("unexpected_error", error=raised(ZeroDivisionError()))
    assert "Traceback" in output.getvalue()


def test_lines_of_other_libraries_take_the_same_form(output):
    """The library matplotlib says something in two lines."""
    configure("learner", stream=output)
    logging.getLogger("matplotlib").warning("font %s\n not found", "x")
    assert output.getvalue().split(" ", 1)[1] == "learner WARNING font x not found\n"


def test_configuring_again_replaces_the_first(output):
    """A root that learns the wanted format from the configuration."""
    configure("learner", stream=output)
    configure("learner", form="json", level="error", stream=output)
    log = EventLog("x")
    log.warning("quiet")
    log.error("once")
    assert json.loads(output.getvalue())["event"] == "once"


def test_json_lines_name_the_run_once_it_is_known(output, monkeypatch):
    """The logs of several runs are collected in one place. A field of the same value is not written twice."""
    monkeypatch.setattr(logs, "_run", "")
    configure("actor", form="json", stream=output)
    log = EventLog("x")
    log.info("started")
    logs.belong_to("pong-7")
    log.info("welcomed", run="pong-7")
    log.info("refused", run="pong-8")
    before, after, other = (json.loads(line) for line in output.getvalue().splitlines())
    assert "run" not in before
    assert (after["run"], other["run"], other["run_"]) == ("pong-7", "pong-7", "pong-8")
    assert "run_" not in after


def test_the_id_of_a_run_comes_from_a_learner_and_is_kept_short(output, monkeypatch):
    """Each line of the log would repeat a text of any length."""
    monkeypatch.setattr(logs, "_run", "")
    configure("actor", form="json", stream=output)
    logs.belong_to("x" * 10_000)
    EventLog("x").info("started")
    assert len(output.getvalue()) < 500
