"""Cores and free memory of this machine or of the container around this process, and the guard against running out of memory."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from common.observability.cpu_limit import CpuLimit

STATM = Path("/proc/self/statm")
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
CGROUP_NAMESPACE = Path("/proc/self/ns/cgroup")

RESERVE_SHARE = 1 / 16  # of the memory that was free at the start
LEAST_RESERVE = 256 * 2**20  # bytes; ZeroMQ's one thread stores 230 MB in the 0.1 s between two looks


class MemoryGuard:
    """Decides when memory is so short that data stored for unknown senders must be freed. Owned by the thread that frees it."""

    def __init__(
        self,
        *,
        available: Callable[[], int | None] | None = None,
        anonymous: Callable[[], int] | None = None,
    ) -> None:
        """Create it before there is anything to free. By default it reads the memory of this process and its machine."""
        self._available = available or available_bytes
        self._anonymous = anonymous or anonymous_bytes
        room = self._available() or 0
        self.reserve = round(min(room / 2, max(LEAST_RESERVE, room * RESERVE_SHARE)))
        """Bytes that must stay free; 0, and the guard is off, where the system does not report free memory."""
        self._base = self._seen = self._anonymous()

    def short(self) -> bool:
        """Return whether less than the reserve is free, and this process has grown by half of it since the last `freed`.

        Without that growth other processes took the memory, or the growth cannot be freed: freeing again would gain nothing.
        """
        self._seen = self._anonymous()
        if self._seen - self._base <= self.reserve / 2:
            return False
        available = self._available()
        return available is not None and available < self.reserve

    def freed(self) -> int:
        """Return freed memory to the system and measure growth anew; return the bytes that the process lost since `short`."""
        with suppress(AttributeError, OSError):  # a C library other than glibc
            # glibc keeps freed memory where something in use lies above it, and a container counts that memory.
            ctypes.CDLL(None).malloc_trim(0)
        self._base = self._anonymous()
        return max(0, self._seen - self._base)


def cores(*, cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> int:
    """Return the cores this process may run on, or the whole ones of the container's quota where these are fewer; at least 1."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = cpu_limit(cgroup=cgroup, membership=membership)
    return max(1, min(usable, int(limit.cores) if limit else usable))


def cpu_limit(*, cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> CpuLimit | None:
    """Return the CPU limit of the innermost control group around this process that has one, of version 2 or 1; None: no limit.

    `cgroup` is where control groups are mounted, and `membership` names those of this process. In a container the mounted folder
    is often that of the container itself, while the names are those of the machine.
    """
    for folder in _groups("cpu", cgroup, membership):
        if cores := _quota(folder):
            counts = _counts(folder / "cpu.stat")
            return CpuLimit(cores, counts.get("nr_periods", 0), counts.get("nr_throttled", 0))
    return None


def _groups(controller: str, cgroup: Path, membership: Path) -> Iterator[Path]:
    """Yield folders that control groups with this controller around this process have or may have, the innermost first."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):  # no Linux
        lines = []
    paths = {names: path for _, names, path in (line.split(":", 2) for line in lines if line.count(":") > 1)}
    version_1 = next((path for names, path in paths.items() if controller in names.split(",")), "/")
    for base, path in ((cgroup, paths.get("", "/")), (cgroup / controller, version_1)):
        inner = Path(path.lstrip("/"))
        yield from (base / group for group in (inner, *inner.parents))


def _quota(group: Path) -> float | None:
    """Return core seconds per second, of a version 2 control group or of version 1; None where it has no limit."""
    try:
        most, period = (group / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:
            most, period = ((group / f"cpu.cfs_{name}_us").read_text(encoding="ascii") for name in ("quota", "period"))
        except OSError:
            return None
    try:
        quota = int(most) / int(period)
    except ValueError:  # "max"
        return None
    return quota if quota > 0 else None  # -1 in version 1: none


def _counts(stat: Path) -> dict[str, int]:
    with suppress(OSError, ValueError):
        return {name: int(number) for name, number in (line.split() for line in stat.read_text(encoding="ascii").splitlines())}
    return {}


def anonymous_bytes() -> int:
    """Return the physical memory of this process without files and libraries; 0 where the system does not report it.

    The kernel gives pages of files up and reads them again as it likes: they show neither growth nor freed memory.
    """
    try:
        resident, shared = (int(pages) for pages in STATM.read_text(encoding="ascii").split()[1:3])
    except OSError:  # no Linux
        return 0
    return (resident - shared) * resource.getpagesize()


def available_bytes(*, meminfo: Path = MEMINFO, cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> int | None:
    """Return the bytes that a process could still take without swapping, by the kernel and the limits around it; None: unknown.

    Limits are those of its container, or of its job or scope on a machine without containers; `cgroup` and `membership` are as of
    `cpu_limit`.
    """
    left = [_of_machine(meminfo), *map(_left, _groups("memory", cgroup, membership))]
    return min((bytes_ for bytes_ in left if bytes_ is not None), default=None)


def memory_owner(*, boot_id: Path = BOOT_ID, cgroup_namespace: Path = CGROUP_NAMESPACE) -> str:
    """Return a name of this machine, or of this container: processes of one name share the memory of `available_bytes`."""
    names = [socket.gethostname()]  # by itself it may be "localhost" on every machine
    with suppress(OSError):  # no Linux
        # Containers may have the name of their host, and a limit each.
        names += [boot_id.read_text(encoding="ascii").strip(), str(cgroup_namespace.readlink())]
    return " ".join(names)


def _of_machine(meminfo: Path) -> int | None:
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:  # no Linux
        return None
    return int(found[1]) * 1024 if found else None


def _left(group: Path) -> int | None:
    """Return limit less use, of a version 2 control group or of version 1; None where it has no limit.

    Cached files that are not in use count as free, since the kernel gives them up.
    """
    for limit, use, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with suppress(OSError, ValueError):
            most, used = (int((group / name).read_text(encoding="ascii")) for name in (limit, use))
            return max(0, most - used + _counts(group / "memory.stat").get(cache, 0))
    return None
