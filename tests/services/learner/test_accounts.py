"""Tests of the accounts on disk: written between checkpoints, read by the learner that resumes."""

from __future__ import annotations

import json

import pytest

from common.errors import ResourceError
from common.runtime.disk import Disk
from services.learner.accounts import SPACING, AccountsFile, read

pytestmark = pytest.mark.service

STATE = {
    "ledger": {"produced": 9, "trained": 4, "dropped": {}},
    "roster": {"peers": [], "generations": [], "forgotten": -1},
}


class Clock:
    """Time that passes only while a state is taken."""

    def __init__(self):
        """At zero."""
        self.now, self.cost, self.asked = 0.0, 0.0, 0

    def state(self):
        """Return the accounts that the session would give."""
        self.asked += 1
        self.now += self.cost
        return STATE


@pytest.fixture
def clock():
    """One of its own for each test."""
    return Clock()


def make(path, clock, **changes):
    """A writer."""
    given = {"run_id": "run-1", "state": clock.state, "clock": lambda: clock.now, "on_loss": pytest.fail}
    return AccountsFile(path, **(given | changes))


def test_what_was_written_is_read(tmp_path, clock):
    """The file is read where the checkpoint is older; a newer checkpoint replaces it."""
    path = tmp_path / "accounts.json"
    make(path, clock).update()
    assert read(path, run_id="run-1", produced=9) == STATE
    assert read(path, run_id="run-1", produced=10) is None
    assert [file.name for file in tmp_path.iterdir()] == ["accounts.json"]


def test_it_is_written_now_and_then_and_seldom_where_that_takes_long(tmp_path, clock):
    """A slow disk must not cost the train loop more than a hundredth of its time."""
    file = make(tmp_path / "accounts.json", clock)
    for clock.now in (0.0, SPACING / 2, SPACING):
        file.update()
    assert clock.asked == 2
    clock.cost, clock.now = 0.1, 2 * SPACING
    file.update()
    for clock.now in (1.0, 5.0, 10.0):
        file.update()
    assert clock.asked == 3
    clock.now = 11.0
    file.update()
    assert clock.asked == 4


def test_a_checkpoint_takes_it_away(tmp_path, clock):
    """Also one that is not there."""
    file = make(tmp_path / "accounts.json", clock)
    file.update()
    file.remove()
    file.remove()
    assert read(tmp_path / "accounts.json", run_id="run-1", produced=0) is None


def test_a_failing_disk_costs_one_warning(tmp_path, clock):
    """A full disk costs the accounts, not the run."""

    def full(*_):
        raise OSError(28, "No space left on device")

    lost = []
    file = make(tmp_path / "accounts.json", clock, on_loss=lost.append, disk=Disk(write=full))
    for clock.now in (0.0, 1.0, 2.0):
        file.update()
    assert [error.strerror for error in lost] == ["No space left on device"]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "7", '{"run_id": "run-1"}', json.dumps({"run_id": "run-1", "session": {}}),
                json.dumps({"run_id": "run-0", "session": STATE})],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_said_to(tmp_path, content):
    """Cut short, of another form, of another run."""
    path = tmp_path / "accounts.json"
    path.write_text(content)
    with pytest.raises(ResourceError, match="accounts"):
        read(path, run_id="run-1", produced=0)
