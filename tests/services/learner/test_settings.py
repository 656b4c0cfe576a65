"""The learner's command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError
from services.learner.settings import parse

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
    """Whoever resumes by hand names the folder, and need not remember what the run was made with."""
    (tmp_path / "config.yaml").write_text("env: {num_envs: 3}\nrun: {id: that-run}\n")
    resumed = parse(["--resume", "--run-dir", str(tmp_path)], {}).settings
    assert (resumed.env.num_envs, resumed.run.id) == (3, "that-run")
