"""Tests of the accounts on disk: written before credits are sent, read by the learner that resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.errors import ResourceError
from common.protocol.messages import PROTOCOL_VERSION
from common.runtime.disk import Disk
from services.learner.accounts import MOST_BYTES, RETRY_SECONDS, SLOW_SECONDS, AccountsFile, read

pytestmark = pytest.mark.service


def account(name="actor-0", incarnation=1, produced=0, *, index=0, generation=0, gone=False):
    """Return the account of a worker."""
    place = {"role": "actor", "index": index, "generation": generation}
    sums = {"produced": produced, "received": produced, "lost": 0, "dropped_by_worker": {}}
    return {"name": name, "incarnation": incarnation, **place, "closed": gone, "expected": produced, "ahead": [], "account": sums}


def changes(*accounts, forgotten=-1, named=-1):
    """Return the accounts of some workers."""
    return {"workers": [*accounts], "forgotten": forgotten, "named": named}


def state(*accounts):
    """Return the accounts of all workers."""
    registry = changes(*accounts) | {"generations": [["actor", 0, 1]]}
    return {"protocol": PROTOCOL_VERSION, "ledger": {"produced": 9, "trained": 4, "dropped": {}}, "registry": registry}


@pytest.fixture
def path(tmp_path):
    """Return where the file is."""
    return tmp_path / "accounts.jsonl"


@pytest.fixture
def make(path):
    """Return a function that makes a writer; it is closed at the end."""
    made = []

    def build(**given):
        made.append(AccountsFile(path, **({"run_id": "run-1", "clock": lambda: 0.0} | given)))
        return made[-1]

    yield build
    for file in made:
        file.close()


@pytest.fixture
def losses(caplog):
    """Return a function that returns the losses that were logged: event and error."""
    return lambda: [(record.message, record.exc_info[1]) for record in caplog.records]


def workers(path):
    """Return the worker, what it produced, and whether its account is closed, for each account in the file."""
    found = read(path, run_id="run-1", produced=0)["registry"]["workers"]
    return [(worker["name"], worker["incarnation"], worker["account"]["produced"], worker["closed"]) for worker in found]


def test_the_newest_account_of_each_worker_is_read_without_the_file_being_closed(path, make):
    """A killed process closes nothing."""
    file = make()
    file.restart(state(account(produced=5)))
    file.append(changes(account(produced=7), account("actor-1", 4, 3, index=1), named=8))
    file.append(changes(account(produced=9), forgotten=2))
    assert workers(path) == [("actor-0", 1, 9, False), ("actor-1", 4, 3, False)]
    registry = read(path, run_id="run-1", produced=0)["registry"]
    assert (registry["named"], registry["forgotten"]) == (8, 2)
    assert sorted(registry["generations"]) == [["actor", 0, 1], ["actor", 1, 1]]


def test_a_new_incarnation_closes_the_older_one_of_its_name_and_the_one_at_its_index(path, make):
    """Two open accounts never share a name or an index."""
    file = make()
    file.restart(state(account(produced=5), account("actor-1", 1, 6, index=1)))
    file.append(changes(account(incarnation=2, produced=1, generation=1)))
    file.append(changes(account("actor-2", 1, 2, index=1, generation=3)))
    assert workers(path) == [
        ("actor-0", 1, 5, True),
        ("actor-1", 1, 6, True),
        ("actor-0", 2, 1, False),
        ("actor-2", 1, 2, False),
    ]
    assert sorted(read(path, run_id="run-1", produced=0)["registry"]["generations"]) == [["actor", 0, 2], ["actor", 1, 4]]


def test_a_closed_incarnation_that_the_first_line_lacks_does_not_close_the_one_that_replaced_it(path, make):
    """Its messages were still in the queue when the file began anew."""
    file = make()
    registry = changes(account(incarnation=2, produced=5, generation=1), account("actor-1", 1, 6, index=1, generation=3))
    file.restart(state() | {"registry": registry | {"generations": [["actor", 0, 2], ["actor", 1, 4]]}})
    for produced in (7, 8):
        file.append(changes(account(produced=produced, gone=True)))
    file.append(changes(account("actor-9", 1, 2, index=1, generation=2, gone=True)))
    assert workers(path) == [
        ("actor-9", 1, 2, True),
        ("actor-0", 1, 8, True),
        ("actor-0", 2, 5, False),
        ("actor-1", 1, 6, False),
    ]
    found = read(path, run_id="run-1", produced=0)
    assert sorted(found["registry"]["generations"]) == [["actor", 0, 2], ["actor", 1, 4]]
    assert found["ledger"]["produced"] == 9 + (8 - 7)


def test_the_ledger_that_is_read_has_the_env_steps_of_all_lines(path, make):
    """Of workers that the first line has, and of new ones."""
    file = make()
    file.restart(state(account(produced=5)))
    file.append(changes(account(produced=7), account("actor-1", 4, 3, index=1)))
    file.append(changes(account(incarnation=2, produced=1, generation=1)))
    assert read(path, run_id="run-1", produced=0)["ledger"]["produced"] == 9 + 2 + 3 + 1
    assert read(path, run_id="run-1", produced=10) is None


def test_a_line_that_a_kill_cut_short_is_left_out(path, make):
    """The lines before it are read."""
    file = make()
    file.restart(state(account(produced=5)))
    file.append(changes(account(produced=7)))
    file.append(changes(account(produced=9)))
    path.write_bytes(path.read_bytes()[:-3])
    assert workers(path) == [("actor-0", 1, 7, False)]


def test_a_newer_checkpoint_replaces_the_file(path, make):
    """It holds newer accounts."""
    make().restart(state())
    assert read(path, run_id="run-1", produced=9) is not None
    assert read(path, run_id="run-1", produced=10) is None


def test_the_file_starts_again_after_some_megabytes(path, make):
    """Its size is bounded however long there is no checkpoint."""
    file = make()
    assert file.due
    file.restart(state())
    lines = 0
    while not file.due:
        file.append(changes(account(produced=lines)))
        lines += 1
    assert MOST_BYTES <= path.stat().st_size < MOST_BYTES + 1000
    file.restart(state(account(produced=lines)))
    assert not file.due
    assert path.stat().st_size < 1000


def test_a_failing_disk_costs_one_warning_and_is_tried_again(path, make, losses):
    """A full disk costs the accounts, not the run."""
    disk, now = [True], [0.0]

    def write(path: Path, data):
        if disk[0]:
            raise OSError(28, "No space left on device")
        path.write_bytes(data)

    file = make(disk=Disk(write=write), clock=lambda: now[0])
    for _ in range(3):
        file.restart(state())
        file.append(changes(account()))
    assert [(event, error.strerror) for event, error in losses()] == [("accounts_lost", "No space left on device")]
    assert not file.due
    disk[0], now[0] = False, RETRY_SECONDS
    assert file.due
    file.restart(state(account(produced=5)))
    assert workers(path) == [("actor-0", 1, 5, False)]


def test_a_disk_that_fills_while_lines_are_added(make, losses):
    """The file starts again later, with everything in it."""
    now = [0.0]
    disk = Disk(rename=lambda _, target: target.symlink_to("/dev/full"))
    file = make(clock=lambda: now[0], disk=disk)
    file.restart(state())
    file.append(changes(account()))
    file.append(changes(account()))
    assert [error.strerror for _, error in losses()] == ["No space left on device"]
    now[0] = RETRY_SECONDS
    assert file.due


def test_a_slow_disk_is_left_alone_for_a_while(path, make, losses):
    """The intake thread writes, and the workers wait for it."""
    moments = [0.0]

    def clock():
        return moments.pop(0) if len(moments) > 1 else moments[0]

    file = make(clock=clock)
    file.restart(state())
    moments[:] = [1.0, 1.0 + 2 * SLOW_SECONDS]
    file.append(changes(account(produced=5)))
    assert [type(error) for _, error in losses()] == [TimeoutError]
    file.append(changes(account(produced=7)))
    assert workers(path) == [("actor-0", 1, 5, False)]
    assert not file.due
    moments[:] = [1.0 + 2 * SLOW_SECONDS + RETRY_SECONDS]
    assert file.due


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "7", '{"run_id": "run-1"}', json.dumps({"run_id": "run-1", "session": {}}),
                json.dumps({"run_id": "run-0", "session": state()}),
                json.dumps({"run_id": "run-1", "session": state()}) + '\n{"workers": 7}\n',
                json.dumps({"run_id": "run-1", "session": state()}) + "\n7\n\n"],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_refused(path, content):
    """Cut short, of another form, of another run."""
    path.write_text(content)
    with pytest.raises(ResourceError, match="accounts"):
        read(path, run_id="run-1", produced=0)
