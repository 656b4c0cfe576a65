"""A ZeroMQ socket, its options and its thread. Only this module, `zmq` and `curve` import zmq.

Every option below is set on every socket before it binds or connects (ZeroMQ ignores later changes without an error). libzmq
4.3.5 aborts the process where its own heartbeats or limits on input meet a lost connection (decision 24). A socket belongs to the
one thread that sends and receives; only `wake` may come from another.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Final

import zmq

from common.errors import HandshakeFailure
from common.protocol.limits import ARRAY_BYTES, ARRAYS
from common.transport.api import Frame, Handshakes
from common.transport.curve import HandshakeMonitor, ZapAuthenticator
from common.units import Seconds

LINGER: Final = 2.0
"""Seconds that `close` spends at most on what was handed over: a Goodbye or a last Credit, not a backlog."""

COPY_BELOW: Final = 64 * 1024
"""Bytes under which a message part is copied: cheaper than sharing it between threads, and it comes out aligned."""

POLL_MONITOR_SECONDS: Final = 0.05
"""Between two polls of the handshake monitor while messages arrive: often enough for new workers, too rare to cost time."""

MILLISECONDS: Final = {
    # A connection is broken once what was sent stays unacknowledged this long; the session sends every second.
    zmq.TCP_MAXRT: 8_000,
    zmq.HEARTBEAT_IVL: 0,  # none: a heartbeat that is due on a connection with an error aborts the process
    zmq.HANDSHAKE_IVL: 5_000,  # a port scanner that connects and sends nothing
}
OPTIONS: Final = {
    zmq.MAXMSGSIZE: ARRAY_BYTES,  # of one part; ZeroMQ closes the connection of a worker that announces a larger one
    zmq.SNDHWM: 64,  # messages per connection, of a server: a worker that does not read is away
    zmq.RCVHWM: 0,  # no limit: a PING behind the message that meets one aborts the process
    zmq.TCP_KEEPALIVE: 1,  # for connections of senders that never greet, and connection trackers that forget idle ones
    zmq.TCP_KEEPALIVE_IDLE: 30,
    zmq.TCP_KEEPALIVE_INTVL: 10,
    zmq.TCP_KEEPALIVE_CNT: 3,
}


class ZmqSocket:
    """A socket with its own context, a way to wait for it, and a way to end that wait from another thread."""

    def __init__(self, kind: int, endpoint: str, options: Mapping[zmq.SocketOption, int | bytes], linger: Seconds) -> None:
        self._kind = kind
        # IPv6 by number alone: for a name or the wildcard it would change which address is taken, and how it is written.
        own = {zmq.IPV6: "[" in endpoint, zmq.LINGER: round(linger * 1000)}
        self._options: Mapping[zmq.SocketOption, int | bytes] = {**OPTIONS, **MILLISECONDS, **options, **own}
        self.handshakes = Handshakes()  # as of the last `receive`
        self._authenticator: ZapAuthenticator | None = None
        self.received_key = ""
        self._poll_monitor_at: Seconds = 0.0
        self._waker, self._wakened = socket.socketpair()
        self._waker.setblocking(False)
        self._wakened.setblocking(False)
        self._open()

    def _open(self) -> None:
        """Make a socket, neither bound nor connected, in a context of its own."""
        self._context = zmq.Context()
        self._socket = self._context.socket(self._kind)
        self._monitor = HandshakeMonitor(self._socket, self.handshakes, self._explain)
        for option, value in self._options.items():
            self._socket.setsockopt(option, value)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wakened.fileno(), zmq.POLLIN)

    def _shut(self) -> None:
        self._monitor.close()
        self._socket.close()
        if self._authenticator:
            self._authenticator.close()
        self._context.term()

    def wake(self) -> None:
        """Make a waiting `receive`, or the next one that finds nothing, return None. Safe from any thread, even after `close`."""
        with contextlib.suppress(OSError):  # full: a wake is pending already; closed: no thread waits
            self._waker.send(b"\0")

    def close(self) -> None:
        """Close the socket and its context, within the linger. Call it from the thread that uses the socket."""
        if not self._socket.closed:
            self._waker.close()
            self._wakened.close()
            self._shut()

    def _send(self, frames: Sequence[Frame]) -> bool:
        sent = True
        last = len(frames) - 1
        for number, frame in enumerate(frames):
            try:
                self._socket.send(frame, _NOW if number == last else _NOW_AND_MORE, copy=False)
            except zmq.ZMQError as error:
                # Buffers full or no connection (EAGAIN), route gone (EHOSTUNREACH), closed (ENOTSOCK).
                if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH, zmq.ENOTSOCK):
                    raise
                if number == 0:
                    return False
                # The connection broke inside the message. ZeroMQ drops the rest of it, and must be given that rest:
                # otherwise it would take the next message for it.
                sent = False
        return sent

    def _receive(self, timeout: Seconds) -> list[Frame] | None:
        if self._socket.closed:
            return None
        if time.monotonic() >= self._poll_monitor_at:
            self._poll_monitor()
            self._poll_monitor_at = time.monotonic() + POLL_MONITOR_SECONDS
        return self._receive_now() if timeout <= 0 or self._wait(timeout) else None

    def _wait(self, timeout: Seconds) -> bool:
        """Return whether the socket has a message. A wake is spent only where it has none; waiting handshakes are answered."""
        deadline = time.monotonic() + timeout
        while True:
            ready = dict(self._poller.poll(max(0, math.ceil((deadline - time.monotonic()) * 1000))))
            if self._socket in ready:
                return True
            if self._wakened.fileno() in ready:
                self._wakened.recv(4096)
                return False
            if self._authenticator is None or not ready:
                return False
            self._authenticator.answer()

    def _poll_monitor(self) -> None:
        """Answer waiting handshakes and read the events of the monitor."""
        if self._authenticator:
            self._authenticator.answer()
        self._monitor.read()

    def _explain(self, failure: HandshakeFailure) -> str:
        """Return the likely reason of a failed handshake, seen from this end."""
        raise NotImplementedError

    def _receive_now(self) -> list[Frame] | None:
        try:
            part = self._socket.recv(_NOW, copy=False)
        except zmq.Again:
            return None
        if self._authenticator:
            self.received_key = str(part.get("User-Id"))
        frames = [_content(part)]
        while part.more:  # a message arrives whole: these never wait
            part = self._socket.recv(copy=False)
            if len(frames) <= _MOST_FRAMES:  # enough for the codec to see that they are too many
                frames.append(_content(part))
        return frames


_MOST_FRAMES: Final = 2 + ARRAYS
"""Route, header, arrays."""

_NOW: Final = int(zmq.DONTWAIT)  # plain numbers: `|` of an enumeration takes longer than to send a small frame
_NOW_AND_MORE: Final = int(zmq.DONTWAIT | zmq.SNDMORE)


def _content(part: zmq.Frame) -> Frame:
    return part.bytes if len(part) < COPY_BELOW else part.buffer
