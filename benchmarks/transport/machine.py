"""CPU seconds of the learner's two threads that move messages, and the descriptors of this process."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import NamedTuple, Self

from common.errors import ResourceError
from common.protocol.events import LogEvent
from common.units import Seconds

_THREAD_CLOCK = 6  # kind of a clock of the kernel: CPU time of one thread, see clock_getcpuclockid(3)


class ThreadSeconds(NamedTuple):
    """CPU seconds of the intake thread and of ZeroMQ's threads."""

    intake: Seconds
    zmq: Seconds

    @classmethod
    def now(cls) -> Self:
        """Return the seconds since both began."""
        python = {thread.native_id: thread.name for thread in threading.enumerate()}
        intake = zmq = 0.0
        for task in Path("/proc/self/task").iterdir():
            name = python.get(int(task.name)) or (task / "comm").read_text()
            seconds = time.clock_gettime((~int(task.name) << 3) | _THREAD_CLOCK)
            intake += seconds if name == "intake" else 0.0
            zmq += seconds if name.startswith("ZMQ") else 0.0
        return cls(intake, zmq)

    def __sub__(self, other: ThreadSeconds) -> ThreadSeconds:
        """Return the seconds between two readings."""
        return ThreadSeconds(self.intake - other.intake, self.zmq - other.zmq)


def open_descriptors() -> int:
    """Return the number of files and connections that this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def raise_warning(note: LogEvent) -> None:
    """Raise `ResourceError` for a warning: a refused or repeated message would be counted as speed.

    A handshake may fail where other work has the cores, and is repeated.
    """
    if note.warning and note.event != "handshake_failed":
        raise ResourceError(note.event, found=str(note.fields))
