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
    journal = Journal(directory, on_loss=pytest.fail)
    journal.scalars(256, {"train/policy_loss": 0.5, "train/entropy": math.nan})
    journal.scalars(512, {"train/policy_loss": 0.25, "train/entropy": math.inf, "episode/return": 7})
    journal.close()
    events = EventAccumulator(str(directory.tensorboard))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["episode/return", "train/policy_loss"]
    assert [(event.step, event.value) for event in events.Scalars("train/policy_loss")] == [(256, 0.5), (512, 0.25)]


def test_the_curve_goes_on_after_a_resume_under_one_heading(directory):
    """The learner was killed and came back: one table, and what was written before the kill is there."""
    first = Journal(directory, on_loss=pytest.fail)
    first.curve(wall_seconds=1.04, env_steps=100, mean=math.nan)
    assert rows(directory)[1:] == [["1.0", "100", "", ""]]  # flushed at once: a kill loses no row
    second = Journal(directory, on_loss=pytest.fail)
    second.curve(wall_seconds=2.0, env_steps=200, mean=1.23456, evaluation=3.0)
    second.close()
    first.close()
    assert rows(directory) == [list(CURVE), ["1.0", "100", "", ""], ["2.0", "200", "1.235", "3.0"]]


def test_the_summary_is_replaced_whole(directory):
    """A summary that cannot be written leaves the one before untouched, and no half file beside it."""
    journal = Journal(directory, on_loss=pytest.fail)
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
    journal = Journal(directory, on_loss=losses.append)
    journal._file.close()
    journal._file = open("/dev/full", "w")  # noqa: SIM115, PTH123 - every flush fails as on a full disk
    journal._rows = csv.writer(journal._file)
    for env_steps in (1, 2, 3):
        journal.curve(wall_seconds=1.0, env_steps=env_steps, mean=1.0)
    journal.close()
    assert [error.errno for error in losses] == [errno.ENOSPC]
