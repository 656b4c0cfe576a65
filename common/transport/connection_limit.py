"""A limit of the messages without experience on one connection. Pure."""

from __future__ import annotations

from collections import Counter

from common.protocol.events import LogEvent, Route
from common.units import Seconds

LIMIT_INTERVAL_SECONDS: Seconds = 1.0
LIMIT_MESSAGES = 256
"""In an interval. A worker sends a Report a second, and its window again after a loss."""
MESSAGES_FOR_EXPERIENCE = 3
"""More of them for each message with experience: an actor sends one SnapshotWanted or two for a rollout."""
IGNORED_SECONDS: Seconds = 10.0


class ConnectionLimit:
    """Decides which connections are ignored, because to decode and refuse a message takes time from honest workers.

    Its memory is bounded by the messages of `IGNORED_SECONDS`. Not thread-safe. `now` is the time on any monotonic clock.
    """

    def __init__(self) -> None:
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
        if self._sent[route] <= LIMIT_MESSAGES:
            return None
        self._until[route] = now + IGNORED_SECONDS
        fields = {"route": route.hex(), "limit": LIMIT_MESSAGES, "seconds": IGNORED_SECONDS}
        return LogEvent(event="connection_ignored", fields=fields, warning=True)
