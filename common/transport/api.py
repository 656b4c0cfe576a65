"""What a transport does, seen from the two ends of the wire: move lists of byte frames, never wait without a limit.

Two implementations: `memory` (threads of one process, real codec; ships, and carries the tests) and `zmq`.
A transport knows no message types: frames come from and go to `common.wire.codec`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from common.units import Seconds

Frame: TypeAlias = bytes | memoryview
Frames: TypeAlias = Sequence[Frame]
Route: TypeAlias = bytes
"""The learner's handle of one connection; a peer that reconnects comes by a new route."""


class PeerTransport(Protocol):
    """A peer's end: one connection to the learner, restored by the transport itself when it breaks."""

    def send(self, frames: Frames) -> bool:
        """Hand over one message; False, and nothing sent, where that would block (no connection, or buffers full)."""

    def receive(self, timeout: Seconds) -> list[Frame] | None:
        """The next message, or None after `timeout` seconds or a `wake`."""

    def wake(self) -> None:
        """Make a `receive` that waits in another thread return now. Safe from any thread."""

    def close(self) -> None:
        """Release the connection; what was handed over is still sent for a bounded time (the linger)."""


class LearnerTransport(Protocol):
    """The learner's end: many connections, told apart by route."""

    @property
    def endpoint(self) -> str:
        """The address peers connect to, with the port that was really bound."""

    def send(self, route: Route, frames: Frames) -> bool:
        """Hand over one message for `route`; False, and nothing sent, where the route is gone or its buffers are full."""

    def receive(self, timeout: Seconds) -> tuple[Route, list[Frame]] | None:
        """The next message of any peer, or None after `timeout` seconds or a `wake`."""

    def wake(self) -> None:
        """Make a `receive` that waits in another thread return now. Safe from any thread."""

    def close(self) -> None:
        """Unbind and release; what was handed over is still sent for a bounded time (the linger)."""
