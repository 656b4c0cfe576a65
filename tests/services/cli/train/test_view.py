"""The views of a run, on a terminal and in a pipe."""

import io
import json
from dataclasses import replace
from datetime import datetime

import pytest
from rich.console import Console

from common.observability.learner_stats import Progress
from services.cli.train.status import EvaluationResult, FrameRates, LedgerCounts, PolicyLag, Queue, RunStatus, Target
from services.cli.train.view import (
    LineView,
    LiveView,
    ViewFrame,
    clock,
    make_view,
    number,
    panel,
    plain_line,
    progress_text,
    time_left,
)

pytestmark = pytest.mark.pure

STATUS = RunStatus(
    phase="training",
    wall_seconds=3723.0,
    env_steps=1_234_567,
    env_steps_per_second=4001.0,
    frames_per_second=FrameRates(last_10s=16_500, last_60s=16_100, run=15_957),
    learner_updates=301,
    version=299,
    queue=Queue(depth=3, capacity=8),
    policy_lag=PolicyLag(min=0, mean=0.75, max=2),
    mean100=12.34,
    last_evaluation=EvaluationResult(version=290, mode="greedy", mean=14.5, episodes=10),
    target=Target(mean100=18.0, env_steps=3_000_000),
    progress=Progress(fraction=0.62, seconds_left=130.0),
    workers={"actor": 2, "evaluator": 1},
    ledger=LedgerCounts(dropped={"stale": 512, "gap": 0}),
    actors_wanted=4,
    restarts=1,
    bottleneck="the learner trains (82 % of its time)",
)
FRAME = ViewFrame(title="pong, seed 1", run_dir="runs/pong-1", status=STATUS)


def drawn(frame, width=80, height=24):
    """The panel as a terminal of that size shows it."""
    console = Console(width=width, height=height, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(panel(frame))
    return console.file.getvalue()


def test_the_panel_shows_every_fact_of_a_run():
    """Each thing that a user asks while a run goes on, with its number."""
    text = " ".join(drawn(FRAME).split())
    for fact in (
        "pong, seed 1 training 1:02:03",
        "16,500 (10 s) 16,100 (60 s) 15,957 (run)",
        "1,234,567 of 3,000,000, 4,001 per second, 301 updates",
        "mean100 12.34, target 18, last evaluation 14.5 (greedy, 10 episodes, v290)",
        "min 0, mean 0.8, max 2 versions, snapshot v299",
        "3 of 8 messages",
        "2 of 4 actors connected, evaluator connected, 1 restarts (see logs/ of the run directory)",
        "stale 512 (env steps)",
        "the learner trains (82 % of its time)",
        "62%, about 2 min left",
        "runs/pong-1",
        "Ctrl-C",
    ):
        assert fact in text
    assert "gap" not in text, "a reason that dropped nothing is noise"


@pytest.mark.parametrize(
    ("name", "remark"),
    [
        ("environments_unfinished", "environments have ended none"),
        ("episodes_before_leaving", "of them ended before an actor left"),
    ],
)
def test_a_mean_over_short_episodes_is_marked(name, remark):
    status = STATUS.model_copy(update={"mean100_episodes": 100, name: 63})
    assert f"mean100 12.34 (63 {remark})" in plain_line(replace(FRAME, status=status))


def test_a_return_just_below_its_target_has_more_digits():
    target = FRAME.status.target.model_copy(update={"mean100": 12.341, "evaluation": 14.5001})
    line = plain_line(replace(FRAME, status=FRAME.status.model_copy(update={"mean100": 12.339, "target": target})))
    assert "mean100 12.339, target 12.341, last evaluation 14.5 (" in line
    assert "target of evaluations 14.5001" in line


def test_a_target_of_evaluations_stands_beside_the_evaluation():
    status = FRAME.status.model_copy(update={"target": FRAME.status.target.model_copy(update={"evaluation": 19.0})})
    assert "last evaluation 14.5 (greedy, 10 episodes, v290), target of evaluations 19" in plain_line(
        replace(FRAME, status=status)
    )


@pytest.mark.parametrize(
    ("phase", "shown"), [("evaluating", "evaluating (10 episodes have not ended)"), ("training", "training")]
)
def test_a_run_that_waits_for_its_last_evaluation_says_for_what(phase, shown):
    frame = replace(FRAME, status=STATUS.model_copy(update={"phase": phase, "episodes_playing": 10}))
    assert plain_line(frame).startswith(f"1:02:03 {shown} | ")
    assert f"pong, seed 1   {shown}   1:02:03" in drawn(frame)


def test_the_panel_fits_a_small_terminal():
    """80x24, the terminal everybody has: nothing is cut off, nothing scrolls."""
    lines = drawn(FRAME).splitlines()
    assert len(lines) <= 22
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if "…" in line]


@pytest.mark.parametrize("width", [40, 50, 80])
def test_a_narrow_terminal_shows_how_far_the_run_is_beside_a_shorter_bar(width):
    line = next(line for line in drawn(FRAME, width=width).splitlines() if "to the end" in line)
    assert line.rstrip().endswith("62%, about 2 min left")
    assert "━━" in line


def test_a_run_that_has_just_begun_shows_dashes_and_no_drops():
    """Before the first episode there is no score, and zero would be a lie."""
    text = drawn(ViewFrame(title="pong, seed 1", run_dir="runs/x", status=RunStatus()))
    assert "mean100 -" in text
    assert "time left unknown" in text
    assert "dropped" not in text


def test_before_the_learner_answers_nothing_is_known_but_phase_and_time():
    """A resumed run has env steps, and is not at 0 %."""
    frame = replace(FRAME, status=RunStatus(wall_seconds=5.0, actors_wanted=2), answered=False)
    assert plain_line(frame) == "0:00:05 starting"
    text = drawn(frame)
    assert "pong, seed 1   starting   0:00:05" in text
    assert not [word for word in ("env steps", "frames/s", "%") if word in text]
    stream = io.StringIO()
    LineView(stream, style="json").show(frame)
    assert json.loads(stream.getvalue()).keys() == {"time", "event", "phase", "wall_seconds", "actors_wanted", "restarts"}


def test_a_pipe_gets_one_line_with_the_same_facts():
    """The log of a batch job: grep must find what the panel would have shown."""
    line = plain_line(FRAME)
    assert "\n" not in line
    for fact in (
        "1:02:03 training",
        "1,234,567 env steps",
        "16,500 frames/s",
        "mean100 12.34",
        "queue 3/8",
        "stale 512",
        "82 %",
        "62%",
    ):
        assert fact in line


def test_machines_get_json_with_the_same_facts():
    """`--log-format json | jq .mean100`."""
    stream = io.StringIO()
    LineView(stream, style="json", run_id="pong-7").show(FRAME)
    fields = json.loads(stream.getvalue())
    assert (fields["event"], fields["run"]) == ("status", "pong-7")
    assert datetime.fromisoformat(fields["time"]).tzinfo is not None
    assert fields["mean100"] == 12.34
    assert fields["ledger"]["dropped"] == {"stale": 512, "gap": 0}
    assert fields["progress"] == {"fraction": 0.62, "seconds_left": 130.0}


def test_sentences_come_between_the_lines():
    """`stopping` or `actor-1 gave up` must not be lost in a log, and must not break one of JSON lines."""
    plain, machine = io.StringIO(), io.StringIO()
    for stream, style in ((plain, "plain"), (machine, "json")):
        with LineView(stream, style=style) as view:
            view.show(FRAME)
            view.print_message("saved")
    assert plain.getvalue().splitlines()[1] == "saved"
    message = json.loads(machine.getvalue().splitlines()[1])
    assert (message["event"], message["text"]) == ("message", "saved")


def test_the_result_is_lines_for_people_and_one_event_for_programs():
    """`jq 'select(.event == "result")'`, without a search through sentences."""
    plain, machine, facts = io.StringIO(), io.StringIO(), {"exit_code": 0, "mean100": 18.2}
    LineView(plain, style="plain").print_result(["solved", "  go on"], facts)
    LineView(machine, style="json", run_id="r").print_result(["solved", "  go on"], facts)
    assert plain.getvalue().splitlines() == ["solved", "  go on"]
    (line,) = machine.getvalue().splitlines()
    assert {"event": "result", "run": "r", "exit_code": 0, "mean100": 18.2}.items() <= json.loads(line).items()


def test_a_live_panel_leaves_the_terminal_as_it_was():
    """The cursor is hidden while the panel is redrawn; the shell after it needs it back."""
    console = Console(width=80, file=io.StringIO(), force_terminal=True)
    with LiveView(console) as view:
        view.show(FRAME)
        view.print_message("the learner [saves]")
    text = console.file.getvalue()
    assert "the learner [saves]" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_the_last_panel_is_removed_in_favour_of_the_result():
    """Its status is older than the end: the queue is not 3 of 8 any more, and no time is left."""
    console = Console(width=80, file=io.StringIO(), force_terminal=True)
    with LiveView(console) as view:
        view.show(FRAME)
    rows = len(drawn(FRAME).splitlines())
    after = console.file.getvalue().rpartition("Ctrl-C")[2]
    assert after.count("\x1b[1A\x1b[2K") == rows  # up and erase, for each row


def test_only_a_terminal_gets_the_live_panel():
    """A pipe is not redrawn, and neither is a terminal with --log-format plain."""

    class Terminal(io.StringIO):
        def isatty(self):
            """It claims to be one."""
            return True

    assert isinstance(make_view(Terminal(), "auto", run_id="r"), LiveView)
    assert isinstance(make_view(Terminal(), "plain", run_id="r"), LineView)
    assert isinstance(make_view(io.StringIO(), "auto", run_id="r"), LineView)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, "time left unknown"), (0.2, "about 1 s left"), (200, "about 3 min left"), (9000, "about 2.5 h left")],
)
def test_time_left_is_said_in_a_fitting_unit(seconds, words):
    """Nobody reads 9000 seconds."""
    assert time_left(seconds) == words


def test_a_run_whose_training_has_ended_has_no_time_left():
    assert progress_text(Progress(1.0)) == "100%"
    assert progress_text(Progress(0.5)) == "50%, time left unknown"
    assert progress_text(Progress(0.9951, 420.0)) == "99%, about 7 min left"


def test_wall_clock_time_reads_like_a_clock():
    """Hours, minutes, seconds."""
    assert [clock(value) for value in (0.4, 61, 36_000)] == ["0:00:00", "0:01:01", "10:00:00"]


@pytest.mark.parametrize(
    ("value", "beside", "text"),
    [
        (12_345.6, None, "12,346"),
        (12_345.6, 12_346.0, "12345.6"),
        (474.97, 475.0, "474.97"),
        (0.12346, None, "0.1235"),
        (None, 1.0, "-"),
    ],
)
def test_a_return_has_all_digits_before_the_point_and_as_many_as_tell_it_from_its_target(value, beside, text):
    assert number(value, beside) == text
