"""A run directory that somebody else made: its config.yaml names code, and no command runs it without being asked to."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rookery
from common.errors import ConfigError
from common.runtime.run_directory import RunDirectory
from services.cli.app import parse_arguments
from services.cli.series.run import train_arguments
from tests.services.cli.conftest import called

pytestmark = pytest.mark.service

NAMES = {
    "env.entry_point": "env: {entry_point: 'CODE', id: ''}",
    "model.entry_point": "model: {entry_point: 'CODE'}",
    "algorithm.name": "algorithm: {name: 'CODE'}",
    "env.id": "env: {id: 'CODE'}",
}
ALLOWING = {f"{role}.allow_code": f"{role}: {{allow_code: ['CODE']}}" for role in ("actor", "evaluator", "env_worker")}


@pytest.fixture
def foreign(make_run, tmp_path, monkeypatch):
    """Return a function that makes a run whose config.yaml names code outside of the current directory, and the trace of it."""
    library, here = tmp_path / "library", tmp_path / "here"
    library.mkdir()
    here.mkdir()
    trace = tmp_path / "trace"
    (library / "foreign_code.py").write_text(f"from pathlib import Path\nPath({str(trace)!r}).write_text('ran')\nmake = print\n")
    monkeypatch.syspath_prepend(str(library))
    monkeypatch.chdir(here)

    def make(setting="env.entry_point", code="foreign_code:make"):
        run, _ = make_run(path=here / "run")
        section = setting.partition(".")[0]
        lines, kept, skip = run.config.read_text().splitlines(), [], False
        for line in lines:
            skip = line.startswith(f"{section}:") or (skip and line.startswith((" ", "#")))
            kept += [] if skip else [line]
        run.config.write_text("\n".join([*kept, (NAMES | ALLOWING)[setting].replace("CODE", code)]) + "\n")
        return run, trace

    return make


COMMANDS = {
    "evaluate": ["evaluate", "run"],
    "play": ["play", "run"],
    "export": ["export", "run", "policy.onnx"],
    "resume": ["train", "--resume", "--run-dir", "run"],
    "show": ["config", "show", "run/config.yaml"],
    "validate": ["config", "validate", "run/config.yaml"],
}


@pytest.mark.parametrize("setting", NAMES)
@pytest.mark.parametrize("command", COMMANDS)
def test_code_that_a_foreign_run_names_is_not_run(foreign, capsys, command, setting):
    _, trace = foreign(setting)
    assert called(*COMMANDS[command]) == 2
    line = capsys.readouterr().err.strip()
    assert f"{setting} of the run names code that needs permission: found module 'foreign_code'" in line
    assert "add --allow-code foreign_code" in line
    assert "\n" not in line
    assert not trace.exists()
    assert "foreign_code" not in sys.modules


INSTALLED = ["os:system", "subprocess:run", "posix:system", "torch.hub:load"]
PROJECT = ["services.cli.app:main", "common.envs.functional:import_module", "common.envs.functional:of_gymnasium"]


@pytest.mark.parametrize("code", [*INSTALLED, *PROJECT])
def test_neither_the_standard_library_nor_installed_packages_nor_the_project_are_run(foreign, capsys, code):
    foreign(code=code)
    assert called("evaluate", "run") == 2
    assert "needs permission" in capsys.readouterr().err


def test_a_module_of_the_standard_library_stays_one_though_a_file_of_its_name_is_here(foreign, capsys):
    """Python imports the library's."""
    foreign(code="os:system")
    Path("os.py").write_text("raise SystemExit('ran')")
    assert called("evaluate", "run") == 2
    assert "needs permission" in capsys.readouterr().err


def test_a_link_to_another_place_is_not_the_current_directory(foreign, capsys, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "__init__.py").write_text("raise SystemExit('ran')")
    foreign(code="linked:make")
    Path("linked").symlink_to(tmp_path / "there")
    sys.path.insert(0, str(Path.cwd()))
    try:
        assert called("evaluate", "run") == 2
    finally:
        sys.path.remove(str(Path.cwd()))
    assert "needs permission" in capsys.readouterr().err


def test_code_that_is_allowed_is_imported(foreign, capsys):
    _, trace = foreign()
    assert called("evaluate", "run", "--allow-code", "foreign_code") == 2
    assert "needs permission" not in capsys.readouterr().err
    assert trace.read_text() == "ran"
    sys.modules.pop("foreign_code")


def test_code_of_the_current_directory_needs_no_permission(foreign, capsys):
    Path("mine.py").write_text("from common.envs.probes import counting as make\n")
    foreign(code="mine:make")
    assert called("evaluate", "run") == 2
    assert "needs permission" not in capsys.readouterr().err  # another environment than the policy's


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_cannot_bring_its_own_code(foreign, capsys, command):
    foreign(code="run.evil:make")
    Path("run/evil.py").write_text("raise SystemExit('ran')")
    assert called(*COMMANDS[command]) == 2
    assert "needs permission: found module 'run.evil'" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_module_of_pettingzoo_is_not_imported_through_a_link(foreign, capsys, tmp_path, command):
    """`PACKAGE:NAME` imports two modules: the first one is here, the second one leads away."""
    foreign("env.id", "mygames:linked")
    Path("mygames").mkdir()
    Path("mygames/__init__.py").touch()
    Path("mygames/linked.py").symlink_to(tmp_path / "library/foreign_code.py")
    assert called(*COMMANDS[command]) == 2
    assert "needs permission: found module 'mygames.linked'" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("actor", "--help"), ("evaluate", "gymnasium")])
def test_a_run_in_a_folder_with_the_name_of_a_package_does_not_replace_it(make_run, tmp_path, words):
    make_run(path=tmp_path / "gymnasium")
    for package in ("gymnasium", "signal"):
        (tmp_path / package).mkdir(exist_ok=True)
        (tmp_path / package / "__init__.py").write_text("raise SystemExit('ran')")
    command = [Path(sys.executable).with_name("rookery"), *words]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "ran" not in (ended.stderr + ended.stdout).split()
    assert ended.returncode in (0, 2)


def test_python_programs_allow_code_too(foreign):
    run, trace = foreign()
    with pytest.raises(ConfigError, match="needs permission"):
        rookery.load_policy(run.path)
    assert not trace.exists()
    with pytest.raises(ConfigError):
        rookery.load_policy(run.path, allow_code=["foreign_code"])
    assert trace.exists()
    sys.modules.pop("foreign_code")


OPTIONS = {
    "add --allow-code foreign_code": ["--actors", "2", "--log-format", "plain"],
    "options ['--allow-code', 'foreign_code']": ["--allow-code", "foreign_code"],
    "options ['--allow-code=foreign_code', '2']": ["--allow-code=foreign_code", "2"],
    "options ['--allow=foreign_code']": ["--allow=foreign_code"],
    "options ['--actors', '--allow-code=foreign_code']": ["--actors", "--allow-code=foreign_code"],
}


@pytest.mark.parametrize("says", OPTIONS)
def test_a_foreign_series_runs_nothing(foreign, capsys, says):
    _, trace = foreign()
    folder = Path("series")
    folder.mkdir()
    grid = {"env.entry_point": ["foreign_code:make"]}
    values = {"preset": "cartpole", "overrides": [], "options": OPTIONS[says], "grid": grid, "seeds": [1], "settings": []}
    (folder / "series.json").write_text(json.dumps(values))
    assert called("train", "--resume", "--run-dir", "series") == 2
    assert says in capsys.readouterr().err
    assert not trace.exists()


def test_settings_of_a_foreign_series_allow_nothing_to_its_runs(foreign, capsys):
    """As its own command line gives them to a run that began: one names a module, and the next one replaces it."""
    _, trace = foreign("model.entry_point")
    settings = "env.entry_point=foreign_code:make", "env.entry_point="
    assert called("train", "--resume", *settings, "--member", "--run-dir", "run") == 2
    assert "model.entry_point of the run names code that needs permission" in capsys.readouterr().err
    assert not trace.exists()


def test_a_run_of_a_series_reads_each_word_as_its_series_did(tmp_path, monkeypatch):
    """A preset and settings that look like something else: a file of the foreign folder could be one of them."""
    preset, overrides = "env.id=mine.yaml", ["env.kwargs.a/b=c.yaml", "--allow-code=gift", "run.seed=2"]
    begun = RunDirectory(tmp_path / "begun")
    begun.path.mkdir()
    begun.config.touch()
    monkeypatch.setattr(RunDirectory, "begun", property(lambda run: run.path == begun.path))
    for path, names in ((tmp_path / "new", [preset]), (begun.path, [])):
        options = parse_arguments(train_arguments(preset, overrides, ("--actors", "2"), path))
        assert (options.names, options.overrides) == (names, overrides)
        assert (options.actors, options.allow_code, options.run_dir, options.resume) == ("2", [], str(path), not names)


@pytest.mark.parametrize("setting", ALLOWING)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_foreign_run_does_not_allow_the_code_of_another_learner(foreign, capsys, command, setting):
    """A worker that its config.yaml sends to a learner of somebody else would import what that names."""
    _, trace = foreign(setting, "foreign_code")
    assert called(*COMMANDS[command]) == 2
    assert f"{setting} of the run names code that needs permission: found module 'foreign_code'" in capsys.readouterr().err
    assert not trace.exists()


def test_a_run_of_a_foreign_series_cannot_bring_the_code_beside_it(foreign, capsys):
    """`rookery train --resume --run-dir .` in the folder of the series: its own modules are in the current directory."""
    run, _ = foreign(code="evil:make")
    Path("evil.py").write_text("raise SystemExit('ran')")
    assert called("train", "--resume", "--member", "--run-dir", "run") == 2
    assert "env.entry_point of the run names code that needs permission: found module 'evil'" in capsys.readouterr().err
    assert run.config.is_file()


@pytest.mark.parametrize("text", ["[foreign_code]", "['foreign_code', other]"])
def test_modules_that_the_command_line_lets_a_worker_run_need_no_permission(foreign, capsys, text):
    foreign(code="")
    assert called("train", "--resume", "--run-dir", "run", f"actor.allow_code={text}", "actor.count=0") == 2
    assert "needs permission" not in capsys.readouterr().err


def test_a_checkpoint_behind_a_link_is_of_the_run_as_it_is_named(foreign, capsys, tmp_path):
    run, _ = foreign(code="gift.evil:make")
    shutil.move(run.path, tmp_path / "far")
    Path("gift").mkdir()
    Path("gift/evil.py").write_text("raise SystemExit('ran')")
    Path("gift/one").symlink_to(tmp_path / "far")
    (checkpoint,) = Path("gift/one/checkpoints").glob("checkpoint-*")
    for named in (Path("gift/one"), checkpoint):
        assert called("evaluate", named) == 2
        assert "needs permission: found module 'gift.evil'" in capsys.readouterr().err


def test_a_setting_that_a_series_gives_its_run_is_one_value(foreign, capsys):
    """The series checked the text as one value, in which a comment begins; split at its comma it names code."""
    foreign()
    assert called("train", "cartpole", "algorithm.name=ppo #,foreign_code:make", "--member", "--run-dir", "run") == 2
    assert "run directory is in use" in capsys.readouterr().err


def test_reading_a_run_imports_none_of_its_code(foreign):
    _, trace = foreign()
    for command in (["report", "run"], ["compare", "run"]):
        called(*command)
    assert not trace.exists()
