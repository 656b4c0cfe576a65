"""How many cores this machine, or the container that it is, gives to this process."""

from __future__ import annotations

import os
from pathlib import Path

from common.runtime.memory import CGROUP


def cores(*, cgroup: Path = CGROUP) -> int:
    """Those it may run on, or the whole ones of the container's quota where these are fewer; at least 1."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, int(_quota(cgroup) or usable)))


def _quota(cgroup: Path) -> float | None:
    """Core seconds per second, of version 2 control groups or of version 1; None where there is no limit."""
    try:
        most, period = (cgroup / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:
            most, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text(encoding="ascii") for name in ("quota", "period"))
        except OSError:
            return None
    try:
        quota = int(most) / int(period)
    except ValueError:  # "max"
        return None
    return quota if quota > 0 else None  # version 1 says -1
