"""The command line as a user meets it: exit codes, and one line on stderr where it makes no sense."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from services import worker
from tests.services.cli.conftest import called

pytestmark = pytest.mark.service


@pytest.fixture(autouse=True)
def _clean(tmp_path, monkeypatch):
    """No settings from the tester's own environment, and an empty folder."""
    for name in [name for name in os.environ if name.startswith("ROOKERY_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "hints"),
    [
        (["trian", "pong"], ["'trian'", "did you mean train?"]),
        (["train"], ["no preset named", "pong", "rookery train cartpole"]),
        (["train", "pogn"], ["'pogn'", "did you mean pong?"]),
        (["train", "pong", "env.num_env=4"], ["env.num_env", "did you mean num_envs?"]),
        (["train", "pong", "env.num_envs=0"], ["env.num_envs", "found 0"]),
        (["train", "pong", "--actors", "two"], ["--actors", "'two'", "a number, or auto"]),
        (["train", "pong", "--actor", "2"], ["unknown option --actor", "--help"]),
        (["train", "pong", "seven"], ["'seven'", "section.key=value"]),
        (["train", "pong", "--log-format", "xml"], ["xml", "json"]),
        (["train", "--resume"], ["no run to resume", "--run-dir"]),
        (["train", "pong", "--seeds", "5-1"], ["--seeds", "'5-1'", "1-5 or 1,3,7"]),
        (["train", "pong", "--seeds", "1-2", "--seed", "3"], ["--seed and --seeds", "one of them"]),
        (["train", "pong", "env.num_envs=4,0"], ["env.num_envs", "found 0"]),
        (["train", "pong", "run.seed=1,2"], ["run.seed", "use --seeds 1-5"]),
        (["train", "pong", "--run-dir", "r\udcff"], ["argument is no UTF-8 text", r"'r\udcff'"]),
        (["train", "pong", "--init", "nowhere"], ["--init names no weights", "no run in nowhere"]),
        (["train", "--resume", "--run-dir", ".", "--init", "nowhere"], ["--init and --resume", "both"]),
        (["sweep"], ["SWEEP.yaml", "--help"]),
        (["sweep", "--resume"], ["no sweep to resume", "--run-dir"]),
        (["compare"], ["RUN", "--help"]),
        (["report", "."], ["no run in .", "an empty folder"]),
        (["config"], ["show|schema|validate"]),
        (["config", "validate", "pong", "algorithm.gamma=2"], ["algorithm.gamma", "found 2"]),
        (["presets", "pong"], ["'pong'"]),
        (["docter"], ["'docter'", "did you mean doctor?"]),
        (["doctor", "--seconds", "0"], ["--seconds", "'0'"]),
        (["doctor", "--seconds", "nan"], ["--seconds", "'nan'"]),
        (["doctor", "--seconds", "abc"], ["argument --seconds: found 'abc', wanted seconds above 0, 86,400 at most"]),
        (["doctor", "--once"], ["unknown option --once"]),
        (["doctor"], ["no run is under way here", "--prometheus"]),
        (["doctor", "127.0.0.1:1", "--seconds", "1"], ["no service answers", "127.0.0.1:1"]),
        (["top", "--once", "tcp://127.0.0.1:5700"], ["tcp://127.0.0.1:5700", "port of its metrics"]),
        (["top", "--prometheus", "http://127.0.0.1:1"], ["the Prometheus does not answer"]),
        (["health"], ["no port to ask", "metrics.port=9100"]),
        (["keys"], ["DIRECTORY", "--help"]),
        (["keys", "k", "../x"], ["'../x'", "letters"]),
        (["keys", "k", "learner"], ["'learner'"]),
        (["health", "9100"], ["'9100'", "section.key=value"]),
    ],
)
def test_bad_input_costs_one_line_and_exit_code_2(words, hints, capsys):
    """Each slip is answered with what was found, what was wanted, and nothing else; no file appears."""
    assert called(*words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("rookery")
    for hint in hints:
        assert hint in err
    assert list(Path().iterdir()) == []


def test_debug_shows_where_an_error_came_from(capsys):
    """For a bug report: the traceback, and still the line."""
    assert called("config", "show", "pogn", "--debug") == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("rookery config show: error: unknown preset")


def test_settings_may_stand_before_and_after_options(capsys):
    """`rookery train pong --seed 3 env.num_envs=4` must not fail where `rookery train pong env.num_envs=4 --seed 3` works."""
    assert called("config", "show", "pong", "--debug", "env.num_envs=4", "actor.count=1", "learner.batch=1") == 0
    shown = capsys.readouterr().out
    assert "num_envs: 4  # command line" in shown
    assert "width: 42  # preset pong" in shown


def test_the_environment_is_a_source_of_settings(monkeypatch, capsys):
    """A container sets variables; the command line still wins."""
    monkeypatch.setenv("ROOKERY_RUN__SEED", "5")
    assert called("config", "show", "cartpole") == 0
    assert "seed: 5  # ROOKERY_RUN__SEED" in capsys.readouterr().out


def test_the_schema_is_json(capsys):
    """An editor completes settings from it."""
    assert called("config", "schema") == 0
    assert "learner" in json.loads(capsys.readouterr().out)["properties"]


def test_settings_are_shown_with_the_notes_of_a_run_beside_the_file(capsys):
    assert called("config", "show", "pong", "target.env_steps=100000") == 0
    shown = capsys.readouterr()
    assert "algorithm.lr_env_steps=" in shown.err
    assert all(line.endswith("the run ends before the schedule does") for line in shown.err.splitlines())
    assert yaml.safe_load(shown.out)["target"]["env_steps"] == 100_000


def test_presets_are_listed_with_a_line_each(capsys):
    assert called("presets") == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"cartpole", "pong"} <= {line.split()[0] for line in lines}
    cartpole = next(line for line in lines if line.startswith("cartpole "))
    assert re.split(r" {2,}", cartpole)[1:4] == ["ppo", "4 floats -> 1 of 2", "100,000"]
    assert "of 3 seeds" in cartpole


def test_a_narrow_terminal_gets_fewer_columns_and_cuts_none(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a terminal
    monkeypatch.setenv("COLUMNS", "81")
    assert called("presets") == 0
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert "content" not in printed
    assert "of 3 seeds" in next(line for line in printed.splitlines() if line.startswith("cartpole "))


@pytest.mark.parametrize(("width", "columns"), [(32, 1), (40, 2), (43, 2), (44, 3), (77, 3), (78, 4)])
def test_a_small_terminal_has_whole_names_and_the_columns_that_fit_beside_them(capsys, monkeypatch, width, columns):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    assert called("presets") == 0
    printed = capsys.readouterr().out
    assert "…" not in printed
    line = next(line for line in printed.splitlines() if line.startswith("cartpole-velocity-free"))
    assert len(re.split(r" {2,}", line.strip())) == columns


def test_the_version_is_printed(capsys):
    """The first thing a bug report needs."""
    assert called("--version") == 0
    assert capsys.readouterr().out.startswith("rookery 0.")


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"]])
def test_help_shows_commands_that_can_be_copied(words, capsys):
    """A newcomer reads examples, not grammar."""
    assert called(*words) == 0
    assert "rookery train cartpole" in capsys.readouterr().out


def test_the_actor_of_the_help_may_join_another_machine(capsys):
    called("--help")
    command = capsys.readouterr().out.partition("  rookery actor ")[2].partition("    ")[0]
    assert worker.parse("actor", command.split(), {}).settings.actor.learner == "tcp://10.0.0.7:5700"


def test_without_a_command_the_help_is_shown(capsys):
    """`rookery` alone."""
    assert called() == 2
    assert "examples:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [
        (["--version"], ""),
        (["--version"], "1"),
        (["--help"], ""),
        (["config", "schema"], ""),
        (["config", "schema"], "1"),
        (["presets"], ""),
        (["presets"], "1"),
    ],
)
def test_a_command_whose_reader_has_ended_is_silent(words, unbuffered):
    """As in `rookery evaluate RUN | head -3`, after the third line."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "services.cli", *words]
    environ = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    try:
        ended = subprocess.run(command, check=False, stdout=writer, stderr=subprocess.PIPE, env=environ, text=True)
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


LONG = "x" * 300  # no name of a file is longer than 255 bytes


@pytest.mark.parametrize(
    "words",
    [
        ["compare", LONG],
        ["report", LONG],
        ["evaluate", LONG],
        ["play", LONG],
        ["export", LONG, "policy.onnx"],
        ["top", LONG],
        ["doctor", LONG],
        ["sweep", "--resume", "--run-dir", LONG],
        ["train", "cartpole", "--run-dir", LONG],
        ["train", "--resume", "--run-dir", LONG],
        ["train", "cartpole", "--init", LONG],
    ],
)
def test_a_path_that_the_system_refuses_is_one_line(words, capsys):
    assert called(*words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert LONG in err
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(("error", "code"), [(PermissionError(13, "Permission denied", "far/run"), 2), (OSError(5, "broken"), 1)])
def test_an_error_of_the_system_is_one_line_only_where_it_names_a_file(error, code, capsys, caplog, monkeypatch):
    def fails(_):
        raise error

    monkeypatch.setattr("services.cli.app._presets", fails)
    assert called("presets") == code
    line = "rookery presets: error: a file or folder cannot be used: found Permission denied at far/run, wanted a path"
    assert capsys.readouterr().err.startswith(line) == (code == 2)
    assert ("unexpected_error" in caplog.text) == (code == 1)


@pytest.mark.parametrize("words", [["--version"], ["config", "schema"], ["presets"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_to_a_full_disk_is_one_line(words, unbuffered):
    command = [sys.executable, "-m", "services.cli", *words]
    environ = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, check=False, stdout=full, stderr=subprocess.PIPE, env=environ, text=True)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "error: output cannot be written: found No space left on device, wanted free space; free some" in line


@pytest.mark.usefixtures("capfd")  # a standard output that can be polled
def test_a_broken_pipe_other_than_standard_output_is_a_bug(caplog, monkeypatch):
    def breaks(_):
        raise BrokenPipeError("of a simulator")

    monkeypatch.setattr("services.cli.app._presets", breaks)
    assert called("presets") == 1
    assert "of a simulator" in caplog.text


@pytest.mark.parametrize("service", ["learner", "actor", "evaluator"])
def test_a_service_alone_becomes_its_own_program(service, monkeypatch):
    """`rookery actor --learner ...` in a container: same process, so that signals reach the service itself.

    They are blocked until it handles them: process 1 of a container ignores a signal that has no handler.
    """
    numbers, became = {signal.SIGTERM, signal.SIGINT}, []

    def execute(program, words):
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        became.append((program, words, numbers <= blocked))
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", execute)
    assert called(service, "--learner", "tcp://10.0.0.7:5700", "--help") == 0
    words = [sys.executable, "-P", "-m", f"services.{service}", "--learner", "tcp://10.0.0.7:5700", "--help"]
    assert became == [(sys.executable, words, True)]
