"""`rookery keys` as a user meets it: what is made, what is said, and that no secret is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.transport.curve import ServerKeys, WorkerKeys
from services import worker
from services.cli.app import main
from services.learner import startup as learner

pytestmark = pytest.mark.service


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """An empty folder."""
    monkeypatch.chdir(tmp_path)


def test_one_word_makes_keys_that_fit_and_says_where_they_go(capsys):
    """The commands that it prints can be copied, and find their keys; the secrets are in the files alone."""
    assert main(["keys", "here"]) == 0
    said = capsys.readouterr().out
    for path in [path for path in Path("here").rglob("*") if path.is_file()]:
        assert str(path) in said
    (command,) = re.findall(r"rookery learner (.*)", said)
    keys = ServerKeys.of(learner.parse(command.split(), {}).settings.learner.keys)
    (command,) = re.findall(r"rookery actor (.*)", said)
    own = WorkerKeys.of(worker.parse("actor", command.replace("HOST", "10.0.0.7").split(), {}).settings.actor.keys)
    assert own.public in keys.allowed.values()
    assert own.server == keys.public
    assert own.secret.decode() not in said
    assert keys.secret.decode() not in said


def test_each_name_gets_a_folder_once(capsys):
    """A name twice is a slip of the fingers."""
    assert main(["keys", "here", "lab", "cluster", "lab"]) == 0
    assert sorted(path.name for path in Path("here").iterdir()) == ["cluster", "lab", "learner"]
    assert capsys.readouterr().out.count("rookery actor --keys here/lab") == 1


def test_what_is_there_is_kept(capsys):
    """Typed again a year later."""
    assert main(["keys", "here"]) == 0
    before = {path: path.read_bytes() for path in Path("here").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main(["keys", "here"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("rookery keys: error: keys are never overwritten: found here/worker")
    assert {path: path.read_bytes() for path in before} == before
