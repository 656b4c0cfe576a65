"""Both ends of the wire inside one process: threads, or one thread that plays them all. For tests and small runs.

Frames are copied when they are sent, as a network would, so no two ends ever share an array. A connection can be cut
and restored on purpose; nothing happens by itself, by chance or by the clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from threading import Condition
from typing import TYPE_CHECKING, Final

from common.errors import ResourceError
from common.transport.api import Handshakes

if TYPE_CHECKING:
    from common.transport.api import Frame, Frames, Route
    from common.units import Seconds

ENDPOINT: Final = "memory://learner"


class MemoryHub:
    """The network between one learner at a time and any number of peers; the only lock of all its ends."""

    def __init__(self, *, capacity: int = 64) -> None:
        """`capacity`: messages that wait in each direction of a connection; the next `send` returns False."""
        self.capacity = capacity
        self.changed = Condition()
        self.learner: MemoryLearner | None = None
        self._peers: list[MemoryPeer] = []
        self._routes = count(1)

    def bind(self) -> MemoryLearner:
        """The learner's end; every peer that is not cut off connects at once. Raises `ResourceError` while there is one."""
        with self.changed:
            if self.learner is not None:
                raise ResourceError("endpoint in use", found=ENDPOINT, fix="close the learner that is there first")
            self.learner = MemoryLearner(self)
            for peer in self._peers:
                self.link(peer)
            return self.learner

    def connect(self) -> MemoryPeer:
        """A new peer's end, connected as soon as there is a learner."""
        with self.changed:
            peer = MemoryPeer(self)
            self._peers.append(peer)
            self.link(peer)
            return peer

    def disconnect(self, peer: MemoryPeer) -> None:
        """Cut `peer` off until `reconnect`; what was under way in either direction is lost."""
        with self.changed:
            peer.cut = True
            self.unlink(peer)

    def reconnect(self, peer: MemoryPeer) -> None:
        """Let a peer that was cut off come back, by a new route."""
        with self.changed:
            peer.cut = False
            self.link(peer)

    def link(self, peer: MemoryPeer) -> None:
        """Join `peer` to the learner, where both are there and nothing joins them yet. Under the lock."""
        if self.learner is not None and peer.connection is None and not (peer.cut or peer.closed):
            peer.connection = Connection(route=next(self._routes).to_bytes(4, "big"))
            self.learner.connections[peer.connection.route] = peer.connection

    def unlink(self, peer: MemoryPeer) -> None:
        """Drop the peer's connection with all it holds. Under the lock."""
        if peer.connection is not None and self.learner is not None:
            self.learner.connections.pop(peer.connection.route, None)
        peer.connection = None

    def relink(self) -> None:
        """Give every peer that is not cut off a new connection; messages in flight are lost. Call it under the lock."""
        for peer in self._peers:
            self.unlink(peer)
            self.link(peer)

    def unbind(self) -> None:
        """The learner is gone: its peers are without a connection. Under the lock."""
        for peer in self._peers:
            self.unlink(peer)
        self.learner = None

    def forget(self, peer: MemoryPeer) -> None:
        """A peer is gone for good; what it sent before stays for the learner, as with a clean close. Under the lock."""
        self._peers.remove(peer)
        if peer.connection is not None:
            peer.connection.left = True


@dataclass(slots=True, eq=False)
class Connection:
    """What is under way between the learner and one peer."""

    route: Route
    to_learner: deque[list[Frame]] = field(default_factory=deque)
    to_peer: deque[list[Frame]] = field(default_factory=deque)
    left: bool = False  # the peer closed its end: nothing goes to it any more, what it sent is still received


class _End(ABC):
    """What both ends share: a wake flag, a closed flag, and one way to wait."""

    def __init__(self, hub: MemoryHub) -> None:
        self._hub = hub
        self._woken = False
        self.closed = False
        self.handshakes = Handshakes()  # none ever fails

    def wake(self) -> None:
        """Make a waiting `receive`, or else the next one that finds nothing, return None."""
        with self._hub.changed:
            self._woken = True
            self._hub.changed.notify_all()

    def _wait(self, timeout: Seconds) -> None:
        """Under the lock: until a message, a wake or the end; the wake is spent unless a message came first."""
        self._hub.changed.wait_for(lambda: self._ready() or self._woken or self.closed, timeout)
        self._woken = self._woken and self._ready()

    @abstractmethod
    def _ready(self) -> bool:
        """Under the lock: whether there is a message."""

    def _put(self, queue: deque[list[Frame]], frames: Frames) -> bool:
        if self.closed or len(queue) >= self._hub.capacity:
            return False
        queue.append([bytes(frame) for frame in frames])
        self._hub.changed.notify_all()
        return True


class MemoryPeer(_End):
    """A `PeerTransport`. Made by `MemoryHub.connect`."""

    def __init__(self, hub: MemoryHub) -> None:
        """Not connected yet."""
        super().__init__(hub)
        self.connection: Connection | None = None
        self.cut = False

    def send(self, frames: Frames) -> bool:
        """Hand over one message; False where there is no connection or its queue is full."""
        with self._hub.changed:
            return self.connection is not None and self._put(self.connection.to_learner, frames)

    def receive(self, timeout: Seconds) -> list[Frame] | None:
        """The next message, or None after `timeout` seconds or a `wake`."""
        with self._hub.changed:
            self._wait(timeout)
            return self.connection.to_peer.popleft() if self.connection and self._ready() else None

    def close(self) -> None:
        """Leave; what was sent still reaches the learner."""
        with self._hub.changed:
            if not self.closed:
                self.closed = True
                self._hub.forget(self)
                self._hub.changed.notify_all()

    def _ready(self) -> bool:
        return self.connection is not None and bool(self.connection.to_peer) and not self.closed


class MemoryLearner(_End):
    """A `LearnerTransport`. Made by `MemoryHub.bind`."""

    def __init__(self, hub: MemoryHub) -> None:
        """No connections yet."""
        super().__init__(hub)
        self.connections: dict[Route, Connection] = {}
        self.received_key = ""  # there are no keys

    @property
    def endpoint(self) -> str:
        """A name; peers come from the hub."""
        return ENDPOINT

    def send(self, route: Route, frames: Frames) -> bool:
        """Hand over one message for `route`; False where the route is gone or its queue is full."""
        with self._hub.changed:
            connection = self.connections.get(route)
            return connection is not None and not connection.left and self._put(connection.to_peer, frames)

    def receive(self, timeout: Seconds) -> tuple[Route, list[Frame]] | None:
        """The next message of any peer, the peers taking turns, or None after `timeout` seconds or a `wake`."""
        with self._hub.changed:
            self._wait(timeout)
            for route, connection in self.connections.items() if not self.closed else ():
                if connection.to_learner:
                    self.connections[route] = self.connections.pop(route)  # served last from now on
                    return route, connection.to_learner.popleft()
            return None

    def reopen(self) -> None:
        """Drop all connections; the peers have new ones at once."""
        with self._hub.changed:
            self.connections.clear()
            self._hub.relink()

    def close(self) -> None:
        """Unbind; what nobody received is lost, as when a learner's process ends."""
        with self._hub.changed:
            if not self.closed:
                self.closed = True
                self._hub.unbind()
                self._hub.changed.notify_all()

    def _ready(self) -> bool:
        return not self.closed and any(connection.to_learner for connection in self.connections.values())
