"""A faulty network on loopback, between workers and a learner: it delays, throttles, corrupts, drops messages, stalls and cuts.

Every fault is an attribute that may be changed at any time and holds for all connections from then on. Each direction of
each connection has two threads: one receives, one sends what is due.
"""

from __future__ import annotations

import contextlib
import math
import queue
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Self

from common.protocol import header
from common.units import Seconds

CHUNK = 64 * 1024
BACKLOG = 64  # chunks that one direction holds: as much as the buffers of a long line
GREETING = 64  # bytes of ZMTP 3 that come before the first frame
MORE, LONG, COMMAND = 1, 2, 4  # flags of a frame


class Proxy:
    """Forwards each connection to a port of this machine. A context manager; its threads end with its sockets."""

    def __init__(self, port: int, *, bytes_per_second: float = math.inf) -> None:
        """Listen on a free port. Each direction of each connection has `bytes_per_second` for itself."""
        self.withheld: str | None = None  # tag of the messages that no worker gets, from now on
        self.bytes_per_second = bytes_per_second
        self.delay: tuple[Seconds, Seconds] = (0.0, 0.0)  # each chunk arrives later by a time drawn from this range, in order
        self.corrupted = 0.0  # probability that one byte of a chunk is changed
        self.chance = random.Random(0)  # noqa: S311  seeded: the same faults again
        self._target = port
        self._open = threading.Event()  # clear: nothing passes, and no connection ends
        self._open.set()
        self._ended = threading.Event()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._start(self._accept)

    @property
    def endpoint(self) -> str:
        """Return the address that workers connect to instead of the learner's."""
        return f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        """Do nothing: there is nothing to prepare."""
        return self

    def __exit__(self, *_: object) -> None:
        """Cut all connections."""
        self._ended.set()
        self._open.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """End every open connection."""
        sockets, self._sockets = self._sockets, []
        for end in sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def pass_nothing(self, *, on: bool) -> None:
        """Hold everything back, as a network that loses all packets, or pass it on again."""
        if on:
            self._open.clear()
        else:
            self._open.set()

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=work, args=arguments, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                worker, _ = self._listener.accept()
                self._sockets.append(worker)
                try:
                    learner = socket.create_connection(("127.0.0.1", self._target))
                except OSError:  # not there yet: the worker tries again
                    worker.close()
                    continue
                self._sockets.append(learner)
                for chunks, sink, source in ((_chunks(worker), learner, worker), (self._kept(learner), worker, learner)):
                    due: queue.Queue[tuple[Seconds, bytes]] = queue.Queue(BACKLOG)
                    self._start(self._receive, chunks, due)
                    self._start(self._pass, due, sink, source)

    def _receive(self, chunks: Iterator[bytes], due: queue.Queue[tuple[Seconds, bytes]]) -> None:
        with contextlib.suppress(OSError, EOFError):
            for part in chunks:
                for begin in range(0, len(part), CHUNK):
                    due.put((time.monotonic() + self.chance.uniform(*self.delay), part[begin : begin + CHUNK]))
        due.put((0.0, b""))

    def _pass(self, due: queue.Queue[tuple[Seconds, bytes]], sink: socket.socket, source: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                at, piece = due.get()
                self._open.wait()
                if not piece:
                    break
                self._ended.wait(max(0.0, at - time.monotonic()) + len(piece) / self.bytes_per_second)
                sink.sendall(self._damaged(piece))
        for end in (sink, source):  # half a connection is of no use to either side
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        while piece:  # the receiver must not wait for room
            _, piece = due.get()

    def _damaged(self, piece: bytes) -> bytes:
        if self.chance.random() >= self.corrupted:
            return piece
        place = self.chance.randrange(len(piece))
        return piece[:place] + bytes([piece[place] ^ self.chance.randrange(1, 256)]) + piece[place + 1 :]

    def _kept(self, learner: socket.socket) -> Iterator[bytes]:
        """Yield what the learner sends, less the messages that are withheld, one ZMTP frame at a time."""
        for _ in range(GREETING):  # each side waits for parts of the other's
            yield _exactly(learner, 1)
        withholding = begun = False
        while True:
            head = _exactly(learner, 1)
            head += _exactly(learner, 8 if head[0] & LONG else 1)
            body = _exactly(learner, int.from_bytes(head[1:], "big"))
            if not head[0] & COMMAND:
                if not begun:
                    withholding = self.withheld is not None and header.unpack(body)["tag"] == self.withheld
                begun = bool(head[0] & MORE)
            if head[0] & COMMAND or not withholding:
                yield head + body


def _chunks(source: socket.socket) -> Iterator[bytes]:
    while part := source.recv(CHUNK):
        yield part


def _exactly(source: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = source.recv(min(count, CHUNK))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
