"""Tests of a run's results on disk, read back with the usual tools."""

from __future__ import annotations

import csv
import errno
import json
import logging
import math
import shutil
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from common.config.load import load_settings
from common.runtime.run_directory import create
from services.learner.journal import CURVE, RETRY_SECONDS, SCALARS_SECONDS, Journal, tracked_run

pytestmark = pytest.mark.service


@pytest.fixture
def directory(tmp_path):
    """A run directory that was just begun."""
    return create(tmp_path / "run", config="run: {}\n", command=["rookery"])


@pytest.fixture
def logged(caplog):
    """Return a function that returns what a journal logged: each event, and the code of its error."""
    caplog.set_level(logging.INFO, "services.learner.journal")
    return lambda: [(record.message, record.exc_info and errno.errorcode[record.exc_info[1].errno]) for record in caplog.records]


def rows(directory):
    """The learning curve as a spreadsheet reads it."""
    with directory.learning_curve_csv.open(newline="") as file:
        return list(csv.reader(file))


def points(directory):
    """The points of the event files by name: env steps and value, as TensorBoard shows them."""
    events = EventAccumulator(str(directory.tensorboard))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def update(journal, env_steps, values):
    """Record an update that has no values of a window of their own."""
    journal.update(env_steps, means=values, newest={})


class Clock:
    """A clock that a test turns."""

    now = 0.0

    def __call__(self):
        return self.now


def test_slow_updates_are_points_of_their_own(directory):
    """Names with slashes group the charts, the x axis is env steps; a loss that is not finite leaves a hole."""
    clock = Clock()
    journal = Journal(directory, env_steps=0, clock=clock)
    update(journal, 256, {"train/policy_loss": 0.5, "train/entropy": math.nan})
    clock.now += SCALARS_SECONDS
    update(journal, 512, {"train/policy_loss": 0.25, "train/entropy": math.inf, "x": 7})
    assert points(directory) == {"train/policy_loss": [(256, 0.5), (512, 0.25)], "x": [(512, 7.0)]}
    journal.close()


def test_updates_within_a_second_share_one_point(directory):
    """CartPole has hundreds of updates per second: losses are averaged, windowed means are not, no episode counts twice."""
    clock = Clock()
    journal = Journal(directory, env_steps=0, clock=clock)
    for number in range(1, 400):
        clock.now += SCALARS_SECONDS / 100
        returns = [10.0, 20.0, 60.0] if number == 2 else [50.0] * (number == 3)
        journal.update(
            number * 10,
            means={"loss": number, "odd": math.nan if number % 2 else 5.0},
            newest={"mean100": number},
            returns=returns,
        )
    journal.evaluation(3999, mode="greedy", mean=500.0)
    journal.evaluation(3999, mode="sampled", mean=450.0)
    journal.close()
    shown = points(directory)
    assert 4 <= len(shown["loss"]) <= 6, "the first, one per second, the rest at the end"
    assert shown["loss"][1] == (shown["mean100"][1][0], pytest.approx((2 + shown["mean100"][1][1]) / 2))
    assert shown["mean100"][-1] == (3990, 399.0)
    assert shown["odd"][0][1] == 5.0
    assert [value for _, value in shown["episode/return"]] == [35.0], "the mean of four episodes, not of two updates"
    assert (shown["evaluation/return_greedy"], shown["evaluation/return_sampled"]) == ([(3999, 500.0)], [(3999, 450.0)])


def tracked(directory, **changes):
    """The run as trackers get it."""
    settings = load_settings(
        preset="cartpole", overrides=[f"{key}={value}" for key, value in changes.items()], environ={}
    ).settings
    return tracked_run(settings, run_id="run-1", folder=directory.path)


def test_tensorboard_has_the_settings_as_text_and_the_result_beside_the_hyperparameters(directory):
    """The run was stopped and resumed with another learning rate, which the text shows; TensorBoard's table keeps the first."""
    results = {"last_evaluation": {"mean": 500.0}, "solved": True, "mean100": None}
    for env_steps, rate in ((100, 0.1), (200, 0.2)):
        run = tracked(directory, **{"algorithm.learning_rate": rate})
        journal = Journal(directory, env_steps=env_steps - 100, run=run)
        update(journal, env_steps, {"x": 1.0})
        journal.summary(results | {"env_steps": env_steps})
        journal.close()
    assert points(directory)["result/evaluation_return"] == [(100, 500.0), (200, 500.0)]
    assert "result/mean100" not in points(directory)
    events = EventMultiplexer()
    events.AddRun(str(directory.tensorboard), name="run")
    events.Reload()
    (text,) = events.Tensors("run", "settings/text_summary")[-1].tensor_proto.string_val
    assert b"| algorithm.learning_rate | 0.2 |" in text
    start = events.SummaryMetadata("run", SESSION_START_INFO_TAG).plugin_data.content
    shown = HParamsPluginData.FromString(start).session_start_info.hparams
    assert (shown["algorithm.learning_rate"].number_value, shown["env.id"].string_value) == (0.1, "CartPole-v1")
    assert "checkpoint.keep" not in shown


def test_the_result_stands_at_the_newest_env_steps_also_behind_an_evaluation_of_an_older_policy(directory):
    journal = Journal(directory, env_steps=0, run=tracked(directory))
    update(journal, 200, {"x": 1.0})
    journal.evaluation(100, mode="greedy", mean=5.0)
    journal.summary({"mean100": 3.0})
    journal.close()
    assert points(directory)["result/mean100"] == [(200, 3.0)]


def test_the_hyperparameters_are_the_settings_that_decide_what_is_learned(directory):
    found = tracked(directory, **{"learner.credits": 2}).hyperparameters
    assert {"env.id", "run.seed", "learner.ranks", "learner.max_policy_lag", "learner.snapshot_precision"} < {*found}
    assert {"actor.count", "actor.precision", "target.env_steps", "algorithm.gamma"} < {*found}
    assert found["learner.credits"] == 2
    assert not {"target.mean100", "learner.bind", "run.id"} & {*found}
    assert "learner.credits" not in tracked(directory, **{"run.mode": "lockstep"}).hyperparameters, "without effect there"


def test_without_tensorboard_there_are_no_events(directory):
    journal = Journal(directory, env_steps=0, run=tracked(directory), tensorboard=False)
    update(journal, 100, {"x": 1.0})
    journal.curve(wall_seconds=1.0, env_steps=100, mean=1.0)
    journal.summary({})
    journal.close()
    assert not directory.tensorboard.exists()
    assert len(rows(directory)) == 2


def test_a_tracker_that_hangs_is_waited_for_once(directory):
    deadlines = []
    tracker = SimpleNamespace(close=deadlines.append)
    journal = Journal(directory, env_steps=0, tensorboard=False, trackers=[tracker])
    journal.close()
    journal.close()
    assert len(deadlines) == 1


def test_the_curve_goes_on_after_a_resume_under_one_heading(directory):
    """The learner was killed and came back: one table, and what was written before the checkpoint is there."""
    first = Journal(directory, env_steps=0)
    first.curve(wall_seconds=1.04, env_steps=100, mean=math.nan)
    assert rows(directory)[1:] == [["1.0", "100", "", ""]]  # flushed at once: a kill loses no row
    second = Journal(directory, env_steps=100)
    second.curve(wall_seconds=2.0, env_steps=200, mean=1.23456789, evaluation=3.0)
    second.close()
    first.close()
    assert rows(directory) == [list(CURVE), ["1.0", "100", "", ""], ["2.0", "200", "1.234568", "3.0"]]


def written_then_killed(directory, *env_steps):
    """A life of the run that left a point at each of `env_steps`, and no word of farewell."""
    journal = Journal(directory, env_steps=0)
    for steps in env_steps:
        journal.curve(wall_seconds=steps / 100, env_steps=steps, mean=1.0)
        journal.evaluation(steps, mode="greedy", mean=steps)
    journal.close()


def test_what_came_after_the_checkpoint_is_taken_back(directory):
    """The learner was killed at 300 env steps and resumed at 200: no curve goes back in time, no step is drawn twice."""
    written_then_killed(directory, 100, 200, 300)
    resumed = Journal(directory, env_steps=200)
    assert [row[1] for row in rows(directory)] == ["env_steps", "100", "200"]
    resumed.curve(wall_seconds=2.5, env_steps=250, mean=2.0)
    resumed.evaluation(250, mode="greedy", mean=250)
    resumed.close()
    assert [row[1] for row in rows(directory)] == ["env_steps", "100", "200", "250"]
    assert [step for step, _ in points(directory)["evaluation/return_greedy"]] == [100, 200, 250]


@pytest.mark.parametrize("end", [b"1.5,15", b"\xff\xfe\x81", b"1.5,150,\xff,\r\n"])
def test_a_row_that_was_cut_short_is_taken_back_too(directory, end):
    """The disk was full in the middle of a row, or lost its power: what is written next must not be glued to it."""
    written_then_killed(directory, 100)
    with directory.learning_curve_csv.open("ab") as file:
        file.write(end)
    resumed = Journal(directory, env_steps=200)
    resumed.curve(wall_seconds=2.5, env_steps=250, mean=2.0)
    resumed.close()
    assert rows(directory)[1:] == [["1.0", "100", "1.0", ""], ["2.5", "250", "2.0", ""]]


def test_a_curve_that_cannot_be_replaced_stays_whole(directory, monkeypatch, logged):
    """No room for the copy: one warning, the old rows are all there, and the run goes on."""
    written_then_killed(directory, 100, 200)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("services.learner.journal.write_atomically", full)
    Journal(directory, env_steps=100).close()
    assert logged() == [("results_lost", "ENOSPC")]
    assert [row[1] for row in rows(directory)] == ["env_steps", "100", "200"]


def test_the_summary_is_replaced_whole(directory):
    """A summary that cannot be written leaves the one before untouched, and no half file beside it."""
    journal = Journal(directory, env_steps=0)
    journal.summary({"solved": False, "mean100": None})
    with pytest.raises(ValueError, match="JSON"):
        journal.summary({"mean100": math.nan})
    journal.summary({"solved": True})
    journal.close()
    assert json.loads(directory.summary.read_text()) == {"solved": True}
    assert [path.name for path in directory.path.glob("summary*")] == ["summary.json"]


def written(directory):
    """The env steps of the curve's rows, and of the points of one tag."""
    return [row[1] for row in rows(directory)[1:]], [step for step, _ in points(directory)["evaluation/return_greedy"]]


def test_a_full_disk_costs_records_and_one_word_not_the_run(directory, no_room, logged):
    """The volume of a week-long run fills up: the learner logs that once, trains on, and writes again when there is room."""
    clock = Clock()
    journal = Journal(directory, env_steps=0, clock=clock)
    for env_steps in range(1, 7):
        with ExitStack() as stack:
            if env_steps in (2, 3, 4):
                stack.enter_context(no_room())
            journal.curve(wall_seconds=1.0, env_steps=env_steps, mean=1.0)
            journal.evaluation(env_steps, mode="greedy", mean=1.0)
            journal.summary({"env_steps": env_steps})
        clock.now += RETRY_SECONDS / 2
    journal.close()
    assert logged() == [("results_lost", "EFBIG"), ("results_resumed", None)]
    assert written(directory) == (["1", "6"], [1, 6])
    assert journal.lost == ["8 rows and points of learning_curve.csv and TensorBoard were not written"]
    assert json.loads(directory.summary.read_text()) == {"env_steps": 6}


def test_a_folder_that_was_deleted_is_a_loss_and_the_results_go_on_where_it_is_there_again(directory, logged):
    clock = Clock()
    journal = Journal(directory, env_steps=0, clock=clock)
    journal.curve(wall_seconds=1.0, env_steps=1, mean=1.0)
    shutil.rmtree(directory.path)
    journal.curve(wall_seconds=2.0, env_steps=2, mean=1.0)
    directory.path.mkdir()
    clock.now += RETRY_SECONDS
    journal.curve(wall_seconds=3.0, env_steps=3, mean=1.0)
    journal.close()
    assert logged() == [("results_lost", "ENOENT"), ("results_resumed", None)]
    assert [row[1] for row in rows(directory)] == ["env_steps", "3"]
    assert journal.lost == ["1 rows and points of learning_curve.csv and TensorBoard were not written"]


@pytest.mark.parametrize("before", [(), (100, 200, 255)])
def test_a_learner_that_starts_on_a_full_disk_writes_when_there_is_room(directory, no_room, before, logged):
    """It ended the learner, and did so again at each restart: the event file was opened outside of what may fail."""
    if before:
        journal = Journal(directory, env_steps=0)
        for env_steps in before:
            journal.curve(wall_seconds=1.0, env_steps=env_steps, mean=1.0)
            journal.evaluation(env_steps, mode="greedy", mean=1.0)
        journal.close()
    clock = Clock()
    with no_room():
        journal = Journal(directory, env_steps=200, clock=clock)
        journal.curve(wall_seconds=1.0, env_steps=250, mean=1.0)
        clock.now += RETRY_SECONDS
        journal.curve(wall_seconds=1.0, env_steps=260, mean=1.0)
    clock.now += RETRY_SECONDS
    journal.curve(wall_seconds=1.0, env_steps=270, mean=1.0)
    journal.evaluation(270, mode="greedy", mean=1.0)
    journal.close()
    assert logged() == [("results_lost", "EFBIG"), ("results_resumed", None)]
    kept = [*before[:2], 270]  # 255 is of a life that left no checkpoint of it
    assert written(directory) == ([*map(str, kept)], kept)
    assert len(list(directory.tensorboard.iterdir())) == (2 if before else 1), "no empty file is left for each attempt"


def test_a_folder_that_cannot_be_made_is_a_loss_too(directory, logged):
    """A file of another owner is in the way."""
    directory.tensorboard.touch()
    clock = Clock()
    journal = Journal(directory, env_steps=0, clock=clock)
    directory.tensorboard.unlink()
    clock.now += RETRY_SECONDS
    journal.evaluation(1, mode="greedy", mean=1.0)
    journal.close()
    assert logged() == [("results_lost", "EEXIST"), ("results_resumed", None)]
    assert journal.lost == []
    assert written(directory)[1] == [1]
