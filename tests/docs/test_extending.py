"""The files of docs/extending.md are written to a folder, and its commands are run there."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli import env_trial
from services.cli.app import main

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
TIME_LIMIT = 380.0  # seconds; reached only where a process hangs


def blocks():
    """The page's fenced blocks."""
    page = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    return re.findall(r"^```\w*\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


@pytest.fixture
def package(tmp_path):
    """A folder with the files of the page."""
    files = [(found[1], block) for block in blocks() if (found := re.match(r"# (\S+/?\S+\.(?:py|yaml))\n", block))]
    for name, text in files:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert sorted(name for name, _ in files) == ["doors.yaml", "doors/env.py", "doors/net.py", "doors/reinforce.py"]
    return tmp_path


def rookery(words, folder):
    """Run the command as it is installed, from `folder`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ROOKERY_")}
    return subprocess.run(
        [Path(sys.executable).with_name("rookery"), *words],
        cwd=folder,
        env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
        check=False,
    )


def test_the_package_of_the_page_learns_what_it_says(package):
    commands = [shlex.split(line)[1:] for block in blocks() for line in block.splitlines() if re.match(r"rookery [a-z]+ ", line)]
    assert [words[0] for words in commands] == ["config", "train"]
    for words in commands:
        done = rookery(words, package)
        assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((package / "runs/doors/summary.json").read_text())
    assert summary["solved"], summary
    config = (package / "runs/doors/config.yaml").read_text()
    assert "  name: doors.reinforce:REINFORCE  # file doors.yaml" in config
    assert "  gamma: 0.95  # command line" in config


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "algorithm.name=doors.reinforce:REINFORC",
            "algorithm.name names no ENTRY of doors.reinforce: found REINFORC, wanted REINFORCE",
        ),
        ("learner.max_policy_lag=9", "learner.max_policy_lag: found 9, wanted at most 2: nothing here corrects"),
        ("algorithm.baselin=true", "algorithm.baselin: unknown key (command line); did you mean baseline?"),
        ("algorithm.baseline=3", "algorithm.baseline: found 3 (command line), wanted true or false"),
        ("model.entry_point=doors.net:Wave", "model.entry_point names no function of doors.net: found Wave, wanted Waves"),
        ("model.kwargs.waves=0", "doors.net:Waves "),
    ],
)
def test_a_slip_is_one_line_and_leaves_nothing_behind(package, override, line, monkeypatch, capsys):
    monkeypatch.chdir(package)
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.setattr(env_trial, "SLOW_SECONDS", env_trial.BUILD_SECONDS)  # however long the trial takes on this machine
    alone = ("actor.count=0", "evaluator.enabled=false")  # the last slip is found by the learner
    try:
        assert main(["train", "doors.yaml", override, *alone, "--run-dir", "run"]) == 2
    finally:
        for module in [name for name in sys.modules if name.partition(".")[0] == "doors"]:
            del sys.modules[module]
    errors = capsys.readouterr().err
    assert errors.startswith(f"rookery train: error: {line}")
    assert errors.count("\n") == 1
    assert not (package / "run").exists()
