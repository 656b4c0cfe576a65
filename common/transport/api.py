"""Interface of a transport at the two ends of the wire, and a server's limit of the messages on one connection.

A transport moves lists of message parts and never waits without a limit. `zmq` implements it; tests have one of threads in one
process, with the real codec. It does not depend on message types: parts come from and go to `common.protocol.codec`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from common.protocol.events import LogEvent, Route
from common.units import Count, Seconds

Frame: TypeAlias = bytes | memoryview
Frames: TypeAlias = Sequence[Frame]
FAILURES_LOG_SECONDS: Seconds = 10.0  # between two log lines of failed handshakes: a refused worker reconnects every second


@dataclass(slots=True)
class Handshakes:
    """Results of the handshakes at one end. The thread that receives owns it."""

    failed: Counter[str] = field(default_factory=Counter)  # by `HandshakeFailure`
    detail: str = ""  # what the last failure may be due to
    _logged: int = 0
    _log_at: Seconds = float("-inf")

    def handshake_failures(self, now: Seconds) -> LogEvent | None:
        """Return a warning of failures since the last warning; None without any, or before `FAILURES_LOG_SECONDS` have passed."""
        failed = self.failed.total() - self._logged
        if not failed or now < self._log_at:
            return None
        self._logged, self._log_at = self._logged + failed, now + FAILURES_LOG_SECONDS
        return LogEvent(event="handshake_failed", fields={"times": failed, "detail": self.detail}, warning=True)


class Transport(Protocol):
    """The members that both ends have."""

    @property
    def handshakes(self) -> Handshakes:
        """As of the last `receive`."""

    def wake(self) -> None:
        """Make a `receive` that waits in another thread return now. Safe from any thread."""

    def close(self) -> None:
        """Release all connections; what was handed over is still sent for a bounded time (the linger)."""


class WorkerTransport(Transport, Protocol):
    """A worker's end: one connection to its server, restored by the transport itself when it breaks."""

    def send(self, frames: Frames) -> bool:
        """Hand over one message; False, and nothing sent, where that would block (no connection, or buffers full)."""

    def receive(self, timeout: Seconds) -> list[Frame] | None:
        """The next message, or None after `timeout` seconds or a `wake`."""

    def expect(self, message_bytes: int) -> None:
        """Set the size of the largest message in either direction: while one crosses, no other message arrives."""


class ServerTransport(Transport, Protocol):
    """The end of a learner or policy server: many connections, distinguished by route."""

    received_key: str
    """Public key (Z85) that authenticated the sender of the message that `receive` returned last; "" without keys."""

    @property
    def endpoint(self) -> str:
        """The address workers connect to, with the port that was really bound."""

    def send(self, route: Route, frames: Frames) -> bool:
        """Hand over one message for `route`; False, and nothing sent, where the route is gone or its buffers are full."""

    def receive(self, timeout: Seconds) -> tuple[Route, list[Frame]] | None:
        """The next message of any worker, or None after `timeout` seconds or a `wake`."""

    def reopen(self) -> None:
        """Drop all connections with all data stored for them, and accept new ones; workers reconnect by themselves."""


# --- floods ---

LIMIT_INTERVAL_SECONDS: Seconds = 1.0
LIMIT_MESSAGES = 256
"""In an interval, beside the window that a worker sends again after a loss. It sends a Report a second."""
MESSAGES_FOR_EXPERIENCE = 3
"""More of them for each message with experience: an actor sends one SnapshotWanted or two for a rollout."""
IGNORED_SECONDS: Seconds = 10.0


class ConnectionLimit:
    """Decides which connections are ignored, because to decode and refuse a message takes time from honest workers.

    Its memory is bounded by the messages of `IGNORED_SECONDS`. Not thread-safe. `now` is the time on any monotonic clock.
    """

    def __init__(self, window: Count = 0) -> None:
        """`window`: the most messages with experience that a worker keeps."""
        self._most = LIMIT_MESSAGES + window
        self._sent: Counter[Route] = Counter()
        self._began_at: Seconds = 0.0
        self._until: dict[Route, Seconds] = {}

    def ignores(self, route: Route, now: Seconds) -> bool:
        """Return whether a message that arrives on this connection is to be discarded unread."""
        if now - self._began_at >= LIMIT_INTERVAL_SECONDS:
            self._began_at = now
            self._sent.clear()
            self._until = {each: until for each, until in self._until.items() if until > now}
        return route in self._until

    def count_experience(self, route: Route) -> None:
        """Count a message with experience, which was admitted: there are no more of them than credits."""
        self._sent[route] -= MESSAGES_FOR_EXPERIENCE

    def count(self, route: Route, now: Seconds) -> LogEvent | None:
        """Count a message without experience; return a warning where its connection is ignored from here on."""
        self._sent[route] += 1
        if self._sent[route] <= self._most:
            return None
        self._until[route] = now + IGNORED_SECONDS
        fields = {"route": route.hex(), "limit": self._most, "seconds": IGNORED_SECONDS}
        return LogEvent(event="connection_ignored", fields=fields, warning=True)
