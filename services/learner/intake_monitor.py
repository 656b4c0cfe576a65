"""Counts of the learner's I/O thread, and its guards: against floods, short memory and a ledger that does not balance."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from common.errors import InternalError
from common.observability.learner_stats import IntakeStats
from common.protocol.events import LogEvent, Route
from common.protocol.learner_side import LearnerSide
from common.protocol.messages import Message
from common.runtime.machine import MemoryGuard
from common.transport.api import ConnectionLimit, Frames, ServerTransport
from common.units import MIB, Seconds

LEDGER_SECONDS: Seconds = 1.0  # between two checks of the ledger, each of which adds up the accounts of all workers


@dataclass(slots=True, kw_only=True)
class IntakeMonitor:
    """Counts and guards of the I/O thread, which alone calls it."""

    transport: ServerTransport
    session: LearnerSide
    log_event: Callable[[LogEvent], None]
    memory: MemoryGuard  # of the process
    _limit: ConnectionLimit = field(init=False)
    _received: Counter[str] = field(default_factory=Counter)
    _sent: Counter[str] = field(default_factory=Counter)
    _bytes_received: int = 0
    _bytes_sent: int = 0
    _messages_ignored: int = 0
    _sockets_reopened: int = 0
    _queue_seconds: Seconds = 0.0
    _checked_at: Seconds = -math.inf
    _unbalanced: bool = False

    def __post_init__(self) -> None:
        self._limit = ConnectionLimit(self.session.config.window(actors=1))

    def ignores(self, route: Route, now: Seconds) -> bool:
        """Return whether a message that arrived on this connection is discarded unread, and count it where it is."""
        ignored = self._limit.ignores(route, now)
        self._messages_ignored += ignored
        return ignored

    def handled(self, route: Route, now: Seconds, *, admitted: bool) -> None:
        """Count a message: a connection that brings too many without experience is ignored for a while."""
        if admitted:
            self._limit.count_experience(route)
        elif ignored := self._limit.count(route, now):
            self.log_event(ignored)

    def arrived(self, frames: Frames) -> None:
        """Count the bytes of a message that is decoded next."""
        self._bytes_received += sum(map(len, frames))

    def decoded(self, message: Message) -> None:
        """Count a message that could be decoded."""
        self._received[message.tag] += 1

    def sent(self, message: Message, frames: Frames) -> None:
        """Count a message that the transport took."""
        self._sent[message.tag] += 1
        self._bytes_sent += sum(map(len, frames))

    def tick(self, now: Seconds, elapsed: Seconds) -> None:
        """Run the checks that are due, `elapsed` seconds after the last call."""
        self._queue_seconds += self.session.waiting * elapsed
        if failures := self.transport.handshakes.handshake_failures(now):
            self.log_event(failures)
        if self.memory.short():
            self._free_memory()
        if now - self._checked_at >= LEDGER_SECONDS:
            self._checked_at = now
            self._check_ledger()

    def _free_memory(self) -> None:
        """Drop all connections with the data that ZeroMQ stored for them; welcomed workers greet again and re-send."""
        self.transport.reopen()
        self._sockets_reopened += 1
        freed, reserve = self.memory.freed() / MIB, self.memory.reserve / MIB
        fields = {"why": f"less than {reserve:.0f} MiB of memory were free", "freed_mib": round(freed)}
        self.log_event(LogEvent(event="socket_reopened", fields=fields, warning=True))

    def _check_ledger(self) -> None:
        try:
            self.session.check_ledger()
        except InternalError as error:  # a bug, but no reason to lose a run: one warning
            if not self._unbalanced:
                self.log_event(LogEvent(event="ledger_unbalanced", fields={"detail": str(error)}, warning=True))
            self._unbalanced = True

    def stats(self, *, queue_depth: int) -> IntakeStats:
        """Return all counts, and the facts of the session, as of now."""
        session = self.session
        return IntakeStats(
            ledger=session.ledger.as_dict(),
            queue_depth=queue_depth,
            queue_capacity=session.queue_capacity,
            queue_seconds=self._queue_seconds,
            actors=session.connected("actor"),
            open_actors=session.open_actors,
            evaluators=session.connected("evaluator"),
            messages_dropped=Counter(session.messages_dropped),
            reconnects=session.reconnects,
            evictions=session.evictions,
            handshakes_failed=Counter(self.transport.handshakes.failed),
            sockets_reopened=self._sockets_reopened,
            messages_ignored=self._messages_ignored,
            received=Counter(self._received),
            sent=Counter(self._sent),
            bytes_received=self._bytes_received,
            bytes_sent=self._bytes_sent,
        )
