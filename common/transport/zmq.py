"""Both ends over ZeroMQ: the ROUTER of a server (learner or policy server) binds, the DEALER of each of its workers connects.

Neither end relies on ZeroMQ's queues or heartbeats: the session's credits bound what is under way, and its messages, one a
second at least, show that a connection is alive.
"""

from __future__ import annotations

import contextlib
import math
import time
from typing import Final

import zmq

from common.config.endpoint import Endpoint, parse_endpoint
from common.errors import ConfigError, HandshakeFailure, ResourceError
from common.protocol.events import Route
from common.protocol.limits import SLOWEST_LINK, UNKNOWN_BYTES
from common.transport.api import Frame, Frames
from common.transport.curve import DOMAIN, FAILED_HANDSHAKE, ServerKeys, WorkerKeys, ZapAuthenticator
from common.transport.zmq_socket import LINGER, MILLISECONDS, OPTIONS, ZmqSocket
from common.units import Seconds

RECONNECT_SECONDS: Final = 1.0
"""Delay after which a worker reconnects when its handshake failed."""

LOST_SECONDS: Final = 5.0
"""Delay after which a worker without a connection reconnects: ZeroMQ stops without an event after some invalid answers."""

SILENT_SECONDS: Final = 4.0
"""Delay after which a worker without received messages reconnects: a proxy may hold a half-dead connection, and a
changed length leaves one that waits for the rest of a message. The transfer time of the largest message is added."""

REBIND_SECONDS: Final = 10.0
REBIND_PAUSE: Final = 0.1

_DEALER_MILLISECONDS: Final = {
    zmq.CONNECT_TIMEOUT: 5_000,  # the system's own is two minutes: the end of an outage would not be noticed
    # First retry soon, since a restarted learner is back in a second; then doubling, so that 1,000 actors do not storm it.
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 1_000,
}
_LOCAL: Final = {zmq.RECONNECT_IVL_MAX: 200}  # longest pause between two attempts to connect on this machine
DEALER_OPTIONS: Final = {**OPTIONS, **MILLISECONDS, **_DEALER_MILLISECONDS, zmq.IMMEDIATE: 1, zmq.SNDHWM: 16_384}
"""Of a worker's socket. IMMEDIATE: a message is queued only for a connection that stands, never for one that may come.

SNDHWM: several times the largest window, which a worker sends at once after a loss. The credits bound what it keeps.
"""


class ZmqWorker(ZmqSocket):
    """A `WorkerTransport`: a DEALER that reconnects by itself, and sends nothing while it has no connection."""

    def __init__(
        self, endpoint: str, *, keys: WorkerKeys | None = None, linger: Seconds = LINGER, server: str = "learner"
    ) -> None:
        """Start to connect to `endpoint`, "tcp://host:port", with `keys` to a server that has its own, and to no other.

        `server` names the process there, "learner" or "policy server", in explanations of a failed handshake.
        Raises `ConfigError` where `endpoint` is none.
        """
        local = _LOCAL if _parsed(endpoint, min_port=1).loopback else {}
        self._endpoint, self._keys, self._server, self._reconnect_at = endpoint, keys, server, math.inf
        self._largest = UNKNOWN_BYTES
        super().__init__(zmq.DEALER, endpoint, {**DEALER_OPTIONS, **local, **(keys.options if keys else {})}, linger)
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
        return time.monotonic() + SILENT_SECONDS + self._largest / SLOWEST_LINK

    def receive(self, timeout: Seconds) -> list[Frame] | None:
        """The next message, or None after `timeout` seconds or a `wake`."""
        frames = self._receive(timeout)
        if frames is not None:
            self._reconnect_at = self._silent_at
        return frames

    def _poll_monitor(self) -> None:
        """Reconnect where ZeroMQ has stopped its own attempts.

        ZeroMQ retries while the address does not answer. After a failed handshake it stops, or retries ten times a second: so a
        worker disconnects, and reconnects after `RECONNECT_SECONDS`. It stops after an answer that is not ZeroMQ's, of which the
        monitor may show only the lost connection: so a worker reconnects `LOST_SECONDS` after a lost connection, and
        `SILENT_SECONDS` and a transfer time after the last message. An attempt beside ZeroMQ's own is harmless.
        """
        failed = False
        for event in self._monitor.read():
            match event:
                case zmq.Event.HANDSHAKE_SUCCEEDED:
                    failed, self._reconnect_at = False, self._silent_at
                case _ if event & FAILED_HANDSHAKE:
                    failed = True
                    self._reconnect_at = min(self._reconnect_at, time.monotonic() + RECONNECT_SECONDS)
                case _:
                    self._reconnect_at = min(self._reconnect_at, time.monotonic() + LOST_SECONDS)
        if failed:
            self._disconnect()
        if time.monotonic() >= self._reconnect_at and not self._socket.poll(0):
            self._reconnect_at = math.inf
            self._disconnect()
            self._socket.connect(self._endpoint)

    def _disconnect(self) -> None:
        with contextlib.suppress(zmq.ZMQError):  # it has disconnected already
            self._socket.disconnect(self._endpoint)

    def _explain(self, failure: HandshakeFailure) -> str:
        server, setting = self._server, f"{self._server.replace(' ', '_')}.keys"
        match failure, self._keys:
            case HandshakeFailure.KEY, WorkerKeys(public=public):
                fix = f"add it to the folder of {setting}, and restart the {server}"
                return f"the {server} does not allow key {public.decode()}: {fix}"
            case HandshakeFailure.MECHANISM, None:
                return f"the {server} requires keys, and this worker has none (--keys)"
            case HandshakeFailure.MECHANISM, _:
                return f"the {server} has no keys, and this worker connects to none without: start it with {setting}"
            case _, None:
                return (
                    f"the connection ended before it began: the {server} may hang, or still be starting; if it does not, it may "
                    f"require keys (--keys), or it is no {server}"
                )
            case _:
                return (
                    f"the connection ended before it began: the {server} may still be starting; if it is not, learner.key here "
                    f"may not be that of the {server}, or it has no keys at all"
                )


class ZmqServer(ZmqSocket):
    """A `ServerTransport`: a ROUTER; routes are ZeroMQ's own, new for each connection."""

    def __init__(self, endpoint: str, *, keys: ServerKeys | None = None, linger: Seconds = LINGER) -> None:
        """Bind to `endpoint`, "tcp://address:port", port 0 for any; with `keys` only for workers with an allowed key.

        Raises `ConfigError` or `ResourceError`.
        """
        _parsed(endpoint, min_port=0)
        # MANDATORY: sending to a closed route is an error, not ignored. BACKLOG: actors that start at once.
        # ZAP_DOMAIN: with one, ZeroMQ refuses versions 1 and 2 of its protocol, whose connections may abort a close.
        options: dict[zmq.SocketOption, int | bytes] = {zmq.ROUTER_MANDATORY: 1, zmq.BACKLOG: 512, zmq.ZAP_DOMAIN: DOMAIN}
        self.endpoint = endpoint  # once it is bound, with the real port
        self._keys = keys
        super().__init__(zmq.ROUTER, endpoint, options | (keys.options if keys else {}), linger)
        try:
            self._bind()
        except (ConfigError, ResourceError):
            self.close()
            raise

    def _open(self) -> None:
        super()._open()
        if self._keys:  # before it binds: every connection is authenticated
            self._authenticator = ZapAuthenticator(self._context, self._keys.allowed.values())
            self._poller.register(self._authenticator.socket, zmq.POLLIN)

    def _bind(self) -> None:
        try:
            self._socket.bind(self.endpoint)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EADDRINUSE, zmq.EADDRNOTAVAIL):
                fix = "stop what uses it, or choose another address (port 0: any free one)"
                found = f"{self.endpoint}: {zmq.strerror(error.errno).lower()}"
                raise ResourceError("cannot listen", found=found, fix=fix) from None
            raise _bad_endpoint(self.endpoint, wanted="an address of this machine") from None
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

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
                return "a worker has another public key of this server"
            case HandshakeFailure.MECHANISM:
                return (
                    "a worker has no keys, which are wanted here"
                    if self._authenticator
                    else "a worker has keys, and there are none here"
                )
            case HandshakeFailure.BROKEN:
                return "a connection ended before it began"


def _parsed(endpoint: str, *, min_port: int) -> Endpoint:
    try:
        return parse_endpoint(endpoint, min_port=min_port)
    except ValueError as error:
        raise _bad_endpoint(endpoint, wanted=str(error)) from None


def _bad_endpoint(endpoint: str, *, wanted: str) -> ConfigError:
    return ConfigError("no such endpoint", found=repr(endpoint), wanted=wanted, fix="correct the address")
