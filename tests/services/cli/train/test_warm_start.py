"""`rookery train --init`: which checkpoint it takes, and what it says about the other run."""

import json

import pytest

from common.config.load import load_settings
from common.errors import ConfigError
from services.cli.train.warm_start import describe, describe_resume, find_checkpoint

pytestmark = pytest.mark.service


@pytest.fixture
def other(tmp_path, write_run):
    """A run with two checkpoints."""
    place = write_run(tmp_path / "other", "model.hidden=[32]")
    for version in (9, 10):
        folder = place / "checkpoints" / f"checkpoint-{version:012}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps({"manifest": {"version": version, "env_steps": 1000 * version}}))
    return place


def test_a_run_stands_for_its_newest_checkpoint_and_a_checkpoint_for_itself(other):
    checkpoints = other / "checkpoints"
    assert find_checkpoint(other) == checkpoints / "checkpoint-000000000010"
    assert find_checkpoint(checkpoints / "checkpoint-000000000009").name == "checkpoint-000000000009"


def test_the_sentence_names_the_weights_and_the_settings_that_differ(other):
    settings = load_settings(preset="cartpole", overrides=["env.id=Acrobot-v1", "algorithm.gamma=0.5"], environ={}).settings
    text = describe(find_checkpoint(other), settings)
    assert "version 10, 10,000 env steps" in text
    assert "env.id CartPole-v1, here Acrobot-v1" in text
    assert "model.hidden [32], here [64, 64]" in text
    assert "gamma" not in text


def test_it_says_so_where_nothing_differs(other):
    settings = load_settings(preset="cartpole", overrides=["model.hidden=[32]"], environ={}).settings
    assert "env and model are the same there" in describe(find_checkpoint(other), settings)


def test_settings_that_are_lost_are_not_compared(other):
    (other / "config.yaml").write_text("")
    place = find_checkpoint(other)
    assert describe(place, load_settings(preset="cartpole", environ={}).settings) == f"starts with the weights of {place}"


@pytest.mark.parametrize(("name", "hint"), [("nowhere", "no run in"), ("begun", "no checkpoint in")])
def test_a_path_without_weights_is_refused(tmp_path, write_run, name, hint):
    write_run(tmp_path / "begun")
    with pytest.raises(ConfigError, match=hint):
        find_checkpoint(tmp_path / name)


def test_a_resume_says_where_the_environment_is_another_one(other):
    config = (other / "config.yaml").read_bytes()
    changed = load_settings(
        preset="cartpole", overrides=["env.kwargs={render_mode: null}", "env.num_envs=2"], environ={}
    ).settings
    assert describe_resume(config, changed).startswith("env.kwargs was {}, is {'render_mode': None}: returns and evaluations of")
    assert describe_resume(config, load_settings(preset="cartpole", overrides=["env.num_envs=2"], environ={}).settings) == ""
