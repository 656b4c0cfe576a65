"""A bad network on loopback: what lies between peers and a learner, as slow as it is told, or deaf to one kind of message."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Self

from common.wire import header

CHUNK = 64 * 1024
GREETING = 64  # bytes of ZMTP 3 that come before the first frame
MORE, LONG, COMMAND = 1, 2, 4  # flags of a frame


class Proxy:
    """Passes each connection on to a port of this machine. A context manager; its threads end with its sockets."""

    def __init__(self, port: int, *, bytes_per_second: float = math.inf) -> None:
        """Listen on a free port. Each direction of each connection has `bytes_per_second` for itself."""
        self.withheld: str | None = None  # tag of the messages that no peer gets, from now on
        self._target, self._rate = port, bytes_per_second
        self._ended = threading.Event()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._start(self._accept)

    @property
    def endpoint(self) -> str:
        """What peers are told instead of the learner's address."""
        return f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        """Nothing to prepare."""
        return self

    def __exit__(self, *_: object) -> None:
        """Cut all connections."""
        self._ended.set()
        for end in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=work, args=arguments, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self._listener.accept()
                self._sockets.append(peer)
                try:
                    learner = socket.create_connection(("127.0.0.1", self._target))
                except OSError:  # not there yet: the peer tries again
                    peer.close()
                    continue
                self._sockets.append(learner)
                self._start(self._pass, _chunks(peer), learner, peer)
                self._start(self._pass, self._kept(learner), peer, learner)

    def _pass(self, parts: Iterator[bytes], sink: socket.socket, source: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError):
            for part in parts:
                for begin in range(0, len(part), CHUNK):
                    piece = part[begin : begin + CHUNK]
                    self._ended.wait(len(piece) / self._rate)
                    sink.sendall(piece)
        for end in (sink, source):  # half a connection is of no use to either side
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _kept(self, learner: socket.socket) -> Iterator[bytes]:
        """What the learner says, less the messages that are withheld, frame by frame."""
        for _ in range(GREETING):  # each side waits for parts of the other's
            yield _exactly(learner, 1)
        withholding = begun = False
        while True:
            head = _exactly(learner, 1)
            head += _exactly(learner, 8 if head[0] & LONG else 1)
            body = _exactly(learner, int.from_bytes(head[1:], "big"))
            if not head[0] & COMMAND:
                if not begun:
                    withholding = header.unpack(body)["tag"] == self.withheld
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
