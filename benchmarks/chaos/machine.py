"""Changes to the machine under a storm: small and read-only file systems, a small /dev/shm."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.units import MIB

DISK_BYTES = 16 * MIB
SMALL_SHM = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$0" "$@"')
_LISTEN = "0A"  # state of a socket in /proc/net/tcp


def cannot_mount() -> str:
    """Return why no file system can be mounted here; "" where one can."""
    if os.geteuid() != 0:
        return "mounting a file system needs root"
    if not (shutil.which("mount") and shutil.which("unshare")):
        return "mount or unshare is not installed"
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else "this container may not mount file systems"


@contextmanager
def tmpfs(folder: Path, size: int) -> Iterator[None]:
    """Mount a file system of `size` bytes in memory over `folder` for the time of the block."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Make everything below `folder` refuse to be opened for writing for the time of the block; files that are open stay so."""
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def full(folder: Path, *, logs: bool = False) -> Iterator[None]:
    """Fill the file system of `folder` to its last byte for the time of the block; of `logs` the last pages too."""
    ballast = folder / "ballast"
    try:
        with ballast.open("wb", buffering=0) as file:
            for block in (MIB, 4096, 1):
                while _written(file, block):
                    pass
        for path in folder.glob("*.log") if logs else ():
            with path.open("ab", buffering=0) as file:
                while _written(file, 1):
                    pass
        yield
    finally:
        ballast.unlink()


def _written(file: object, block: int) -> bool:
    try:
        return bool(file.write(b"\n" * block))  # type: ignore[attr-defined]
    except OSError:
        return False


def listens(port: int) -> bool:
    """Return whether a process listens on a TCP port of this machine, without connecting to it."""
    wanted = f":{port:04X}"
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and fields[1].endswith(wanted):
                return True
    return False
