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
    """Limit less use, of version 2 control groups; None where there is no limit ("max")."""
    try:
        limit, used = (int((cgroup / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):
        return None
    return max(0, limit - used)
