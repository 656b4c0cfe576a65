"""Free memory of this machine or container, and the decision that too little of it is left."""

from __future__ import annotations

import ctypes
import re
import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

STATM = Path("/proc/self/statm")
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


RESERVE_SHARE = 1 / 16  # of the memory that was free at the start
LEAST_RESERVE = 256 * 2**20  # bytes; ZeroMQ's one thread stores 230 MB in the 0.1 s between two looks


class MemoryGuard:
    """Decides when memory is so short that data stored for strangers must be freed. Owned by the thread that frees it."""

    def __init__(
        self,
        *,
        available: Callable[[], int | None] | None = None,
        resident: Callable[[], int] | None = None,
    ) -> None:
        """Create it before there is anything to free. By default it reads the figures of this process and its machine."""
        self._available = available or available_bytes
        self._resident = resident or resident_bytes
        room = self._available() or 0
        self.reserve = round(min(room / 2, max(LEAST_RESERVE, room * RESERVE_SHARE)))
        """Bytes that must stay free. Where it is not known what is free, 0: the guard is off."""
        self._base = self._seen = self._resident()

    def short(self) -> bool:
        """Return whether less than the reserve is free, and this process has grown by half of it since the last `freed`.

        Without that growth other processes took the memory, or the growth cannot be freed: freeing again would gain nothing.
        """
        self._seen = self._resident()
        if self._seen - self._base <= self.reserve / 2:
            return False
        available = self._available()
        return available is not None and available < self.reserve

    def freed(self) -> int:
        """Return freed memory to the system and measure growth anew; return the bytes that the process lost since `short`."""
        with suppress(AttributeError, OSError):  # a C library other than glibc
            # glibc keeps freed memory where something in use lies above it, and a container counts that memory.
            ctypes.CDLL(None).malloc_trim(0)
        self._base = self._resident()
        return max(0, self._seen - self._base)


def resident_bytes(*, statm: Path = STATM) -> int:
    """Return the physical memory of this process; 0 where the system does not report it."""
    try:
        return int(statm.read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    except OSError:  # no Linux
        return 0


def available_bytes(*, meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """What a process could still take without swapping, by the kernel's estimate and the container's limit; None: unknown."""
    known = [bytes_ for bytes_ in (_of_machine(meminfo), _of_container(cgroup)) if bytes_ is not None]
    return min(known, default=None)


def _of_machine(meminfo: Path) -> int | None:
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:  # no Linux
        return None
    return int(found[1]) * 1024 if found else None


def _of_container(cgroup: Path) -> int | None:
    """Limit less use, of version 2 control groups or of version 1; None where there is no limit."""
    left = _left(cgroup, limit="memory.max", use="memory.current", cache="inactive_file")
    if left is not None:
        return left
    return _left(cgroup / "memory", limit="memory.limit_in_bytes", use="memory.usage_in_bytes", cache="total_inactive_file")


def _left(cgroup: Path, *, limit: str, use: str, cache: str) -> int | None:
    """What is left of the limit; files read and not in use any more are given up when memory is wanted, and count as free."""
    try:
        most, used = (int((cgroup / name).read_text(encoding="ascii")) for name in (limit, use))
        found = re.search(rf"^{cache} (\d+)$", (cgroup / "memory.stat").read_text(encoding="ascii"), re.MULTILINE)
    except (OSError, ValueError):
        return None
    return max(0, most - used + (int(found[1]) if found else 0))
