"""Both ends over ZeroMQ: the learner's ROUTER binds, each worker's DEALER connects. Only this module and `curve` import zmq.

Every option below is set on every socket before it binds or connects (ZeroMQ ignores later changes without an error).
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

from common.config.endpoint import parse_endpoint
from common.errors import ConfigError, HandshakeFailure, ResourceError
from common.protocol.limits import ARRAY_BYTES, ARRAYS, SLOWEST_LINK
from common.transport.api import Handshakes
from common.transport.curve import DOMAIN, HandshakeMonitor, LearnerKeys, WorkerKeys, ZapAuthenticator

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from common.protocol.events import Route
    from common.transport.api import Frame, Frames
    from common.units import Seconds

LINGER: Final = 2.0
"""Seconds that `close` spends at most on what was handed over: a Goodbye or a last Credit, not a backlog."""

COPY_BELOW: Final = 64 * 1024
"""Bytes under which a frame is copied: cheaper than sharing it between threads, and it comes out aligned."""

POLL_MONITOR_SECONDS: Final = 0.05
"""Between two polls of the handshake monitor while messages arrive: often enough for new workers, too rare to cost time."""

RECONNECT_SECONDS: Final = 1.0
"""Delay after which a worker reconnects when its handshake was refused: ZeroMQ itself never does."""

LOST_SECONDS: Final = 5.0
"""Delay after which a worker without a connection reconnects: ZeroMQ stops without an event after some invalid answers."""

SILENT_SECONDS: Final = 4.0
"""Delay after which a worker without received messages reconnects: a proxy may hold a half-dead connection, and a
changed length leaves one that waits for the rest of a message. The transfer time of the largest message is added."""

UNKNOWN_BYTES: Final = 12_000_000
"""Size of the largest message until `expect` says it: a first policy may be that large."""

REBIND_SECONDS: Final = 10.0
REBIND_PAUSE: Final = 0.1

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
    zmq.MAXMSGSIZE: ARRAY_BYTES,  # of one frame; ZeroMQ closes the connection of a worker that announces a larger one
    zmq.SNDHWM: 64,  # messages per connection: many times what the credits allow
    zmq.RCVHWM: 0,  # no limit: a PING behind the message that meets one aborts the process
    zmq.TCP_KEEPALIVE: 1,  # for connections of senders that never greet, and connection trackers that forget idle ones
    zmq.TCP_KEEPALIVE_IDLE: 30,
    zmq.TCP_KEEPALIVE_INTVL: 10,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
DEALER_OPTIONS: Final = {**_OPTIONS, **_MILLISECONDS, **_DEALER_MILLISECONDS, zmq.IMMEDIATE: 1}
"""Of a worker's socket. IMMEDIATE: a message is queued only for a connection that stands, never for one that may come."""


class _End:
    """A socket with its own context, a way to wait for it, and a way to end that wait from another thread."""

    def __init__(self, kind: int, endpoint: str, options: Mapping[zmq.SocketOption, int | bytes], linger: Seconds) -> None:
        self._kind = kind
        # IPv6 by number alone: for a name or the wildcard it would change which address is taken, and how it is written.
        own = {zmq.IPV6: "[" in endpoint, zmq.LINGER: round(linger * 1000)}
        self._options: Mapping[zmq.SocketOption, int | bytes] = {**_OPTIONS, **_MILLISECONDS, **options, **own}
        self._handshakes = Handshakes()
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
        self._monitor = HandshakeMonitor(self._socket, self._handshakes, self._explain)
        for option, value in self._options.items():
            self._socket.setsockopt(option, value)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wakened, zmq.POLLIN)

    def _shut(self) -> None:
        """Close the socket and its context, within the socket's linger."""
        self._monitor.close()
        self._socket.close()
        if self._authenticator:
            self._authenticator.close()
        self._context.term()

    @property
    def handshakes(self) -> Handshakes:
        """Return the results of handshakes, as of the last `receive`."""
        return self._handshakes

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
        if time.monotonic() >= self._poll_monitor_at:
            self._poll_monitor()
            self._poll_monitor_at = time.monotonic() + POLL_MONITOR_SECONDS
        frames = self._receive_now()
        if frames is None and timeout > 0 and self._wait(timeout):
            frames = self._receive_now()
        return frames

    def _wait(self, timeout: Seconds) -> bool:
        """Return whether the socket may have a message. A wake is spent here, and waiting handshakes are answered."""
        deadline = time.monotonic() + timeout
        while True:
            ready = dict(self._poller.poll(max(0, math.ceil((deadline - time.monotonic()) * 1000))))
            if self._wakened.fileno() in ready:
                with contextlib.suppress(BlockingIOError):
                    while self._wakened.recv(4096):
                        pass
            elif self._authenticator and list(ready) == [self._authenticator.socket]:
                self._authenticator.answer()
                continue
            return self._socket in ready

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
            part = self._socket.recv(zmq.DONTWAIT, copy=False)
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


def _content(part: zmq.Frame) -> Frame:
    return part.bytes if len(part) < COPY_BELOW else part.buffer


class ZmqWorker(_End):
    """A `WorkerTransport`: a DEALER that reconnects by itself, and sends nothing while it has no connection."""

    def __init__(self, endpoint: str, *, keys: WorkerKeys | None = None, linger: Seconds = LINGER) -> None:
        """Start to connect to `endpoint`, "tcp://host:port", with `keys` to a learner that has its own, and to no other.

        Raises `ConfigError` where that is no endpoint.
        """
        _check_endpoint(endpoint, min_port=1)
        self._endpoint, self._keys, self._reconnect_at = endpoint, keys, math.inf
        self._largest = UNKNOWN_BYTES
        super().__init__(zmq.DEALER, endpoint, {**DEALER_OPTIONS, **(keys.options if keys else {})}, linger)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError:
            self.close()
            raise _bad_endpoint(endpoint, wanted="a host with an address") from None

    def send(self, frames: Frames) -> bool:
        """Hand over one message; False, and nothing sent, where there is no connection or its buffers are full."""
        return self._send(frames)

    def expect(self, message_bytes: int) -> None:
        """Set the size of the largest message in either direction: while one crosses, no other message arrives."""
        self._largest = message_bytes

    @property
    def _silent_at(self) -> Seconds:
        """Return when to reconnect, unless a message arrives before."""
        return time.monotonic() + SILENT_SECONDS + self._largest / SLOWEST_LINK

    def receive(self, timeout: Seconds) -> list[Frame] | None:
        """The next message, or None after `timeout` seconds or a `wake`."""
        frames = self._receive(timeout)
        if frames is not None:
            self._reconnect_at = self._silent_at
        return frames

    def _poll_monitor(self) -> None:
        """Reconnect where ZeroMQ has stopped its own attempts.

        ZeroMQ retries while the address does not answer. It stops after a refused handshake and after an answer that is not
        ZeroMQ's, of which the monitor may show only the lost connection. So a worker reconnects `RECONNECT_SECONDS` after a
        refused handshake, `LOST_SECONDS` after a lost connection, and `SILENT_SECONDS` and a transfer time after the last
        message. An attempt beside ZeroMQ's own is harmless.
        """
        for event in self._monitor.read():
            match event:
                case zmq.Event.HANDSHAKE_SUCCEEDED:
                    self._reconnect_at = self._silent_at
                case zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
                    self._reconnect_at = min(self._reconnect_at, time.monotonic() + RECONNECT_SECONDS)
                case _:
                    self._reconnect_at = min(self._reconnect_at, time.monotonic() + LOST_SECONDS)
        if time.monotonic() >= self._reconnect_at and not self._socket.poll(0):
            self._reconnect_at = math.inf
            with contextlib.suppress(zmq.ZMQError):  # it has disconnected already
                self._socket.disconnect(self._endpoint)
            self._socket.connect(self._endpoint)

    def _explain(self, failure: HandshakeFailure) -> str:
        match failure, self._keys:
            case HandshakeFailure.KEY, WorkerKeys(public=public):
                return f"the learner does not allow key {public.decode()}: put it into its folder of keys, and start it again"
            case HandshakeFailure.MECHANISM, None:
                return "the learner wants keys, and there are none here (--keys)"
            case HandshakeFailure.MECHANISM, _:
                return "the learner has no keys, and this worker speaks to none without: start it with --keys"
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
        """Bind to `endpoint`, "tcp://address:port", port 0 for any; with `keys` only for workers with an allowed key.

        Raises `ConfigError` or `ResourceError`.
        """
        _check_endpoint(endpoint, min_port=0)
        # MANDATORY: sending to a closed route is an error, not ignored. BACKLOG: actors that start at once.
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
            self._authenticator = ZapAuthenticator(self._context, self._keys.allowed)
            self._poller.register(self._authenticator.socket, zmq.POLLIN)

    def _bind(self) -> None:
        try:
            self._socket.bind(self._endpoint)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EADDRINUSE, zmq.EADDRNOTAVAIL):
                fix = "stop what uses it, or choose another address (port 0: any free one)"
                found = f"{self._endpoint}: {zmq.strerror(error.errno).lower()}"
                raise ResourceError("cannot listen", found=found, fix=fix) from None
            raise _bad_endpoint(self._endpoint, wanted="an address of this machine") from None
        self._endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def reopen(self) -> None:
        """Drop all connections with all that ZeroMQ stores for them, and bind again: it has no way to drop one of them.

        Workers connect again by themselves. Raises `ResourceError` where something else holds the port for `REBIND_SECONDS`.
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
        """The address workers connect to, with the port that was really bound."""
        return self._endpoint

    def send(self, route: Route, frames: Frames) -> bool:
        """Hand over one message for `route`; False, and nothing sent, where the route is gone or its buffers are full."""
        return self._send([route, *frames])

    def receive(self, timeout: Seconds) -> tuple[Route, list[Frame]] | None:
        """The next message of any worker, the workers taking turns, or None after `timeout` seconds or a `wake`."""
        received = self._receive(timeout)
        return None if received is None else (bytes(received[0]), received[1:])

    def _explain(self, failure: HandshakeFailure) -> str:
        match failure:
            case HandshakeFailure.KEY:
                return f"{self._authenticator.refused if self._authenticator else 'a key'} is not among those that may connect"
            case HandshakeFailure.LEARNER_KEY:
                return "a worker has another public key of this learner"
            case HandshakeFailure.MECHANISM:
                return (
                    "a worker has no keys, which are wanted here"
                    if self._authenticator
                    else "a worker has keys, and there are none here"
                )
            case HandshakeFailure.BROKEN:
                return "a connection ended before it began"


def _check_endpoint(endpoint: str, *, min_port: int) -> None:
    try:
        parse_endpoint(endpoint, min_port=min_port)
    except ValueError as error:
        raise _bad_endpoint(endpoint, wanted=str(error)) from None


def _bad_endpoint(endpoint: str, *, wanted: str) -> ConfigError:
    return ConfigError("no such endpoint", found=repr(endpoint), wanted=wanted, fix="correct the address")
