"""Runs a service under a wall clock that can be stepped: `python -m benchmarks.chaos.clock FILE MODULE ARGUMENTS...`.

`time.time` and `time.time_ns` of that process return the true time plus the offset in FILE. The monotonic clock, the
kernel and libzmq keep the true time, as on a machine where the wall clock is set. libfaketime 0.9.10 is not used, because
`time.sleep` fails with EINVAL under it.
"""

from __future__ import annotations

import mmap
import runpy
import struct
import sys
import time
from pathlib import Path

from common.units import Seconds

_OFFSET = struct.Struct("<q")  # seconds


class Clock:
    """The wall clock of all processes that run under the file `path`."""

    def __init__(self, path: Path) -> None:
        """Begin with the true time."""
        self.path = path
        path.write_bytes(_OFFSET.pack(0))

    def step(self, offset: Seconds) -> None:
        """Show the true time plus `offset`, whole seconds, from now on."""
        with self.path.open("r+b") as file:
            file.write(_OFFSET.pack(round(offset)))


def _under(path: Path) -> None:
    with path.open("rb") as file:
        shown = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    true, true_ns = time.time, time.time_ns
    time.time = lambda: true() + _OFFSET.unpack_from(shown)[0]
    time.time_ns = lambda: true_ns() + _OFFSET.unpack_from(shown)[0] * 10**9


if __name__ == "__main__":
    _under(Path(sys.argv[1]))
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
