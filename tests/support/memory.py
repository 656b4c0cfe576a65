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
    from common.protocol.events import Route
    from common.transport.api import Frame, Frames
    from common.units import Seconds

ENDPOINT: Final = "memory://learner"


class MemoryHub:
    """The network between one learner at a time and any number of workers; the only lock of all its ends."""

    def __init__(self, *, capacity: int = 64) -> None:
        """`capacity`: messages that wait in each direction of a connection; the next `send` returns False."""
        self.capacity = capacity
        self.changed = Condition()
        self.learner: MemoryServer | None = None
        self._workers: list[MemoryWorker] = []
        self._routes = count(1)

    def bind(self) -> MemoryServer:
        """The learner's end; every worker that is not cut off connects at once. Raises `ResourceError` while there is one."""
        with self.changed:
            if self.learner is not None:
                raise ResourceError("endpoint in use", found=ENDPOINT, fix="close the learner that is there first")
            self.learner = MemoryServer(self)
            for worker in self._workers:
                self.link(worker)
            return self.learner

    def connect(self) -> MemoryWorker:
        """A new worker's end, connected as soon as there is a learner."""
        with self.changed:
            worker = MemoryWorker(self)
            self._workers.append(worker)
            self.link(worker)
            return worker

    def disconnect(self, worker: MemoryWorker) -> None:
        """Cut `worker` off until `reconnect`; what was under way in either direction is lost."""
        with self.changed:
            worker.cut = True
            self.unlink(worker)

    def reconnect(self, worker: MemoryWorker) -> None:
        """Let a worker that was cut off come back, by a new route."""
        with self.changed:
            worker.cut = False
            self.link(worker)

    def link(self, worker: MemoryWorker) -> None:
        """Join `worker` to the learner, where both are there and nothing joins them yet. Under the lock."""
        if self.learner is not None and worker.connection is None and not (worker.cut or worker.closed):
            worker.connection = Connection(route=next(self._routes).to_bytes(4, "big"))
            self.learner.connections[worker.connection.route] = worker.connection

    def unlink(self, worker: MemoryWorker) -> None:
        """Drop the worker's connection with all it holds. Under the lock."""
        if worker.connection is not None and self.learner is not None:
            self.learner.connections.pop(worker.connection.route, None)
        worker.connection = None

    def relink(self) -> None:
        """Give every worker that is not cut off a new connection; messages in flight are lost. Call it under the lock."""
        for worker in self._workers:
            self.unlink(worker)
            self.link(worker)

    def unbind(self) -> None:
        """The learner is gone: its workers are without a connection. Under the lock."""
        for worker in self._workers:
            self.unlink(worker)
        self.learner = None

    def forget(self, worker: MemoryWorker) -> None:
        """A worker is gone for good; what it sent before stays for the learner, as with a clean close. Under the lock."""
        self._workers.remove(worker)
        if worker.connection is not None:
            worker.connection.left = True


@dataclass(slots=True, eq=False)
class Connection:
    """Messages under way between the learner and one worker."""

    route: Route
    to_learner: deque[list[Frame]] = field(default_factory=deque)
    to_worker: deque[list[Frame]] = field(default_factory=deque)
    left: bool = False  # the worker closed its end: nothing goes to it any more, what it sent is still received


class _End(ABC):
    """Common part of both ends: a wake flag, a closed flag, and one way to wait."""

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


class MemoryWorker(_End):
    """A `WorkerTransport`. Made by `MemoryHub.connect`."""

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
            return self.connection.to_worker.popleft() if self.connection and self._ready() else None

    def expect(self, message_bytes: int) -> None:
        """Do nothing: this connection never falls silent."""

    def close(self) -> None:
        """Leave; what was sent still reaches the learner."""
        with self._hub.changed:
            if not self.closed:
                self.closed = True
                self._hub.forget(self)
                self._hub.changed.notify_all()

    def _ready(self) -> bool:
        return self.connection is not None and bool(self.connection.to_worker) and not self.closed


class MemoryServer(_End):
    """A `ServerTransport`. Made by `MemoryHub.bind`."""

    def __init__(self, hub: MemoryHub) -> None:
        """No connections yet."""
        super().__init__(hub)
        self.connections: dict[Route, Connection] = {}
        self.received_key = ""  # there are no keys

    @property
    def endpoint(self) -> str:
        """A name; workers come from the hub."""
        return ENDPOINT

    def send(self, route: Route, frames: Frames) -> bool:
        """Hand over one message for `route`; False where the route is gone or its queue is full."""
        with self._hub.changed:
            connection = self.connections.get(route)
            return connection is not None and not connection.left and self._put(connection.to_worker, frames)

    def receive(self, timeout: Seconds) -> tuple[Route, list[Frame]] | None:
        """The next message of any worker, the workers taking turns, or None after `timeout` seconds or a `wake`."""
        with self._hub.changed:
            self._wait(timeout)
            for route, connection in self.connections.items() if not self.closed else ():
                if connection.to_learner:
                    self.connections[route] = self.connections.pop(route)  # served last from now on
                    return route, connection.to_learner.popleft()
            return None

    def reopen(self) -> None:
        """Drop all connections; the workers have new ones at once."""
        with self._hub.changed:
            self.connections.clear()
            self._hub.relink()

    def close(self) -> None:
        """Unbind; messages that were not received are lost, as when a learner's process ends."""
        with self._hub.changed:
            if not self.closed:
                self.closed = True
                self._hub.unbind()
                self._hub.changed.notify_all()

    def _ready(self) -> bool:
        return not self.closed and any(connection.to_learner for connection in self.connections.values())
