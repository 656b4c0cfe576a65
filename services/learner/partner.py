"""A second process that computes one part of the algorithm's gradient step, on a core of its own.

A thread would wait for the interpreter's lock between all operations of a step, and hold up the first one. The two processes have
the part's tensors in common, and a socket, on which a byte says "I have come this far".
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import torch
from torch import multiprocessing

from common.algorithms.api import Algorithm, InParts
from common.algorithms.parts import Part, in_turn
from common.errors import InternalError
from common.runtime import logs
from common.units import Seconds

MEETING_SECONDS: Seconds = 60.0  # a part that has not come by then is stuck
WATCH_SECONDS: Seconds = 0.002  # for the other, awake: most waits are shorter than it takes to be woken
LEAVE_SECONDS: Seconds = 5.0
_HERE = b"."

_log = logs.EventLog(__name__)


class Partner:
    """`RunParts` of two: the first part here and the second there; both here until the process is up, which takes seconds."""

    def __init__(self, second: Part, *, patience: Seconds = MEETING_SECONDS) -> None:
        """Move the tensors of `second` into shared memory, whoever else holds them, and start the process.

        Raises RuntimeError or OSError where there is no shared memory for them, or no process to be had.
        """
        self._line, theirs = socket.socketpair()
        self._patience = patience
        self._up = False
        with theirs:
            self._process = multiprocessing.get_context("spawn").Process(
                target=_serve, args=(theirs, second, torch.get_num_threads()), name="partner", daemon=True
            )
            self._process.start()
        self._line.setblocking(False)

    @property
    def pid(self) -> int | None:
        """Of the process."""
        return self._process.pid

    @property
    def up(self) -> bool:
        """Whether it is ready to compute. Raises InternalError where it ended instead."""
        if not self._up:
            try:
                self._up = self._there(self._line.recv(1))
            except BlockingIOError:
                return False
            except ConnectionError as error:
                raise self._gone() from error
        return self._up

    def __call__(self, parts: Sequence[Part]) -> None:
        """Compute both parts once. Raises InternalError where the process is gone or stuck: what it does is then half done."""
        first, _ = parts
        if not self.up:
            in_turn(parts)
            return
        try:
            self._line.sendall(_HERE)
            for _ in first.run():
                self._line.sendall(_HERE)
                self._there(_come(self._line, self._patience))
            self._there(_come(self._line, self._patience))
        except ConnectionError as error:
            raise self._gone() from error
        except TimeoutError as error:
            raise self._lost(f"nothing from process {self.pid} for {self._patience:g} s") from error

    def _there(self, come: bytes) -> bool:
        if not come:
            raise self._gone()
        return True

    def _gone(self) -> InternalError:
        self._process.join(LEAVE_SECONDS)
        return self._lost(f"exit code {self._process.exitcode} of process {self.pid}")

    def _lost(self, found: str) -> InternalError:
        fix = "see what it said above; go on from the newest checkpoint with --resume"
        return InternalError("half of a gradient step is missing", found=found, wanted="the partner at work", fix=fix)

    def close(self) -> None:
        """End the process."""
        self._line.close()
        self._process.join(LEAVE_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@contextmanager
def partnered(algorithm: Algorithm) -> Iterator[None]:
    """Inside, a partner computes the second of two parts, where the algorithm has them and the machine two cores.

    Where no process can be had, that is said, and all is computed here.
    """
    parts = algorithm.parts if isinstance(algorithm, InParts) else ()
    if not isinstance(algorithm, InParts) or len(parts) != 2 or (os.cpu_count() or 1) == 1:  # noqa: PLR2004 - ours and its own
        yield
        return
    try:
        partner = Partner(parts[1])
    except (OSError, RuntimeError) as error:
        _log.warning("no_partner", error=error, consequence="gradient steps take nearly twice as long")
        yield
        return
    _log.info("partner_started", pid=partner.pid)
    with closing(partner):
        algorithm.run_parts = partner
        yield


def _serve(line: socket.socket, part: Part, threads: int) -> None:
    """Compute `part` whenever asked, until the other end is closed, at the latest by its process's end: no deadline is needed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches both; the other end ends us
    torch.set_num_threads(threads)
    line.setblocking(False)
    try:
        line.sendall(_HERE)
        while _come(line, None):
            for _ in part.run():
                line.sendall(_HERE)
                if not _come(line, None):
                    return
            line.sendall(_HERE)
    except ConnectionError:
        return


def _come(line: socket.socket, patience: Seconds | None) -> bytes:
    """The other's byte, when it is there; empty where the other is gone. Raises TimeoutError."""
    until = time.monotonic() + WATCH_SECONDS
    while time.monotonic() < until:
        try:
            return line.recv(1)
        except BlockingIOError:
            os.sched_yield()  # whoever else waits for this core goes first
    sleeper = select.poll()
    sleeper.register(line, select.POLLIN)
    if not sleeper.poll(None if patience is None else patience * 1000):
        raise TimeoutError
    return line.recv(1)
