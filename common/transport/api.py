"""What a transport does, seen from the two ends of the wire: move lists of byte frames, never wait without a limit.

Two implementations: `memory` (threads of one process, real codec; ships, and carries the tests) and `zmq`.
A transport knows no message types: frames come from and go to `common.wire.codec`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, TypeAlias

from common.session.events import Note
from common.units import Seconds

Frame: TypeAlias = bytes | memoryview
Frames: TypeAlias = Sequence[Frame]
Route: TypeAlias = bytes
"""The learner's handle of one connection; a peer that reconnects comes by a new route."""

TELL_SECONDS: Seconds = 10.0  # between two lines of handshakes that fail: who is refused tries again every second


class Failure(StrEnum):
    """Why a connection came to nothing before its first message. The closed list of the `reason` label."""

    KEY = "key"  # the peer's key is not among those that may connect
    LEARNER_KEY = "learner_key"  # the peer takes the learner for one that has another key
    MECHANISM = "mechanism"  # one side has keys, and the other has none
    BROKEN = "broken"  # ended or fell silent in the middle, or did not speak ZeroMQ


@dataclass(slots=True)
class Handshakes:
    """What became of the handshakes at one end. For the thread that receives."""

    failed: Counter[str] = field(default_factory=Counter)  # by `Failure`
    detail: str = ""  # what the last failure may be due to
    _told: int = 0
    _tell_at: Seconds = float("-inf")

    def news(self, now: Seconds) -> Note | None:
        """A warning of those that failed since the last one; None where there are none, or `TELL_SECONDS` have not passed."""
        failed = self.failed.total() - self._told
        if not failed or now < self._tell_at:
            return None
        self._told, self._tell_at = self._told + failed, now + TELL_SECONDS
        return Note(event="handshake_failed", fields={"times": failed, "detail": self.detail}, warning=True)


class PeerTransport(Protocol):
    """A peer's end: one connection to the learner, restored by the transport itself when it breaks."""

    @property
    def handshakes(self) -> Handshakes:
        """As of the last `receive`."""

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

    received_key: str
    """Public key (Z85) that authenticated the sender of the message that `receive` returned last; "" without keys."""

    @property
    def endpoint(self) -> str:
        """The address peers connect to, with the port that was really bound."""

    @property
    def handshakes(self) -> Handshakes:
        """As of the last `receive`."""

    def send(self, route: Route, frames: Frames) -> bool:
        """Hand over one message for `route`; False, and nothing sent, where the route is gone or its buffers are full."""

    def receive(self, timeout: Seconds) -> tuple[Route, list[Frame]] | None:
        """The next message of any peer, or None after `timeout` seconds or a `wake`."""

    def reopen(self) -> None:
        """Drop all connections with all data stored for them, and accept new ones; peers reconnect by themselves."""

    def wake(self) -> None:
        """Make a `receive` that waits in another thread return now. Safe from any thread."""

    def close(self) -> None:
        """Unbind and release; what was handed over is still sent for a bounded time (the linger)."""
