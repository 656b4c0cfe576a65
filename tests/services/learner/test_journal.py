"""What a run leaves on disk for people: read back with the tools they will use."""

from __future__ import annotations

import csv
import errno
import json
import math
from contextlib import ExitStack

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.runtime.run_directory import create
from services.learner.journal import CURVE, RETRY_SECONDS, Journal

pytestmark = pytest.mark.service


@pytest.fixture
def directory(tmp_path):
    """A run directory that was just begun."""
    return create(tmp_path / "run", config="run: {}\n", command=["rookery"])


def rows(directory):
    """The learning curve as a spreadsheet reads it."""
    with directory.learning_curve_csv.open(newline="") as file:
        return list(csv.reader(file))


def test_scalars_are_what_tensorboard_shows(directory):
    """Names with slashes group the charts, the x axis is env steps; a loss that is not finite leaves a hole."""
    journal = Journal(directory, env_steps=0, on_loss=pytest.fail)
    journal.scalars(256, {"train/policy_loss": 0.5, "train/entropy": math.nan})
    journal.scalars(512, {"train/policy_loss": 0.25, "train/entropy": math.inf, "episode/return": 7})
    journal.close()
    events = EventAccumulator(str(directory.tensorboard))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["episode/return", "train/policy_loss"]
    assert [(event.step, event.value) for event in events.Scalars("train/policy_loss")] == [(256, 0.5), (512, 0.25)]


def test_the_curve_goes_on_after_a_resume_under_one_heading(directory):
    """The learner was killed and came back: one table, and what was written before the checkpoint is there."""
    first = Journal(directory, env_steps=0, on_loss=pytest.fail)
    first.curve(wall_seconds=1.04, env_steps=100, mean=math.nan)
    assert rows(directory)[1:] == [["1.0", "100", "", ""]]  # flushed at once: a kill loses no row
    second = Journal(directory, env_steps=100, on_loss=pytest.fail)
    second.curve(wall_seconds=2.0, env_steps=200, mean=1.23456, evaluation=3.0)
    second.close()
    first.close()
    assert rows(directory) == [list(CURVE), ["1.0", "100", "", ""], ["2.0", "200", "1.235", "3.0"]]


def written_then_killed(directory, *env_steps):
    """A life of the run that left a point at each of `env_steps`, and no word of farewell."""
    journal = Journal(directory, env_steps=0, on_loss=pytest.fail)
    for steps in env_steps:
        journal.curve(wall_seconds=steps / 100, env_steps=steps, mean=1.0)
        journal.scalars(steps, {"episode/return": steps})
    journal.close()


def test_what_came_after_the_checkpoint_is_taken_back(directory):
    """The learner was killed at 300 env steps and resumed at 200: no curve goes back in time, no step is drawn twice."""
    written_then_killed(directory, 100, 200, 300)
    resumed = Journal(directory, env_steps=200, on_loss=pytest.fail)
    assert [row[1] for row in rows(directory)] == ["env_steps", "100", "200"]
    resumed.curve(wall_seconds=2.5, env_steps=250, mean=2.0)
    resumed.scalars(250, {"episode/return": 250})
    resumed.close()
    assert [row[1] for row in rows(directory)] == ["env_steps", "100", "200", "250"]
    events = EventAccumulator(str(directory.tensorboard))
    events.Reload()
    assert [event.step for event in events.Scalars("episode/return")] == [100, 200, 250]


def test_a_row_that_was_cut_short_is_taken_back_too(directory):
    """The disk was full in the middle of a row: what is written next must not be glued to it."""
    written_then_killed(directory, 100)
    with directory.learning_curve_csv.open("a") as file:
        file.write("1.5,15")
    resumed = Journal(directory, env_steps=200, on_loss=pytest.fail)
    resumed.curve(wall_seconds=2.5, env_steps=250, mean=2.0)
    resumed.close()
    assert rows(directory)[1:] == [["1.0", "100", "1.0", ""], ["2.5", "250", "2.0", ""]]


def test_a_curve_that_cannot_be_replaced_stays_whole(directory, monkeypatch):
    """No room for the copy: the learner says so, the old rows are all there, and the run goes on."""
    written_then_killed(directory, 100, 200)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("services.learner.journal.write_atomically", full)
    losses = []
    Journal(directory, env_steps=100, on_loss=losses.append).close()
    assert [error.errno for error in losses] == [errno.ENOSPC]
    assert [row[1] for row in rows(directory)] == ["env_steps", "100", "200"]


def test_the_summary_is_replaced_whole(directory):
    """A summary that cannot be written leaves the one before untouched, and no half file beside it."""
    journal = Journal(directory, env_steps=0, on_loss=pytest.fail)
    journal.summary({"solved": False, "mean100": None})
    with pytest.raises(ValueError, match="JSON"):
        journal.summary({"mean100": math.nan})
    journal.summary({"solved": True})
    journal.close()
    assert json.loads(directory.summary.read_text()) == {"solved": True}
    assert [path.name for path in directory.path.glob("summary*")] == ["summary.json"]


def written(directory):
    """The env steps of the curve's rows, and of the points of one tag."""
    events = EventAccumulator(str(directory.tensorboard))
    events.Reload()
    return [row[1] for row in rows(directory)[1:]], [event.step for event in events.Scalars("x")]


class Losses:
    """The losses and recoveries that a journal reports."""

    def __init__(self):
        self.now, self.said = 0.0, []

    def journal(self, directory, env_steps=0):
        """A journal on this clock."""
        return Journal(
            directory,
            env_steps=env_steps,
            on_loss=lambda error: self.said.append(errno.errorcode[error.errno]),
            on_recovery=lambda: self.said.append("resumed"),
            clock=lambda: self.now,
        )


def test_a_full_disk_costs_records_and_one_word_not_the_run(directory, no_room):
    """The volume of a week-long run fills up: the learner logs that once, trains on, and writes again when there is room."""
    losses = Losses()
    journal = losses.journal(directory)
    for env_steps in range(1, 7):
        with ExitStack() as stack:
            if env_steps in (2, 3, 4):
                stack.enter_context(no_room())
            journal.curve(wall_seconds=1.0, env_steps=env_steps, mean=1.0)
            journal.scalars(env_steps, {"x": 1.0})
            journal.summary({"env_steps": env_steps})
        losses.now += RETRY_SECONDS / 2
    journal.close()
    assert losses.said == ["EFBIG", "resumed"]
    assert written(directory) == (["1", "6"], [1, 6])
    assert json.loads(directory.summary.read_text()) == {"env_steps": 6}


@pytest.mark.parametrize("before", [(), (100, 200, 255)])
def test_a_learner_that_starts_on_a_full_disk_writes_when_there_is_room(directory, no_room, before):
    """It ended the learner, and did so again at each restart: the event file was opened outside of what may fail."""
    if before:
        journal = Journal(directory, env_steps=0, on_loss=pytest.fail)
        for env_steps in before:
            journal.curve(wall_seconds=1.0, env_steps=env_steps, mean=1.0)
            journal.scalars(env_steps, {"x": 1.0})
        journal.close()
    losses = Losses()
    with no_room():
        journal = losses.journal(directory, env_steps=200)
        journal.curve(wall_seconds=1.0, env_steps=250, mean=1.0)
        losses.now += RETRY_SECONDS
        journal.curve(wall_seconds=1.0, env_steps=260, mean=1.0)
    losses.now += RETRY_SECONDS
    journal.curve(wall_seconds=1.0, env_steps=270, mean=1.0)
    journal.scalars(270, {"x": 1.0})
    journal.close()
    assert losses.said == ["EFBIG", "resumed"]
    kept = [*before[:2], 270]  # 255 is of a life that left no checkpoint of it
    assert written(directory) == ([*map(str, kept)], kept)
    assert len(list(directory.tensorboard.iterdir())) == (2 if before else 1), "no empty file is left for each attempt"


def test_a_folder_that_cannot_be_made_is_a_loss_too(directory):
    """A file of another owner is in the way."""
    directory.tensorboard.touch()
    losses = Losses()
    journal = losses.journal(directory)
    directory.tensorboard.unlink()
    losses.now += RETRY_SECONDS
    journal.scalars(1, {"x": 1.0})
    journal.close()
    assert losses.said == ["EEXIST", "resumed"]
    assert written(directory)[1] == [1]
