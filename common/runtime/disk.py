"""The file operations that decide by their order which data survives a crash, as one value, so that a test can stop at each."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


def _write(path: Path, *parts: bytes | memoryview) -> None:
    with path.open("wb") as file:
        for part in parts:
            file.write(part)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)  # serves files and directories alike
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_tree(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """All raise `OSError`. A rename within one file system is atomic; it is durable once the directory is fsynced."""

    write: Callable[..., None] = _write  # (path, *parts)
    fsync: Callable[[Path], None] = _fsync
    rename: Callable[[Path, Path], object] = Path.rename
    remove_tree: Callable[[Path], None] = _remove_tree  # or a file


DISK = Disk()
PARTIAL = ".partial-"  # begins the name of a file or directory that is not complete


def write_atomically(path: Path, data: bytes, *, disk: Disk = DISK) -> None:
    """Write `data` to `path` atomically: where this raises `OSError` or the machine dies, `path` keeps its old content.

    Two processes may write the same path at once: each has a temporary file of its own, and one of the two remains.
    """
    partial = path.with_name(f"{PARTIAL}{path.name}-{secrets.token_hex(4)}")
    try:
        disk.write(partial, data)
        disk.fsync(partial)
        disk.rename(partial, path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    disk.fsync(path.parent)
