"""Seconds until all workers of a killed learner are welcomed by its successor at the same address.

The learner is a process of its own, killed without warning while its workers send. The workers use ZeroMQ's own reconnection with
the options of `common.transport.zmq`, and greet as any worker does. The successor has no checkpoint.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

from benchmarks.transport.messages import START_SECONDS, WAIT_SECONDS, WARM_SECONDS, crowd_of, serving
from benchmarks.transport.sessions import Crowd, connected, require_alive
from common.errors import ResourceError
from common.units import Seconds
from services.learner.intake import Intake

AWAY_SECONDS: Seconds = 5.0  # between the kill and the start of the successor: the import of torch alone takes that long
HEARTBEAT_SECONDS: Seconds = 1.0  # as in a run


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Result of one kill."""

    workers: int
    first: Seconds  # until all workers were welcomed by the first learner, from its first moment on the port
    again: Seconds  # the same of its successor
    hellos: int  # that the successor received until then
    handshakes_failed: int  # at the successor


def measure(workers: int, *, rate: float) -> Restart:
    """Connect all workers, kill the learner, start another, and wait until all are welcomed again."""
    crowd = crowd_of(workers, rate, heartbeat_seconds=HEARTBEAT_SECONDS)
    with _learner(crowd, "tcp://127.0.0.1:0", resumed=False) as before:
        endpoint = before.recv()
        with connected(crowd, endpoint) as processes:
            first, _, _ = before.recv()
            time.sleep(WARM_SECONDS)
            before.send("die")
            _wait_for_end(before)
            time.sleep(AWAY_SECONDS)
            with _learner(crowd, endpoint, resumed=True) as after:
                after.recv()
                again, hellos, failed = after.recv()
            require_alive(processes)
    return Restart(workers=workers, first=first, again=again, hellos=hellos, handshakes_failed=failed)


@contextmanager
def _learner(crowd: Crowd, endpoint: str, *, resumed: bool) -> Iterator[Connection]:
    """Run a learner in a process of its own; yields the connection to it. It is killed in the end."""
    receiver, sender = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        arguments = crowd, endpoint, resumed, sender, folder
        process = multiprocessing.get_context("spawn").Process(target=_serve, args=arguments, daemon=True)
        process.start()
        sender.close()
        try:
            yield receiver
        finally:
            process.kill()
            process.join()


def _serve(crowd: Crowd, endpoint: str, resumed: bool, results: Connection, folder: str) -> None:
    """Be the learner: send the endpoint, then the result once all workers are welcomed, then train until killed."""
    tempfile.tempdir = folder  # a killed process does not remove its own
    with serving(crowd, endpoint, resumed=resumed) as (intake, bound):
        began = time.monotonic()
        results.send(bound)
        while intake.stats.actors < crowd.workers:
            _train(intake)
            if time.monotonic() - began > START_SECONDS:
                raise ResourceError("synthetic workers were not welcomed", found=intake.stats.actors, wanted=crowd.workers)
        failed = intake.stats.handshakes_failed.total()
        results.send((time.monotonic() - began, intake.stats.received["hello"], failed))
        while not results.poll():
            _train(intake)
        results.recv()  # unread it would reset the connection instead of ending it
        os.kill(os.getpid(), signal.SIGKILL)


def _train(intake: Intake) -> None:
    intake.complete(intake.take(1, WAIT_SECONDS))


def _wait_for_end(learner: Connection) -> None:
    try:
        learner.recv()
    except EOFError:
        return


def report(result: Restart) -> str:
    """Return the result as a line of text."""
    counts = f"{result.hellos:,} Hellos, {result.handshakes_failed} failed handshakes"
    return (
        f"{result.workers:,} workers: all welcomed {result.first:.1f} s after the learner's start, "
        f"and {result.again:.1f} s after the start of its successor ({counts})"
    )
