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
from contextlib import contextmanager, suppress

import torch
from torch import multiprocessing

from common.algorithms.api import Algorithm, InParts
from common.algorithms.parts import Part, in_turn
from common.errors import InternalError
from common.runtime import logs, root
from common.runtime.cpu import cores
from common.runtime.shutdown import SIGNALS
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
        self._line.setblocking(False)
        self._patience = patience
        self._up: bool | None = None  # not known yet
        with theirs:
            self._process = multiprocessing.get_context("spawn").Process(
                target=_serve, args=(theirs, second, torch.get_num_threads()), name="partner", daemon=True
            )
            try:
                self._process.start()
            except BaseException:
                self._line.close()
                raise

    @property
    def pid(self) -> int | None:
        """Of the process."""
        return self._process.pid

    @property
    def up(self) -> bool:
        """Whether it computes its part. Where it ended before it could, that is said once, and it never will."""
        if self._up is None:
            try:
                self._up = bool(self._line.recv(1))
            except BlockingIOError:
                return False
            except ConnectionError:
                self._up = False
            if self._up:
                _log.info("partner_at_work", pid=self.pid)
            else:
                _alone(self._exit_code())
        return self._up

    def __call__(self, parts: Sequence[Part]) -> None:
        """Compute both parts once. Raises InternalError where the process is gone or stuck: what it did is then half done."""
        first, _ = parts
        if not self.up:
            in_turn(parts)
            return
        try:
            self._line.sendall(_HERE)
            for _ in first.run():
                self._line.sendall(_HERE)
                _meet(self._line, self._patience)
            _meet(self._line, self._patience)
        except ConnectionError as error:
            raise self._lost(self._exit_code()) from error
        except TimeoutError as error:
            raise self._lost(f"nothing from process {self.pid} for {self._patience:g} s") from error

    def _exit_code(self) -> str:
        self._process.join(LEAVE_SECONDS)
        return f"exit code {self._process.exitcode} of process {self.pid}"

    def _lost(self, found: str) -> InternalError:
        fix = "see what it said above; go on from the newest checkpoint with --resume"
        return InternalError("half of a gradient step is missing", found=found, wanted="the learner's partner at work", fix=fix)

    def close(self) -> None:
        """End the process."""
        self._line.close()
        self._process.join(LEAVE_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@contextmanager
def partnered(algorithm: Algorithm) -> Iterator[None]:
    """Inside, a partner computes the second of two parts, where the algorithm has them and there are two cores.

    The two share the threads that torch may use, at least one each. Where no process can be had, that is said, and all is
    computed here.
    """
    if not isinstance(algorithm, InParts) or len(algorithm.parts) != 2 or cores() == 1:  # noqa: PLR2004 - ours and the partner's
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // 2))
    try:
        partner = Partner(algorithm.parts[1])
    except (OSError, RuntimeError) as error:
        torch.set_num_threads(threads)
        _alone(error)
        yield
        return
    algorithm.run_parts = partner
    try:
        yield
    finally:
        algorithm.run_parts = in_turn
        partner.close()


def _alone(why: object) -> None:
    _log.warning("no_partner", why=why, consequence="gradient steps take nearly twice as long")


def _serve(line: socket.socket, part: Part, threads: int) -> None:
    """Compute `part` whenever asked, until the other end is closed, at the latest by its process's end: no deadline is needed."""
    for number in SIGNALS:  # whoever means the learner may reach both of us: it ends us when it has saved its work
        signal.signal(number, signal.SIG_IGN)
    root.set_torch_threads(threads)
    line.setblocking(False)
    with suppress(ConnectionError):
        line.sendall(_HERE)
        while True:
            _meet(line, None)
            for _ in part.run():
                line.sendall(_HERE)
                _meet(line, None)
            line.sendall(_HERE)


def _meet(line: socket.socket, patience: Seconds | None) -> None:
    """Return when the other has come. Raises ConnectionError where it is gone, and TimeoutError."""
    come, until = None, time.monotonic() + WATCH_SECONDS
    while come is None and time.monotonic() < until:
        try:
            come = line.recv(1)
        except BlockingIOError:
            os.sched_yield()  # whoever else waits for this core goes first
    if come is None:
        sleeper = select.poll()
        sleeper.register(line, select.POLLIN)
        if not sleeper.poll(None if patience is None else patience * 1000):
            raise TimeoutError
        come = line.recv(1)
    if not come:
        raise ConnectionResetError
