"""Run directories as `rookery train` leaves them, without the training."""

from __future__ import annotations

import json

import pytest

from common.config.load import as_yaml, load_settings
from services.cli import env_trial
from services.cli.app import main

_answers = {}  # of trials


def called(*words):
    """Exit code of `rookery WORDS`, however it ends."""
    try:
        return main([str(word) for word in words])
    except SystemExit as end:
        return end.code


@pytest.fixture(autouse=True)
def _no_environment_is_slow(monkeypatch):
    """However long the trial of one takes on this machine: a user would be told so."""
    monkeypatch.setattr(env_trial, "SLOW_SECONDS", env_trial.BUILD_SECONDS)


@pytest.fixture(autouse=True)
def _environments_tried_once(monkeypatch):
    """Try the environment of a preset in a process once, and not again in each test."""
    answer = env_trial._answer

    def once(env):
        key = env.model_dump_json()
        found = _answers.get(key) or answer(env)
        if not (env.entry_point or "error" in found):  # the module of an entry point is another one in each folder
            _answers[key] = found
        return found

    monkeypatch.setattr(env_trial, "_answer", once)


@pytest.fixture
def write_run():
    """Write the files of a run and return its directory; `curve` has rows of seconds, env steps, return and evaluation."""

    def write(path, *overrides, preset="cartpole", curve=(), command="rookery train cartpole", **summary):
        settings = load_settings(preset=preset, overrides=overrides, environ={}).settings
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.yaml").write_text(as_yaml(settings))
        (path / "command.txt").write_text(command + "\n")
        rows = ["wall_seconds,env_steps,episode_return_mean,evaluation_return"]
        rows += [",".join("" if value is None else str(value) for value in row) for row in curve]
        (path / "learning_curve.csv").write_text("\n".join(rows) + "\n")
        if summary:
            (path / "summary.json").write_text(json.dumps({"target": settings.target.model_dump(mode="json")} | summary))
        return path

    return write
