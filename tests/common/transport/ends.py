"""Both ends of a real connection in one thread: deadlines, and a first message that arrives."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

from tests.ports import free_ports

if TYPE_CHECKING:
    from common.transport.zmq import ZmqServer, ZmqWorker

ANY_PORT: Final = "tcp://127.0.0.1:0"
SOON: Final = 1000.0  # a deadline, beyond that of the test itself: never reached when all is well
TICK: Final = 0.01
LOST: Final = 1.0  # seconds after which a message is sent again: its connection may have ended on the way


def own_endpoint() -> str:
    """Return an endpoint that no other process is given while nothing is bound to it, as one of the kernel's range may be."""
    return f"tcp://127.0.0.1:{free_ports(1)[0]}"


def greet(learner: ZmqServer, worker: ZmqWorker, word: bytes = b"hello") -> bytes:
    """Send a message until one has arrived that no later one follows; return its route.

    A message on a connection whose end the worker has not seen yet is lost, so that one message may not be enough.
    """
    for attempt in itertools.count():
        while not worker.send([word, str(attempt).encode()]):
            worker.receive(TICK)
            late = learner.receive(TICK)
            assert late is None or late[1][0] == word
        while (received := learner.receive(LOST)) is not None:
            route, frames = received
            assert frames[0] == word
            if frames[1] == str(attempt).encode():
                return route
    raise AssertionError
