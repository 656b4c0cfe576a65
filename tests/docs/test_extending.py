"""The files of docs/extending.md are written to a folder, and its commands are run there."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from common.envs.spec import ActionSpec, EnvSpec
from common.models.spec import ModelSettings
from common.replay.buffer import Transitions
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
    assert sorted(name for name, _ in files) == [
        "doors-replay.yaml",
        "doors.yaml",
        "doors/env.py",
        "doors/munchausen.py",
        "doors/net.py",
        "doors/reinforce.py",
    ]
    return tmp_path


@pytest.fixture
def imported(package, monkeypatch):
    """The same folder as the current directory, from which this process imports."""
    monkeypatch.chdir(package)
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.setattr(env_trial, "SLOW_SECONDS", env_trial.BUILD_SECONDS)  # however long the trial takes on this machine
    yield
    for module in [name for name in sys.modules if name.partition(".")[0] == "doors"]:
        del sys.modules[module]


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
    assert [words[0] for words in commands] == ["config", "train", "train"]
    for words in commands:
        done = rookery(words, package)
        assert done.returncode == 0, done.stdout + done.stderr
    for run in ("doors", "doors-replay"):
        summary = json.loads((package / "runs" / run / "summary.json").read_text())
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
        ("algorithm.n_step=2", "algorithm.n_step: found 2, wanted 1: only the first action of a window would have a bonus"),
        ("algorithm.bonus=1", "algorithm.bonus: found 1 (command line), wanted number >= 0.0 and < 1.0"),
    ],
)
def test_a_slip_is_one_line_and_leaves_nothing_behind(imported, override, line, capsys):
    settings = "doors-replay.yaml" if "n_step" in override or "bonus" in override else "doors.yaml"
    alone = ("actor.count=0", "evaluator.enabled=false")  # some slips are found by the learner
    assert main(["train", settings, override, *alone, "--run-dir", "run"]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"rookery train: error: {line}")
    assert errors.count("\n") == 1
    assert not Path("run").exists()


def test_the_second_algorithm_of_the_page_is_that_of_its_paper(imported):
    """Equation 1 of arXiv:2007.14430, transition by transition, by Q values of a network that has moved since its target."""
    from doors.munchausen import Munchausen, MunchausenSettings

    settings = MunchausenSettings(name="doors.munchausen:MUNCHAUSEN", temperature=0.7, replay_capacity=160, warmup=0)
    env = EnvSpec(
        observation_shape=(2,),
        observation_dtype="float32",
        action=ActionSpec(choices=(3,), shape=()),
        frame_stack=1,
        frame_skip=1,
    )
    learner = Munchausen(settings=settings, model=ModelSettings(hidden=(4,)), env=env, seed=0)
    with torch.no_grad():
        learner.model.head.weight.mul_(300.0)
        learner._target.head.weight.mul_(100.0)
    rng = np.random.default_rng(0)
    observation, following = rng.normal(size=(2, 5, 2)).astype(np.float32)
    rows = Transitions(
        observation=observation,
        action=np.array([0, 1, 2, 1, 0]),
        reward=rng.normal(size=5).astype(np.float32),
        env_steps=np.ones(5, np.int64),
        discount=np.array([0.9, 0.9, 0.0, 0.9, 0.9], np.float32),
        next_observation=following,
    )
    with torch.no_grad():
        values, old, later = (
            net(torch.from_numpy(seen)).double().numpy()
            for net, seen in ((learner.model, observation), (learner._target, observation), (learner._target, following))
        )
    losses, cut = [], 0
    for i, action in enumerate(rows.action):
        policy, next_policy = (np.exp(q / 0.7) / np.exp(q / 0.7).sum() for q in (old[i], later[i]))
        bonus = 0.7 * np.log(policy[action])
        cut += bonus < -1.0
        soft = sum(next_policy[a] * (later[i][a] - 0.7 * np.log(next_policy[a])) for a in range(3))
        error = abs(rows.reward[i] + 0.9 * max(bonus, -1.0) + rows.discount[i] * soft - values[i][action])
        losses.append(0.5 * error**2 if error < 1.0 else error - 0.5)
    assert 0 < cut < 5
    assert learner._gradient_step(rows)["loss"].item() == pytest.approx(np.mean(losses), rel=1e-6)
