"""The reason of a failure, as it is found in the log of an actor."""

import json

import pytest

from services.cli.train.failure import crash_line, failure_lines, logged_reason, lost_results, refusal_line
from services.cli.train.instructions import ReportCrash, ReportFailure, ReportRefusal
from services.cli.train.processes import Processes

pytestmark = pytest.mark.pure

CRASH = '12:00:00.000 actor CRITICAL unexpected_error error="ValueError: no \\"level\\" 7"'
TRACE = ["Traceback (most recent call last):", '  File "games.py", line 3, in step', 'ValueError: no "level" 7']
REJECTED = '12:00:01.000 actor WARNING message_rejected seq=0 reason=non_finite detail="array reward at [3, 0]: found nan"'
REFUSED, DETAIL = "12:00:01.000 learner WARNING experience_refused", 'detail="array reward at [3, 0]: found nan"'
EVICTED = '12:00:02.000 actor WARNING refused code=evicted reason="16 messages in a row were refused"'


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([REJECTED, CRASH, *TRACE], 'ValueError: no "level" 7'),
        ([CRASH, *TRACE, REJECTED, EVICTED], "array reward at [3, 0]: found nan"),
        (["12:00:00.000 actor CRITICAL unexpected_error error=MemoryError"], "MemoryError"),
        ([json.dumps({"event": "unexpected_error", "error": "ValueError: x", "traceback": "..."})], "ValueError: x"),
        ([json.dumps({"event": "message_rejected", "detail": "array reward"}), "{cut sho"], "array reward"),
        (["12:00:00.000 actor actor_started learner=tcp://127.0.0.1:1", "Segmentation fault"], ""),
        (['12:00:00.000 actor CRITICAL unexpected_error error="ValueErr'], ""),
        ([], ""),
    ],
)
def test_the_newest_error_or_refusal_of_a_log_is_the_reason(lines, reason):
    assert logged_reason(lines) == reason


@pytest.fixture
def logged(tmp_path):
    """Children whose log is the given lines."""

    def write(*lines):
        for child in ("actor-0", "learner"):
            (tmp_path / f"{child}.log").write_text("\n".join(lines))
        return Processes(command=lambda _: [], logs=tmp_path, environment={})

    return write


def test_a_crash_is_one_line_with_the_error_or_the_signal(logged):
    error, killed = ReportCrash("actor-0", 1), ReportCrash("actor-0", -11)
    assert crash_line(error, logged(CRASH, *TRACE)).startswith('actor-0 crashed and is restarted: ValueError: no "level" 7 (')
    assert crash_line(error, logged("actor_started")).startswith("actor-0 crashed and is restarted: exit code 1 (")
    assert crash_line(killed, logged(CRASH, *TRACE)).startswith("actor-0 crashed and is restarted: signal 11 (")


@pytest.mark.parametrize(
    "started", ["12:00:05.000 actor actor_started learner=x", json.dumps({"service": "actor", "event": "actor_started"})]
)
def test_the_error_of_an_earlier_process_is_not_that_of_one_that_logged_none(logged, started):
    """An environment may end its process by `os._exit(3)`."""
    line = crash_line(ReportCrash("actor-0", 3), logged(CRASH, *TRACE, started))
    assert line.startswith("actor-0 crashed and is restarted: exit code 3 (")
    line = crash_line(ReportCrash("actor-0", 1), logged(started, CRASH, *TRACE))
    assert line.startswith('actor-0 crashed and is restarted: ValueError: no "level" 7 (')
    line = crash_line(ReportCrash("actor-0", 126), logged(started, 'process_not_started error="no memory"'))
    assert line.startswith("actor-0 crashed and is restarted: no memory (")


def test_refused_experience_is_one_line_with_the_reason_in_the_log_of_the_learner(logged):
    line = refusal_line(ReportRefusal(2), logged(f"{REFUSED} worker=actor-0 seq=3 reason=non_finite {DETAIL}"))
    assert line.startswith("2 messages of experience refused: array reward at [3, 0]: found nan (")


def test_the_reason_of_refused_experience_may_be_in_the_log_of_another_rank(logged, tmp_path):
    processes = logged("learner_started")
    (tmp_path / "learner-1.log").write_text(f"{REFUSED} worker=actor-1 seq=3 reason=non_finite {DETAIL}")
    line = refusal_line(ReportRefusal(1), processes, ["learner", "learner-1"])
    assert line == f"1 message of experience refused: array reward at [3, 0]: found nan ({tmp_path / 'learner-1.log'})"


def test_an_actor_that_cannot_work_is_one_line_and_with_debug_the_end_of_its_log(logged):
    failure, processes = ReportFailure("actor-0", "all its experience is refused (3 messages)", 1), logged(REJECTED, EVICTED)
    (line,) = failure_lines(failure, processes, debug=False)
    said = (
        "rookery train: error: actor-0 cannot work: all its experience is refused (3 messages): array reward at [3, 0]: found nan"
    )
    assert line.startswith(said)
    assert "; correct the environment (" in line
    assert list(failure_lines(failure, processes, debug=True))[-1] == f"  {EVICTED}"


def test_a_learner_that_fails_shows_the_end_of_its_log(logged):
    lines = list(failure_lines(ReportFailure("learner", "6 crashes", -9), logged(CRASH, *TRACE), debug=False))
    assert lines[0].startswith("rookery train: learner failed: 6 crashes; the end of ")
    assert lines[-1] == f"  {TRACE[-1]}"


def test_an_error_of_one_line_is_found_before_what_a_process_writes_at_its_end(logged):
    """The counts of lines that were left out, or the last words of a simulator."""
    error, left_out = "rookery actor: error: another release: found 1, wanted 2", "12:00:00 actor WARNING lines_left_out lines=1"
    failure = ReportFailure("actor-0", "a setting is invalid", 2)
    (line,) = failure_lines(failure, logged("actor_started", error, left_out), debug=False)
    assert line == "rookery train: error: another release: found 1, wanted 2 (from actor-0)"
    (line,) = failure_lines(failure, logged("actor_started"), debug=False)
    assert line == "rookery train: error: actor_started (from actor-0)"


LOST = '12:00:03.000 learner WARNING results_incomplete detail="wandb did not get 7 points"'


def test_what_the_results_of_a_run_lack_is_in_the_log_of_its_newest_learner(logged, tmp_path):
    log = tmp_path / "learner.log"
    assert lost_results(logged("learner_started", LOST, "learner_ended")) == f"wandb did not get 7 points ({log})"
    assert lost_results(logged("learner_started", LOST, "learner_ended", "learner_started", "learner_ended")) == ""
    assert lost_results(logged("learner_started", json.dumps({"event": "results_incomplete", "detail": "x"}))) == f"x ({log})"
