"""Resource samples of the processes of a deployment, and their summary over a storm."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Self

import psutil

from benchmarks.chaos.deployment import Deployment
from common.units import MIB, Seconds

EVERY: Seconds = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Resources that one process holds."""

    rss_mib: float
    descriptors: int
    threads: int


def usage(pid: int) -> Usage | None:
    """Return the resources that the process holds now; None where it has ended."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            return Usage(rss_mib=process.memory_info().rss / MIB, descriptors=process.num_fds(), threads=process.num_threads())
    except psutil.Error:
        return None


@dataclass
class Sampler:
    """Watches the learner from its own thread. A context manager."""

    deployment: Deployment
    peak_rss_mib: float = 0.0
    _ended: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(EVERY):
            if found := usage(self.deployment.pid("learner")):
                self.peak_rss_mib = max(self.peak_rss_mib, found.rss_mib)


def cpu_seconds(pid: int) -> Seconds:
    """Return the CPU time of a process and all its threads; 0 where it has ended."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return times.user + times.system


def honest_rate(deployment: Deployment, seconds: Seconds) -> float:
    """Return the env steps per second of the actors over the next `seconds`."""
    before, at = sum(deployment.steps().values()), time.monotonic()
    time.sleep(seconds)
    return (sum(deployment.steps().values()) - before) / (time.monotonic() - at)
