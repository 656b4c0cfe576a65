"""What a run leaves on disk for people: read back with the tools they will use."""

from __future__ import annotations

import csv
import errno
import json
import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.runtime.run_directory import create
from services.learner.journal import CURVE, Journal

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


def test_a_full_disk_costs_records_and_one_word_not_the_run(directory):
    """The volume of a week-long run fills up: the learner says so once and trains on."""
    losses = []
    journal = Journal(directory, env_steps=0, on_loss=losses.append)
    journal._file.close()
    journal._file = open("/dev/full", "w")  # noqa: SIM115, PTH123 - every flush fails as on a full disk
    journal._rows = csv.writer(journal._file)
    for env_steps in (1, 2, 3):
        journal.curve(wall_seconds=1.0, env_steps=env_steps, mean=1.0)
    journal.close()
    assert [error.errno for error in losses] == [errno.ENOSPC]
