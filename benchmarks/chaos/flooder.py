"""A process that sends hostile messages at a fixed rate: `python -m benchmarks.chaos.flooder tcp://HOST:PORT ...`.

Without keys each connection is a plain TCP socket that sends a ZMTP greeting and messages whatever the learner answers;
with keys the messages come from sockets whose key the learner accepts. `--dry` sends them to a listener of this process, so that
the same CPU time is spent beside the learner and nothing reaches it. Prints messages written, seconds and CPU share at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import zmq

from benchmarks.chaos import messages
from benchmarks.chaos.messages import Frames, Target
from common.config.endpoint import parse_endpoint
from common.transport.curve import WorkerKeys

CONNECTIONS = 8
BURST = 50  # messages of one plain connection
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_PROPERTIES = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
READY = bytes([4, len(_PROPERTIES)]) + _PROPERTIES
MORE, LONG = 1, 2  # flags of a ZMTP frame
ONE_BYTE = 256


def zmtp(frames: Frames) -> bytes:
    """Return a message as ZMTP 3 puts it on the wire."""
    out = bytearray()
    for rest, frame in zip(range(len(frames) - 1, -1, -1), frames, strict=True):
        long = len(frame) >= ONE_BYTE
        out += bytes([(MORE if rest else 0) | (LONG if long else 0)])
        out += len(frame).to_bytes(8 if long else 1, "big") + frame
    return bytes(out)


class Plain:
    """Connections without keys, a new one for each `BURST` of messages."""

    def __init__(self, endpoint: str, *, door: bool = False) -> None:
        """Connect with the first message; `door`: the learner has keys, and ends each connection without a READY."""
        address = parse_endpoint(endpoint)
        self._address, self._sent, self._door = (address.host, address.port), 0, door
        self._socket: socket.socket | None = None

    def send(self, frames: Frames) -> None:
        """Write one message, over a new connection where the last one failed or has had its share. Raises OSError."""
        try:
            if self._socket is None:
                self._socket, self._sent = socket.create_connection(self._address, timeout=10.0), 0
                self._socket.sendall(GREETING + READY)
                if not self._door:  # libzmq ends most connections whose messages arrive before its READY has left
                    self._read(len(GREETING + READY))
            self._socket.sendall(zmtp(frames))
            self._sent += 1
            if self._sent >= BURST:
                self._socket.shutdown(socket.SHUT_WR)
                self._read()  # closed with unread input, the connection would be reset, and its last messages lost
                self._close()
        except OSError:
            self._close()
            raise

    def _read(self, count: int = -1) -> None:
        """Read `count` bytes, or up to the end of the connection."""
        assert self._socket is not None
        with self._socket.makefile("rb") as answers:
            answers.read(count)

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def target(self) -> Target:
        """Return a target without facts of the run: an unauthenticated sender receives none."""
        return Target()


class Keyed:
    """Connections whose key the learner accepts; half of them never read the learner's answers."""

    def __init__(self, endpoint: str, keys: str) -> None:
        """Connect, and greet as an actor to learn the run's schema."""
        self._target, self._turn = Target(), 0
        self._context = zmq.Context()
        self._sockets = []
        own = WorkerKeys.of(keys)
        for number in range(CONNECTIONS):
            dealer = self._context.socket(zmq.DEALER)
            for option, value in {**(own.options if own else {}), zmq.LINGER: 0, zmq.SNDTIMEO: 1000}.items():
                dealer.setsockopt(option, value)
            dealer.connect(endpoint)
            with contextlib.suppress(zmq.Again):
                dealer.send_multipart(messages.own_hello(self._target, f"flooder-{number}"))
            self._sockets.append(dealer)
        if self._sockets[0].poll(2000):
            self._target = messages.learned(self._target, self._sockets[0].recv_multipart())

    def send(self, frames: Frames) -> None:
        """Send one message over the next connection, after its answers were read if it reads at all. Raises `zmq.Again`."""
        self._turn = (self._turn + 1) % CONNECTIONS
        dealer = self._sockets[self._turn]
        while self._turn % 2 == 0 and dealer.poll(0):
            dealer.recv_multipart()
        dealer.send_multipart(frames)

    def target(self) -> Target:
        """Return the target, as far as the learner's Welcome describes it."""
        return self._target


def flood(send: Callable[[Frames], None], source: Iterator[Frames], *, count: int, rate: float) -> int:
    """Try to send `count` messages, `rate` per second on average; return how many were written."""
    began, tried, written = time.monotonic(), 0, 0
    while tried < count:
        for _ in range(max(0, min(count, round((time.monotonic() - began) * rate)) - tried)):
            with contextlib.suppress(OSError, zmq.Again):
                send(next(source))
                written += 1
            tried += 1
        time.sleep(0.01)
    return written


def _listener() -> str:
    """Accept connections, answer their greeting and discard their input, in the background; returns the endpoint."""
    server = socket.create_server(("127.0.0.1", 0), backlog=512)

    def discard(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.sendall(GREETING + READY)
            while connection.recv(1 << 16):
                pass

    def accept() -> None:
        while True:
            threading.Thread(target=discard, args=(server.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return f"tcp://127.0.0.1:{server.getsockname()[1]}"


def main(argv: Sequence[str] | None = None) -> None:
    """Flood until the count is reached; prints "begun" at the start, then messages written, seconds and CPU share."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("endpoint")
    parser.add_argument(
        "--inside", action="store_true", help="as a worker that keeps to the protocol, with --keys if there are any"
    )
    parser.add_argument("--keys", default="")
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True, help="messages per second")
    parser.add_argument("--seed", required=True)
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args(argv)
    door = bool(options.keys)
    sender = Keyed(options.endpoint, options.keys) if options.inside else Plain(options.endpoint, door=door)
    source = messages.flood(random.Random(options.seed), sender.target)  # noqa: S311  seeded
    print("begun", flush=True)
    began, spent = time.monotonic(), sum(os.times()[:2])
    send = Plain(_listener(), door=door).send if options.dry else sender.send
    written = flood(send, source, count=options.count, rate=options.rate)
    took = time.monotonic() - began
    print(f"{written} {took:.2f} {(sum(os.times()[:2]) - spent) / took:.3f}", flush=True)
    os._exit(0)  # unread sockets must not delay the exit


if __name__ == "__main__":
    main()
