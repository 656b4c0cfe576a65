"""A run's folder: begun whole or not at all, never two runs in one."""

import errno
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from common.config.load import as_yaml, load_settings
from common.config.sections import RunSettings
from common.errors import ConfigError, ResourceError
from common.runtime.disk import DISK, Disk
from common.runtime.run_directory import RunDirectory, create, default_path, held, new_run_id, reopen, require_same_run

pytestmark = pytest.mark.service


def test_a_run_without_a_name_gets_one_that_sorts_by_time():
    """Many runs of one preset lie side by side."""
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert default_path(preset="pong", seed=7, now=now) == Path("runs/pong-20260102-030405-s7")
    assert default_path(preset="", seed=1, now=now).name == "run-20260102-030405-s1"


def test_a_file_of_any_name_gives_a_run_id():
    """Workers refuse ids of other characters, and longer ones: the run began and failed."""
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert default_path(preset="my run/größe", seed=7, now=now).name == "my-run-gr-e-20260102-030405-s7"
    found = new_run_id(preset="my run " + 140 * "x", now=now)
    assert found.startswith("my-run-xxx")
    assert RunSettings(id=found).id == found


def test_a_new_run_holds_its_configuration_and_its_command(tmp_path):
    """Enough to repeat it: the command can be pasted into a shell."""
    directory = create(tmp_path / "a" / "b", config="run: {}\n", command=["rookery", "train", "env.id=my env"])
    assert directory.config.read_text() == "run: {}\n"
    assert directory.command.read_text() == "rookery train 'env.id=my env'\n"
    assert sorted(p.name for p in directory.path.iterdir()) == ["command.txt", "config.yaml"]
    assert reopen(directory.path).path == directory.path


def test_an_empty_folder_will_do(tmp_path):
    """A mounted volume exists before the run."""
    assert create(tmp_path, config="", command=[]).config.exists()


def test_the_names_of_a_run_are_those_the_documentation_gives(tmp_path):
    """Other programs read them."""
    run = RunDirectory(tmp_path)
    names = {
        p.name for p in (run.checkpoints, run.tensorboard, run.logs, run.summary, run.learning_curve_csv, run.learning_curve_png)
    }
    assert names == {"checkpoints", "tensorboard", "logs", "summary.json", "learning_curve.csv", "learning_curve.png"}


def test_a_second_run_in_one_folder_is_refused_and_the_first_untouched(tmp_path):
    """The up arrow, twice."""
    create(tmp_path, config="first", command=["one"])
    with pytest.raises(ConfigError, match=r"found another run in .*--resume"):
        create(tmp_path, config="second", command=["two"])
    assert (tmp_path / "config.yaml").read_text() == "first"


def test_two_learners_do_not_write_into_one_folder(tmp_path):
    """The second is refused as long as the first one lives, and no longer."""
    directory = create(tmp_path, config="", command=[])
    with held(directory), pytest.raises(ConfigError, match="a run is under way in this directory"), held(directory):
        pass
    with held(directory):
        pass


def test_files_that_a_killed_process_left_half_written_go_with_the_next_start(tmp_path):
    left = tmp_path / "run" / ".partial-config.yaml-1a2b3c4d"
    left.parent.mkdir()
    left.write_text("run:")
    directory = create(tmp_path / "run", config="run: {}\n", command=["rookery"])
    assert sorted(path.name for path in directory.path.iterdir()) == ["command.txt", "config.yaml"]
    left.write_text("run:")
    with held(directory) as lock:
        assert not left.exists()
        left.write_text("run:")
        with held(directory, inherited=os.dup(lock)):
            assert left.exists(), "it is being written by the process that has the lock"


def test_a_child_shares_the_lock_that_it_inherited(tmp_path):
    """It keeps others out as long as it lives, whether or not its parent does."""
    directory = create(tmp_path, config="", command=[])
    with held(directory) as lock:
        child = os.dup(lock)
    with held(directory, inherited=child), pytest.raises(ConfigError, match="under way"), held(directory):
        pass
    with held(directory):
        pass


def test_a_descriptor_of_something_else_is_no_lock(tmp_path):
    """An option that was copied from a list of processes."""
    directory = create(tmp_path / "run", config="", command=[])
    with (tmp_path / "file").open("w") as file:
        for wrong in (file.fileno(), 12345):
            with pytest.raises(ConfigError, match="--run-lock is no descriptor of the run"), held(directory, inherited=wrong):
                pass


def test_of_two_runs_that_begin_in_one_folder_at_once_one_does(tmp_path):
    """The second finds the folder empty still, and locked."""

    def write(path, data):
        with pytest.raises(ConfigError, match="a run is under way in this directory"):
            create(tmp_path / "run", config="second", command=["two"])
        DISK.write(path, data)

    directory = create(tmp_path / "run", config="first", command=["one"], disk=Disk(write=write))
    assert sorted(path.name for path in directory.path.iterdir()) == ["command.txt", "config.yaml"]
    assert directory.config.read_text() == "first"


def test_where_nothing_can_be_locked_nobody_is_kept_out(tmp_path, monkeypatch):
    """Network file systems without a lock service; a folder that cannot be written is reported by its writer."""

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with held(RunDirectory(tmp_path)), held(RunDirectory(tmp_path / "missing")):
        pass


def test_a_folder_with_other_things_is_refused(tmp_path):
    """`run.dir=.` in one's home."""
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="found other files"):
        create(tmp_path, config="", command=[])
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_in_the_way_is_one_clear_error(tmp_path):
    """The path, or a part of it, is a file."""
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ResourceError, match="run directory cannot be written"):
            create(path, config="", command=[])
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("operation", ["write", "fsync", "rename"])
@pytest.mark.parametrize("which", ["command.txt", "config.yaml"])
def test_a_disk_that_refuses_leaves_no_trace(tmp_path, operation, which):
    """Read-only or full at either file: folders that were made for the run go too."""

    def refusing(path, *rest):
        if which in path.name:
            raise OSError(errno.EROFS, "Read-only file system")
        getattr(DISK, operation)(path, *rest)

    with pytest.raises(ResourceError, match="found Read-only file system at"):
        create(tmp_path / "a" / "b", config="x", command=["y"], disk=Disk(**{operation: refusing}))
    assert list(tmp_path.iterdir()) == []


def test_resuming_where_no_run_is_says_so(tmp_path):
    """A slip in --run-dir must not start a new run under the wrong name."""
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match="no run to resume"):
            reopen(path)


@pytest.mark.parametrize("left", ["", "- 1", "run: {seed: 1}", "run:\nlog: {}"])
def test_a_run_whose_configuration_is_cut_does_not_go_on(tmp_path, left):
    loaded = load_settings(preset="cartpole", environ={})
    directory = create(tmp_path / "run", config=as_yaml(loaded.settings), command=[])
    require_same_run(directory, loaded)
    directory.config.write_text(left)
    with pytest.raises(ConfigError, match="is cut"):
        require_same_run(directory, loaded)


def test_resuming_on_a_read_only_folder_is_refused_before_anything_starts(tmp_path, monkeypatch):
    """An archive is mounted read-only: the error comes at the start, not at the first checkpoint."""
    create(tmp_path, config="", command=[])
    monkeypatch.setattr("os.access", lambda path, _: path != tmp_path)
    with pytest.raises(ResourceError, match="read-only"):
        reopen(tmp_path)


def test_a_folder_holds_a_run_once_its_configuration_is_there(tmp_path):
    """Nothing, a folder that is empty, and one that cannot be looked at hold none."""
    (tmp_path / "file").touch()
    for path in (tmp_path / "absent", tmp_path, tmp_path / "file" / "run"):
        assert not RunDirectory(path).begun
    assert create(tmp_path / "run", config="", command=[]).begun
