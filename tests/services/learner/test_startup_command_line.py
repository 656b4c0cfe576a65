"""The learner's command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config.load import as_yaml, load_settings
from common.errors import ConfigError
from common.runtime.run_directory import create
from common.runtime.store import RunStore
from services.learner.startup import parse

pytestmark = pytest.mark.service


def test_settings_come_from_preset_environment_and_words():
    """The words win over the environment, the environment over the preset."""
    environ = {"ROOKERY_RUN__SEED": "5", "ROOKERY_LEARNER__BATCH": "2"}
    invocation = parse(["--config", "cartpole", "learner.batch=1", "--debug"], environ)
    settings = invocation.settings
    assert (settings.env.id, settings.run.seed, settings.learner.batch) == ("CartPole-v1", 5, 1)
    assert (invocation.debug, invocation.resume, invocation.run_dir) == (True, False, None)


def test_the_run_directory_is_an_option_or_a_setting(tmp_path):
    """A supervisor names it; a config.yaml of a run has it."""
    assert parse([f"run.dir={tmp_path}"], {}).run_dir == tmp_path
    assert parse([f"run.dir={tmp_path}", "--run-dir", "elsewhere", "--resume"], {}).run_dir == Path("elsewhere")


@pytest.mark.parametrize("words", [["--keys", "keys/learner"], ["learner.keys=keys/learner"]])
def test_a_folder_of_keys_is_known_by_its_whole_path(words, tmp_path, monkeypatch):
    """It is written into the run's config.yaml, and the run may be resumed from another folder."""
    monkeypatch.chdir(tmp_path)
    loaded = parse(words, {}).loaded
    assert loaded.settings.learner.keys == f"{tmp_path}/keys/learner"
    assert loaded.provenance["learner.keys"] == "command line"
    assert parse([], {}).settings.learner.keys == ""


def test_settings_may_stand_on_both_sides_of_options():
    """People append what they forgot."""
    settings = parse(
        ["run.seed=3", "--config", "cartpole", "actor.count=0", "--log-format", "json", "learner.batch=1"], {}
    ).settings
    assert (settings.run.seed, settings.actor.count, settings.log.format) == (3, 0, "json")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--config", "cartpol"], "did you mean cartpole"),
        (["learner.bach=1"], "did you mean batch"),
        (["learner.batch=0"], "found 0"),
        (["learner.batch=two"], "'two'"),
        (["learner.bind=127.0.0.1:5700"], "tcp://host:port"),
    ],
)
def test_a_wrong_setting_is_named(words, says):
    """Key, value found, value wanted."""
    with pytest.raises(ConfigError, match=says):
        parse(words, {})


def test_an_unknown_option_is_one_line_and_exit_code_2(capsys):
    """No page of usage that hides the word that was wrong."""
    with pytest.raises(SystemExit) as end:
        parse(["--res"], {})
    assert end.value.code == 2
    assert capsys.readouterr().err == "rookery learner: error: unrecognized arguments: --res; see rookery learner --help\n"


def test_a_run_goes_on_with_its_own_settings(tmp_path):
    """To resume by hand, the folder is enough: its config.yaml holds the settings."""
    (tmp_path / "config.yaml").write_text("run: {id: that-run}\nenv: {num_envs: 3}\nlog: {}\n")
    resumed = parse(["--resume", "--run-dir", str(tmp_path)], {}).settings
    assert (resumed.env.num_envs, resumed.run.id) == (3, "that-run")


def test_a_run_goes_on_only_if_it_is_found(tmp_path):
    """A pod starts with the same words for the first and for the tenth time; its volume makes the difference."""
    words = ["--config", "cartpole", "--resume-if-found", "--run-dir", str(tmp_path)]
    assert not parse(words, {}).resume
    (tmp_path / "config.yaml").write_text("run: {}\nenv: {num_envs: 3}\nlog: {}\n")
    assert parse(words, {}).resume
    assert parse(words, {}).settings.env.num_envs == parse(["--config", "cartpole"], {}).settings.env.num_envs
    assert parse(words[2:], {}).settings.env.num_envs == 3


@pytest.mark.parametrize("option", ["--resume", "--resume-if-found"])
def test_what_goes_on_must_be_named(option):
    """Without a folder nothing would ever be found, and each restart would begin anew."""
    with pytest.raises(ConfigError, match=f"no run to resume: found {option} alone.*--run-dir"):
        parse([option], {})
    assert not parse(["--resume-if-found", "run.dir=nowhere"], {}).resume


def test_there_are_two_ways_to_go_on_and_each_excludes_the_other(tmp_path, capsys):
    """One insists that there is a run, one does not."""
    with pytest.raises(SystemExit) as end:
        parse(["--resume", "--resume-if-found", "--run-dir", str(tmp_path)], {})
    assert end.value.code == 2
    assert "not allowed with argument --resume" in capsys.readouterr().err


def test_a_lost_run_directory_is_downloaded_from_the_store_of_the_run(tmp_path):
    """In a container without a volume each restart begins with an empty folder; the first one finds nothing in the store."""
    store, folder = f"file://{tmp_path}/bucket", tmp_path / "mine"
    words = ["--run-dir", str(folder), "--resume-if-found", f"run.store={store}"]
    assert not parse(words, {}).resume
    config = as_yaml(load_settings(preset="cartpole", overrides=["run.id=cartpole-1", f"run.store={store}"], environ={}).settings)
    directory = create(tmp_path / "elsewhere" / "mine", config=config, command=["rookery"])
    RunStore(f"{store}/mine").upload(directory, keep=1)
    (folder / "rank-1").mkdir(parents=True)  # another rank, on a disk of its own: the copy is of rank 0
    assert not parse(words, {"RANK": "1"}).resume
    (folder / "rank-1").rmdir()
    invocation = parse(words, {})
    assert (invocation.resume, invocation.settings.run.id) == (True, "cartpole-1")
    assert (folder / "command.txt").read_text() == "rookery\n"
