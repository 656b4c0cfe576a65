"""Local directories and the copies of runs in a store: a run is restored to be resumed, or fetched for commands that read it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from common.errors import ConfigError, ResourceError
from common.runtime.disk import DISK, PARTIAL
from common.runtime.manifests import CHECKPOINT
from common.runtime.run_directory import MANIFEST, RunDirectory, held
from common.runtime.store import CONFIG, RESULTS, SCHEME_END, RunStore, reached, run_id


def is_address(text: str) -> bool:
    """Return whether `text` is the address of a bucket, and no local path."""
    return SCHEME_END in text


def local_path(text: str) -> Path:
    """Return the local path that `text` names; for the address of a run, the folder under `runs/` to which it is downloaded."""
    return Path("runs") / text.rstrip("/").rpartition("/")[2] if is_address(text) else Path(text)


def copy_address(store: str, folder: Path) -> str:
    """Return the address of the copy of the run in `folder`: the store and the name of the folder."""
    return f"{store.rstrip('/')}/{folder.absolute().name}"


def check_new(store: str, folder: Path | None) -> None:
    """Raise the errors that uploads of a new run in `folder` would meet; nothing where there is no store, or no name yet."""
    if store and folder:
        RunStore(copy_address(store, folder)).check_new()


# --- to be resumed ---


def check_resumed(address: str, folder: Path, *, warn: Callable[[str], None]) -> None:
    """Raise `ConfigError` where the copy at `address` is of another run than that in `folder`, or has gone on further.

    Where the store cannot be read, `warn` is called: a run goes on without it.
    """
    try:
        RunStore(address).check_resumed(RunDirectory(folder))
    except ResourceError as error:
        warn(f"the run and its copy are not compared: {error}")


def restore(address: str, folder: Path, *, warn: Callable[[str], None] = lambda _: None) -> RunDirectory:
    """Download the run at `address` to `folder`, from where it can be resumed.

    Raises `ConfigError` where there is no run, or `folder` has other files or newer checkpoints of the run, `ResourceError` where
    the store cannot be read.
    """
    store, directory = RunStore(address), RunDirectory(folder)
    if not store.exists():
        raise ConfigError("no run to resume", found=f"nothing at {address}", wanted="a run that was uploaded there")
    known = {"checkpoints", CONFIG, *RESULTS, directory.learning_curve_png.name}  # the last, of a version before
    names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    if others := [name for name in names if name not in known and not name.startswith(PARTIAL)]:
        raise ConfigError("run directory is in use", found=f"{others[0]} in {folder}", wanted="a new or empty folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with held(directory):
            with reached(address):
                store.require_newest(directory.checkpoints)
                store.remove_others(directory.checkpoints)
            store.download(folder, warn=warn)
    except OSError as error:
        raise ResourceError("the run cannot be downloaded", found=f"{error.strerror} at {folder}", wanted="free disk") from error
    return directory


def restore_missing(store: str, folder: Path, *, warn: Callable[[str], None]) -> bool:
    """Download the run of `folder` from the store, where the folder holds none; return whether it did.

    Raises as `restore`. Returns False where the store is empty text or has no such run.
    """
    address = copy_address(store, folder)
    if not store or RunDirectory(folder).begun or not RunStore(address).exists():
        return False
    restore(address, folder, warn=warn)
    return True


# --- to be read ---


def _print_warning(text: str) -> None:
    sys.stderr.write(f"rookery: {text}\n")


def fetch(address: str) -> Path:
    """Return a local copy of the run at `address`, without its replay memory, for commands that read runs.

    A local path is returned as it is. The copy is kept in the user's cache, and a checkpoint of this run that is there is not
    downloaded again. `address` may name a checkpoint of the run, which is `best` or `checkpoint-<digits>`. Raises as `restore`.
    """
    if not is_address(address):
        return Path(address)
    run, _, checkpoint = address.rstrip("/").rpartition("/checkpoints/")
    if not (checkpoint == "best" or CHECKPOINT.fullmatch(checkpoint)):  # a run, whose store may be a folder `checkpoints`
        run, checkpoint = address, ""
    store = RunStore(run)
    with _cached(store) as folder, reached(address):
        if not checkpoint:
            store.download(folder, warn=_print_warning, segments=False)
            store.remove_later(folder / "checkpoints")
            return folder
        store.download_results(folder)
        place = folder / "checkpoints" / checkpoint
        if (place / MANIFEST).exists() and not store.has_checkpoint(checkpoint):
            return place  # the run has removed it from the bucket since it was downloaded
        if problem := store.download_checkpoint(checkpoint, place.parent, segments=False):
            raise ConfigError("no such checkpoint", found=f"{address}: {problem}", wanted="one that the run has uploaded")
    return place


def fetch_results(address: str) -> Path:
    """Return a local copy of the results of the run at `address`, for commands that need no checkpoint.

    A local path is returned as it is. Raises as `restore`.
    """
    if not is_address(address):
        return Path(address)
    store = RunStore(address)
    with _cached(store) as folder:
        store.download_results(folder)
    return folder


@contextmanager
def _cached(store: RunStore) -> Iterator[Path]:
    """Yield the folder in the user's cache for the copy of a run; one process at a time is inside.

    What is there of an earlier run of the same address is removed.
    """
    run = store.address
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rookery" / "runs"
    folder = cache / hashlib.sha256(run.encode()).hexdigest()[:16] / run.rpartition("/")[2]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        at = f"{error.strerror} at {folder}"
        raise ResourceError("the cache cannot be written", found=at, wanted="a folder", fix="set XDG_CACHE_HOME") from error
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        known, found = folder / CONFIG, list(folder.iterdir())
        with reached(run):
            same = known.exists() and run_id(known.read_bytes()) == run_id(store.config())
        for path in () if same else found:
            DISK.remove_tree(path)
        yield folder
    finally:
        os.close(lock)
