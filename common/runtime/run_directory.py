"""The folder of a run: the names of its files, its creation, and the lock that keeps a second learner out."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shlex
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path

from common.conditions import DEFAULT
from common.config.layers import Tree, parse_yaml
from common.config.load import LoadedSettings, read_text
from common.config.sections import as_run_name
from common.errors import ConfigError, ResourceError
from common.runtime.disk import DISK, PARTIAL, Disk, write_atomically

TENSORS, MANIFEST, SEGMENTS = "tensors.safetensors", "manifest.json", "segments"  # names in a checkpoint, and beside it
LAST = "log"  # section of config.yaml, as every version has written it
DEPTH = 3  # of folders below a named one in which runs are found: a folder of series holds folders of runs


class RunDirectory:
    """Names of the files of a run. Each writer creates its own; only `config` and `command` are there from the start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"  # all settings, which `load` gives again; a folder that has this file holds a run
        self.command = path / "command.txt"  # the command lines that began and resumed the run, one a line
        self.checkpoints = path / "checkpoints"  # folder of `common.runtime.checkpoints`
        self.accounts = path / "accounts.jsonl"  # of all workers, which a killed learner leaves beside its checkpoints
        self.uploaded = path / "uploaded.txt"  # hashes of the manifests that were uploaded from here to `run.store`, one a line
        self.tensorboard = path / "tensorboard"  # folder of event files
        self.logs = path / "logs"  # folder of one file for each process
        self.addresses = path / "addresses.json"  # of the services' HTTP ports, while `rookery train` runs
        self.summary = path / "summary.json"
        self.settings_changed = path / "settings_changed.json"  # at resumes: env steps, and what changed; written at the start
        self.learning_curve_csv = path / "learning_curve.csv"  # returns over env steps, as a table
        self.learning_curve_png = path / "learning_curve.png"  # the same as a picture

    def of_rank(self, rank: int) -> RunDirectory:
        """Return where this rank of the learner keeps its files: rank 0 here, each other one in a folder of its own."""
        return RunDirectory(self.path / f"rank-{rank}") if rank else self

    @property
    def begun(self) -> bool:
        """Return whether there is a run here that can be read; False where that is unknown."""
        return os.access(self.config, os.R_OK)

    @property
    def has_checkpoints(self) -> bool:
        """Return whether there is a checkpoint here from which the run could go on, good or not."""
        return any(self.checkpoints.glob("checkpoint-*"))

    @property
    def deleted(self) -> bool:
        """Return whether config.yaml, which every run has, is gone; False where that is unknown."""
        try:
            self.config.stat()
        except OSError as error:
            return isinstance(error, FileNotFoundError)
        return False


def run_folders(path: Path, depth: int = DEPTH, *, warn: Callable[[Path], None] = lambda _: None) -> Iterator[Path]:
    """Yield `path` where it is a run directory, else the run directories in it, `depth` folders below at most.

    Folders that may not be entered are passed over; `warn` is called with each.
    """
    inside = []
    try:
        if _type(RunDirectory(path).config) == stat.S_IFREG:
            yield path
        elif depth and _type(path) == stat.S_IFDIR:
            inside = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    except PermissionError:
        warn(path)
    except FileNotFoundError:  # deleted meanwhile
        return
    for entry in inside:
        yield from run_folders(entry, depth - 1, warn=warn)


def _type(path: Path) -> int:
    """Return the type of a file, as `stat.S_IFMT`, 0 without one; `is_file` of Python 3.14 hides that we may not look."""
    try:
        return stat.S_IFMT(path.stat().st_mode)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return 0


def is_config_of_a_run(source: str) -> bool:
    """Return whether `source` of a setting, such as "file runs/mine/config.yaml", is the config.yaml of a run."""
    kind, _, name = source.partition(" ")
    directory = RunDirectory(Path(name).parent)
    return kind == "file" and Path(name).name == directory.config.name and directory.command.exists()


def read_config(directory: RunDirectory) -> Tree:
    """Return the values of a run's config.yaml. Raises `ConfigError` where it is cut: lost sections would have defaults."""
    source = str(directory.config)
    values: Tree = parse_yaml(read_text(source, what="the run's configuration", wanted="a readable file"), source=source)
    if not isinstance(values, dict) or not isinstance(values.get("run"), dict) or LAST not in values:
        found, fix = f"not all sections in {source}", "replace it by a copy of the file"
        raise ConfigError("config.yaml of the run is cut", found=found, wanted=f"those from run to {LAST}", fix=fix)
    return values


def require_same_run(directory: RunDirectory, loaded: LoadedSettings) -> None:
    """Refuse another seed, id or `run.init` than those of the run in `directory`, which goes on: only its name would change.

    An id in the config.yaml of another run is not meant for this one. Raises `ConfigError`.
    """
    values = read_config(directory)["run"]
    now = loaded.settings.run
    given = "" if is_config_of_a_run(loaded.provenance["run.id"]) else now.id
    compared = [("seed", now.seed, values.get("seed")), ("id", given, values.get("id"))]
    # A run without a checkpoint begins with the weights that are named now.
    if loaded.provenance["run.init"] != DEFAULT and directory.has_checkpoints:
        compared.append(("init", now.init or "none", values.get("init") or "none"))
    for key, found, wanted in compared:
        if found != "" and wanted not in {None, "", found}:
            fix = "leave it out, or begin another run with it"
            raise ConfigError(f"run.{key} of a run that goes on", found=found, wanted=wanted, fix=fix)


def default_path(*, preset: str, seed: int, now: datetime) -> Path:
    """`runs/<preset>-<YYYYmmdd-HHMMSS>-s<seed>`, for settings that name no folder."""
    return Path("runs") / f"{as_run_name(preset) or 'run'}-{now:%Y%m%d-%H%M%S}-s{seed}"


def new_run_id(*, preset: str, now: datetime) -> str:
    """`<preset>-<YYYYmmdd-HHMMSS>-<6 hex digits>`, of which the newest run of a preset is the last in the alphabet."""
    return f"{as_run_name(preset) or 'run'}-{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def create(path: Path, *, config: str, command: Sequence[str], disk: Disk = DISK) -> RunDirectory:
    """Begin a run in `path`, which is new or empty. Where this raises, nothing was written.

    Raises `ConfigError` where the folder is in use, `ResourceError` where it cannot be written.
    """
    directory = RunDirectory(path)
    created: list[Path] = []
    try:
        created += [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        with held(directory):  # of two that begin at once, one finds the folder empty
            if any(path.iterdir()):
                fact, fix = "run directory is in use", "set run.dir, or continue it with --resume"
                found = f"another run in {path}" if directory.config.exists() else f"other files in {path}"
                raise ConfigError(fact, found=found, wanted="a new or empty folder", fix=fix)
            try:
                write_atomically(directory.command, f"{shlex.join(command)}\n".encode(), disk=disk)
                write_atomically(directory.config, config.encode(), disk=disk)  # last: it marks the folder as a run's
            except OSError:
                directory.command.unlink(missing_ok=True)
                raise
    except OSError as error:
        with suppress(OSError):
            for folder in created:
                folder.rmdir()
        raise ResourceError(
            "run directory cannot be written", found=f"{error.strerror} at {path}", wanted="a writable folder", fix="set run.dir"
        ) from error
    return directory


def add_command(directory: RunDirectory, command: Sequence[str]) -> None:
    """Add the command line that resumes a run to its `command.txt`. A disk that cannot be written costs the line alone."""
    with suppress(OSError), directory.command.open("a", encoding="utf-8") as file:
        file.write(f"{shlex.join(command)}\n")


def find(path: Path) -> RunDirectory:
    """Return the run in `path`. Raises `ConfigError` where there is none."""
    directory = RunDirectory(path)
    if not directory.begun:
        raise ConfigError(
            "no run to resume", found=str(path), wanted="a run directory, with a config.yaml", fix="set run.dir to it"
        )
    return directory


def reopen(path: Path) -> RunDirectory:
    """Return the run in `path`. Raises `ConfigError` where there is none, `ResourceError` where it is read-only."""
    directory = find(path)
    if not os.access(path, os.W_OK | os.X_OK):
        raise ResourceError("run directory cannot be written", found=f"read-only {path}", wanted="a writable folder")
    return directory


@contextmanager
def held(directory: RunDirectory, *, inherited: int | None = None) -> Iterator[int | None]:
    """Hold the lock of a run, series or sweep while inside; yields its descriptor, or None where the directory cannot be opened.

    On a file system without locks no other process is kept out. What a killed process left of a file half written is removed.

    The lock belongs to the open descriptor, and the system releases it when the last process that has the descriptor ends. A
    child process that was started with the descriptor of its parent names it as `inherited` and shares the lock.

    Raises `ConfigError` where another process has the lock, and where `inherited` is not a descriptor of this directory.
    """
    with ExitStack() as stack:
        lock = _open(directory.path) if inherited is None else _checked(inherited, directory.path)
        if lock is not None:
            stack.callback(os.close, lock)
        if lock is not None and inherited is None and not _locked(lock):
            raise ConfigError(
                "a run is under way in this directory, or a series or sweep of runs",
                found=str(directory.path),
                wanted="one that no other process writes to",
                fix="end it first, or name another directory",
            )
        if inherited is None:
            with suppress(OSError):
                for partial in directory.path.glob(f"{PARTIAL}*"):
                    partial.unlink()
        yield lock


def _open(folder: Path) -> int | None:
    with suppress(OSError):
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    return None


def _checked(inherited: int, folder: Path) -> int:
    with suppress(OSError):
        if os.path.samestat(os.fstat(inherited), folder.stat()):
            os.set_inheritable(inherited, False)  # a process that outlives this one must not keep the lock
            return inherited
    raise ConfigError("--run-lock is no descriptor of the run directory", found=inherited, wanted=f"one of {folder}, opened")


def _locked(lock: int) -> bool:
    """Return whether this process has the lock now, or the file system has no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
