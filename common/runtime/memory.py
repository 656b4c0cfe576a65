"""How much memory this machine, or the container that it is, can still give."""

from __future__ import annotations

import re
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


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
