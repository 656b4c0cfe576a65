"""The metrics that all peers of the learner have alike: what they say and hear on their connection."""

from __future__ import annotations

from collections.abc import Iterable

from common.runtime.metrics import ServiceMetrics, advance, kinds
from common.session.actor_side import State
from common.transport.link import Link
from common.wire.messages import Credit, Drain, Refusal, Snapshot, Welcome

RECEIVED = kinds(Welcome, Refusal, Credit, Snapshot, Drain)


class PeerMetrics(ServiceMetrics):
    """Base of a peer's metrics. Declares nothing by itself: the order of declarations is the service's."""

    def _declare_connection(self, sent: Iterable[str]) -> None:
        """`sent` are the kinds of message that this peer may send."""
        self.messages_sent = self._counters(
            "messages_sent",
            "Messages handed to the transport, re-sends included. Not those for which it had no room.",
            label="kind",
            values=sent,
        )
        self.messages_received = self._counters(
            "messages_received", "Messages that decoded. Not bytes that were no message.", label="kind", values=RECEIVED
        )
        self.reconnects = self._counter("reconnects", "Welcomes after the first: the learner was lost and came back.")
        self.connected = self._gauge("connected", "1 while welcomed by a learner that still answers, else 0.")

    def _refresh_connection(self, link: Link) -> None:
        """Bring over what the connection counts."""
        for kind, counter in self.messages_sent.items():
            advance(counter, link.sent[kind])
        for kind, counter in self.messages_received.items():
            advance(counter, link.received[kind])
        advance(self.reconnects, link.session.reconnects)
        self.connected.set(link.session.state is State.WELCOME)
