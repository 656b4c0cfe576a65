"""Both ends of the wire over ZeroMQ: the learner's ROUTER binds, each peer's DEALER connects. With `curve`, the only user of zmq.

Every option below is set on every socket before it binds or connects (ZeroMQ ignores later changes in silence).
Neither end relies on ZeroMQ's queues or heartbeats: the session's credits bound what is under way, and its messages, one a
second at least, show that a connection is alive. libzmq 4.3.5 aborts the process where its own heartbeats or limits on input
meet a lost connection (decision 24). A socket belongs to the one thread that sends and receives; only `wake` may come from
another.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from typing import TYPE_CHECKING, Final

import zmq

from common.errors import ConfigError, ResourceError
from common.transport.api import Failure, Handshakes
from common.transport.curve import DOMAIN, Gate, LearnerKeys, PeerKeys, Watch
from common.wire.limits import ARRAY_BYTES, ARRAYS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from common.transport.api import Frame, Frames, Route
    from common.units import Seconds

LINGER: Final = 2.0
"""Seconds that `close` spends at most on what was handed over: a Goodbye or a last Credit, not a backlog."""

COPY_BELOW: Final = 64 * 1024
"""Bytes under which a frame is copied: cheaper than sharing it between threads, and it comes out aligned."""

ATTEND_SECONDS: Final = 0.05
"""Between two looks at handshakes by a `receive` that need not wait: often enough to let peers in, too rare to cost anything."""

KNOCK_SECONDS: Final = 1.0
"""After which a peer that was refused asks again: ZeroMQ itself would never."""

LOST_SECONDS: Final = 5.0
"""After which a peer that lost its connection, or got none, asks anew: ZeroMQ gives up in silence after some nonsense."""

SILENT_SECONDS: Final = 30.0
"""After which a peer that received no message connects anew: a proxy may hold a connection whose other half is dead.

A message has this long to cross: 14 MB need 11 s at 10 Mbit/s, and with a short timeout such a link would never pass one."""

REBIND_SECONDS: Final = 10.0
REBIND_PAUSE: Final = 0.1

_LAST_PORT: Final = 65_535

_MILLISECONDS: Final = {
    # A connection is broken once what was sent stays unacknowledged this long; the session sends every second.
    zmq.TCP_MAXRT: 8_000,
    zmq.HEARTBEAT_IVL: 0,  # none: a heartbeat that is due on a connection with an error aborts the process
    zmq.HANDSHAKE_IVL: 5_000,  # a port scanner that connects and says nothing
}
_DEALER_MILLISECONDS: Final = {
    zmq.CONNECT_TIMEOUT: 5_000,  # the system's own is two minutes: a network that comes back would not be noticed
    # First retry soon, since a restarted learner is back in a second; then doubling, so that 1,000 actors do not storm it.
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 1_000,
}
_OPTIONS: Final = {
    zmq.MAXMSGSIZE: ARRAY_BYTES,  # of one frame; ZeroMQ closes the connection of a peer that announces a larger one
    zmq.SNDHWM: 64,  # messages per connection: many times what the credits allow
    zmq.RCVHWM: 0,  # no limit: a PING behind the message that meets one aborts the process
    zmq.TCP_KEEPALIVE: 1,  # for connections of senders that never greet, and connection trackers that forget idle ones
    zmq.TCP_KEEPALIVE_IDLE: 30,
    zmq.TCP_KEEPALIVE_INTVL: 10,
    zmq.TCP_KEEPALIVE_CNT: 3,
}


class _End:
    """A socket with its own context, a way to wait for it, and a way to end that wait from another thread."""

    def __init__(self, kind: int, endpoint: str, options: Mapping[zmq.SocketOption, int | bytes], linger: Seconds) -> None:
        self._kind = kind
        # IPv6 by number alone: for a name or the wildcard it would change which address is taken, and how it is written.
        own = {zmq.IPV6: "[" in endpoint, zmq.LINGER: round(linger * 1000)}
        self._options: Mapping[zmq.SocketOption, int | bytes] = {**_OPTIONS, **_MILLISECONDS, **options, **own}
        self._handshakes = Handshakes()
        self._gate: Gate | None = None
        self.received_key = ""
        self._attend_at: Seconds = 0.0
        self._waker, self._wakened = socket.socketpair()
        self._waker.setblocking(False)
        self._wakened.setblocking(False)
        self._open()

    def _open(self) -> None:
        """Make a socket, neither bound nor connected, in a context of its own."""
        self._context = zmq.Context()
        self._socket = self._context.socket(self._kind)
        self._watch = Watch(self._socket, self._handshakes, self._explain)
        for option, value in self._options.items():
            self._socket.setsockopt(option, value)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wakened, zmq.POLLIN)

    def _shut(self) -> None:
        """Close the socket and its context, within the socket's linger."""
        self._watch.close()
        self._socket.close()
        if self._gate:
            self._gate.close()
        self._context.term()

    @property
    def handshakes(self) -> Handshakes:
        """What became of them, as of the last `receive`."""
        return self._handshakes

    def wake(self) -> None:
        """Make a waiting `receive`, or the next one that finds nothing, return None. Safe from any thread, even after `close`."""
        with contextlib.suppress(OSError):  # full: a wake is pending already; closed: nobody waits
            self._waker.send(b"\0")

    def close(self) -> None:
        """Close the socket and its context, within the linger. Call it from the thread that uses the socket."""
        if not self._socket.closed:
            self._waker.close()
            self._wakened.close()
            self._shut()

    def _send(self, frames: Sequence[Frame]) -> bool:
        sent = True
        for more, frame in zip(range(len(frames) - 1, -1, -1), frames, strict=True):
            try:
                self._socket.send(frame, zmq.DONTWAIT | (zmq.SNDMORE if more else 0), copy=False)
            except zmq.ZMQError as error:
                # Buffers full or no connection (EAGAIN), route gone (EHOSTUNREACH), closed (ENOTSOCK).
                if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH, zmq.ENOTSOCK):
                    raise
                if frame is frames[0]:
                    return False
                # The connection broke inside the message. ZeroMQ drops the rest of it, and must be given that rest:
                # otherwise it would take the next message for it.
                sent = False
        return sent

    def _receive(self, timeout: Seconds) -> list[Frame] | None:
        if self._socket.closed:
            return None
        if time.monotonic() >= self._attend_at:
            self._attend()
            self._attend_at = time.monotonic() + ATTEND_SECONDS
        frames = self._receive_now()
        if frames is None and self._wait(timeout):
            frames = self._receive_now()
        return frames

    def _wait(self, timeout: Seconds) -> bool:
        """Whether the socket may have a message; a wake is spent here, and who is at the gate is let in."""
        deadline = time.monotonic() + timeout
        while True:
            ready = dict(self._poller.poll(max(0, math.ceil((deadline - time.monotonic()) * 1000))))
            if self._wakened.fileno() in ready:
                with contextlib.suppress(BlockingIOError):
                    while self._wakened.recv(4096):
                        pass
            elif self._gate and list(ready) == [self._gate.socket]:
                self._gate.answer()
                continue
            return self._socket in ready

    def _attend(self) -> None:
        """Look after handshakes."""
        if self._gate:
            self._gate.answer()
        self._watch.read()

    def _explain(self, failure: Failure) -> str:
        """What a failed handshake may be due to, seen from this end."""
        raise NotImplementedError

    def _receive_now(self) -> list[Frame] | None:
        try:
            part = self._socket.recv(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return None
        if self._gate:
            self.received_key = str(part.get("User-Id"))
        frames = [_content(part)]
        while part.more:  # a message arrives whole: these never wait
            part = self._socket.recv(copy=False)
            if len(frames) <= _MOST_FRAMES:  # enough for the codec to see that they are too many
                frames.append(_content(part))
        return frames


_MOST_FRAMES: Final = 2 + ARRAYS
"""Route, header, arrays."""


def _content(part: zmq.Frame) -> Frame:
    return part.bytes if len(part) < COPY_BELOW else part.buffer


class ZmqPeer(_End):
    """A `PeerTransport`: a DEALER that reconnects by itself, and sends nothing while it has no connection."""

    def __init__(self, endpoint: str, *, keys: PeerKeys | None = None, linger: Seconds = LINGER) -> None:
        """Start to connect to `endpoint`, "tcp://host:port", with `keys` to a learner that has its own, and to no other.

        Raises `ConfigError` where that is no endpoint.
        """
        _check_endpoint(endpoint, least_port=1)
        self._endpoint, self._keys, self._knock_at = endpoint, keys, math.inf
        # IMMEDIATE: a message is queued only for a connection that stands, never for one that may come.
        super().__init__(zmq.DEALER, endpoint, _DEALER_MILLISECONDS | {zmq.IMMEDIATE: 1} | (keys.options if keys else {}), linger)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError:
            self.close()
            raise _bad_endpoint(endpoint) from None

    def send(self, frames: Frames) -> bool:
        """Hand over one message; False, and nothing sent, where there is no connection or its buffers are full."""
        return self._send(frames)

    def receive(self, timeout: Seconds) -> list[Frame] | None:
        """The next message, or None after `timeout` seconds or a `wake`."""
        frames = self._receive(timeout)
        if frames is not None:
            self._knock_at = time.monotonic() + SILENT_SECONDS
        return frames

    def _attend(self) -> None:
        """Ask again where we were told no. ZeroMQ tries for ever where nobody answers, and never again where somebody refused.

        Nor after an answer that is no ZeroMQ, of which it may not even tell. Before it gives up there is always a
        disconnection; where it does not give up, to ask anew does no harm. Nor does it over a connection that is silent.
        """
        for event in self._watch.read():
            match event:
                case zmq.Event.HANDSHAKE_SUCCEEDED:
                    self._knock_at = time.monotonic() + SILENT_SECONDS
                case zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
                    self._knock_at = min(self._knock_at, time.monotonic() + KNOCK_SECONDS)
                case _:
                    self._knock_at = min(self._knock_at, time.monotonic() + LOST_SECONDS)
        if time.monotonic() >= self._knock_at and not self._socket.poll(0):
            self._knock_at = math.inf
            with contextlib.suppress(zmq.ZMQError):  # it has let go of it already
                self._socket.disconnect(self._endpoint)
            self._socket.connect(self._endpoint)

    def _explain(self, failure: Failure) -> str:
        match failure, self._keys:
            case Failure.KEY, PeerKeys(public=public):
                return f"the learner does not allow key {public.decode()}: put it into its folder of keys, and start it again"
            case Failure.MECHANISM, None:
                return "the learner wants keys, and there are none here (--keys)"
            case Failure.MECHANISM, _:
                return "the learner has no keys, and this peer speaks to none without: start it with --keys"
            case _, None:
                return "the connection ended before it began: the learner may want keys (--keys), or it is no learner"
            case _:
                return (
                    "the connection ended before it began: the learner may still be starting; if it is not, learner.key here may "
                    "not be the learner's, or it has no keys at all"
                )


class ZmqLearner(_End):
    """A `LearnerTransport`: a ROUTER; routes are ZeroMQ's own, new for each connection."""

    def __init__(self, endpoint: str, *, keys: LearnerKeys | None = None, linger: Seconds = LINGER) -> None:
        """Bind to `endpoint`, "tcp://address:port", port 0 for any; with `keys` only for peers whose key is among them.

        Raises `ConfigError` or `ResourceError`.
        """
        _check_endpoint(endpoint, least_port=0)
        # MANDATORY: a message for a route that is gone is an answer, not a silence. BACKLOG: actors that start at once.
        # ZAP_DOMAIN: with one, ZeroMQ refuses versions 1 and 2 of its protocol, whose connections may abort a close.
        options: dict[zmq.SocketOption, int | bytes] = {zmq.ROUTER_MANDATORY: 1, zmq.BACKLOG: 512, zmq.ZAP_DOMAIN: DOMAIN}
        self._endpoint, self._keys = endpoint, keys
        super().__init__(zmq.ROUTER, endpoint, options | (keys.options if keys else {}), linger)
        try:
            self._bind()
        except (ConfigError, ResourceError):
            self.close()
            raise

    def _open(self) -> None:
        super()._open()
        if self._keys:  # before it binds: every connection is authenticated
            self._gate = Gate(self._context, self._keys.allowed)
            self._poller.register(self._gate.socket, zmq.POLLIN)

    def _bind(self) -> None:
        try:
            self._socket.bind(self._endpoint)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EADDRINUSE, zmq.EADDRNOTAVAIL):
                fix = "stop what uses it, or choose another address (port 0: any free one)"
                found = f"{self._endpoint}: {zmq.strerror(error.errno).lower()}"
                raise ResourceError("cannot listen", found=found, fix=fix) from None
            raise _bad_endpoint(self._endpoint) from None
        self._endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def reopen(self) -> None:
        """Drop all connections with all that ZeroMQ stores for them, and bind again: it has no way to drop one of them.

        Peers connect again by themselves. Raises `ResourceError` where something else holds the port for `REBIND_SECONDS`.
        """
        self._socket.setsockopt(zmq.LINGER, 0)
        self._shut()
        self._open()
        deadline = time.monotonic() + REBIND_SECONDS
        while True:
            try:
                return self._bind()
            except ResourceError:
                if time.monotonic() >= deadline:
                    raise
            self._wait(REBIND_PAUSE)

    @property
    def endpoint(self) -> str:
        """The address peers connect to, with the port that was really bound."""
        return self._endpoint

    def send(self, route: Route, frames: Frames) -> bool:
        """Hand over one message for `route`; False, and nothing sent, where the route is gone or its buffers are full."""
        return self._send([route, *frames])

    def receive(self, timeout: Seconds) -> tuple[Route, list[Frame]] | None:
        """The next message of any peer, the peers taking turns, or None after `timeout` seconds or a `wake`."""
        received = self._receive(timeout)
        return None if received is None else (bytes(received[0]), received[1:])

    def _explain(self, failure: Failure) -> str:
        match failure:
            case Failure.KEY:
                return f"{self._gate.refused if self._gate else 'a key'} is not among those that may connect"
            case Failure.LEARNER_KEY:
                return "a peer has another public key of this learner"
            case Failure.MECHANISM:
                return "a peer has no keys, which are wanted here" if self._gate else "a peer has keys, and there are none here"
            case Failure.BROKEN:
                return "a connection ended before it began"


def _check_endpoint(endpoint: str, *, least_port: int) -> None:
    """ZeroMQ takes a port over 65535 modulo 65536; here the user hears of it."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not (endpoint.startswith("tcp://") and host and port.isdecimal() and least_port <= int(port) <= _LAST_PORT):
        raise _bad_endpoint(endpoint)


def _bad_endpoint(endpoint: str) -> ConfigError:
    wanted = f"tcp://host:port with a port up to {_LAST_PORT}"
    return ConfigError("no such endpoint", found=repr(endpoint), wanted=wanted, fix="correct the address")
