"""A process that sends hostile messages at a fixed rate: `python -m benchmarks.chaos.flooder tcp://HOST:PORT ...`.

Without keys each connection is a plain TCP socket that sends a ZMTP greeting and messages whatever the learner answers;
with keys the messages come from sockets whose key the learner accepts. `--dry` sends them to a listener of this process, so that
the same CPU time is spent beside the learner and nothing reaches it. Prints the messages sent and the CPU share at the end.
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

    def __init__(self, endpoint: str) -> None:
        """Connect with the first message."""
        address = parse_endpoint(endpoint)
        self._address, self._socket, self._sent = (address.host, address.port), None, 0

    def send(self, frames: Frames) -> None:
        """Write one message, and begin a new connection where the last one was closed or has had its share."""
        if self._socket is None:
            self._socket, self._sent = socket.create_connection(self._address, timeout=1.0), 0
            self._socket.sendall(GREETING + READY)
        try:
            self._socket.sendall(zmtp(frames))
            self._sent += 1
        except OSError:
            self._sent = BURST
        if self._sent >= BURST:
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
        for number in range(CONNECTIONS):
            dealer = self._context.socket(zmq.DEALER)
            for option, value in {**(WorkerKeys.of(keys).options if keys else {}), zmq.LINGER: 0, zmq.SNDTIMEO: 1000}.items():
                dealer.setsockopt(option, value)
            dealer.connect(endpoint)
            with contextlib.suppress(zmq.Again):
                dealer.send_multipart(messages.own_hello(self._target, f"flooder-{number}"))
            self._sockets.append(dealer)
        if self._sockets[0].poll(2000):
            self._target = messages.learned(self._target, self._sockets[0].recv_multipart())

    def send(self, frames: Frames) -> None:
        """Send one message over the next connection, and read its pending answers if this connection reads at all."""
        self._turn = (self._turn + 1) % CONNECTIONS
        dealer = self._sockets[self._turn]
        with contextlib.suppress(zmq.Again):
            dealer.send_multipart(frames)
        while self._turn % 2 == 0 and dealer.poll(0):
            dealer.recv_multipart()

    def target(self) -> Target:
        """Return the target, as far as the learner's Welcome describes it."""
        return self._target


def flood(send: Callable[[Frames], None], source: Iterator[Frames], *, count: int, rate: float) -> None:
    """Send `count` messages, `rate` per second on average."""
    began, sent = time.monotonic(), 0
    while sent < count:
        for _ in range(max(0, min(count, round((time.monotonic() - began) * rate)) - sent)):
            with contextlib.suppress(OSError):
                send(next(source))
            sent += 1
        time.sleep(0.01)


def _listener() -> str:
    """Accept connections and discard their input, in the background; returns the endpoint."""
    server = socket.create_server(("127.0.0.1", 0), backlog=512)

    def discard(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            while connection.recv(1 << 16):
                pass

    def accept() -> None:
        while True:
            threading.Thread(target=discard, args=(server.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return f"tcp://127.0.0.1:{server.getsockname()[1]}"


def main(argv: Sequence[str] | None = None) -> None:
    """Flood until the count is reached; prints "begun" at the start, then seconds and CPU share."""
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
    sender = Keyed(options.endpoint, options.keys) if options.inside else Plain(options.endpoint)
    source = messages.flood(random.Random(options.seed), sender.target)  # noqa: S311  seeded
    print("begun", flush=True)
    began, spent = time.monotonic(), sum(os.times()[:2])
    flood(Plain(_listener()).send if options.dry else sender.send, source, count=options.count, rate=options.rate)
    took = time.monotonic() - began
    print(f"{took:.2f} {(sum(os.times()[:2]) - spent) / took:.3f}", flush=True)
    os._exit(0)  # unread sockets must not delay the exit


if __name__ == "__main__":
    main()
