"""Who the learner deals with: what it offers to all peers (`Terms`), and what it knows of each (`Peer`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from common.session.events import PeerKey, Route
from common.session.ledger import Account
from common.units import EnvSteps, Seconds, Sequence, Version
from common.wire.messages import ArraySpec

ROLES = ("actor", "evaluator")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the learner offers its peers; fixed for the life of the learner."""

    run: str
    config: str  # JSON, for Welcome
    env_signature: str
    schema: tuple[ArraySpec, ...]
    credits: int  # window of each actor, at least
    batch: int  # messages the learner takes at once: the windows together never hold less, or it would wait for ever
    max_actors: int
    heartbeat_seconds: Seconds = 1.0
    silence_seconds: Seconds = 10.0  # without a word a peer counts as away
    forget_seconds: Seconds = 60.0  # away for this long, its experience in flight is given up


@dataclass(slots=True, kw_only=True)
class Peer:
    """One incarnation of one peer. An experience message is expected, then waiting, then taken, then settled."""

    key: PeerKey
    role: str
    index: int
    account: Account
    expected: Sequence  # next number to arrive
    waiting: dict[Sequence, EnvSteps] = field(default_factory=dict)  # in the queue
    taken: dict[Sequence, EnvSteps] = field(default_factory=dict)  # out of the queue, being trained on
    refused: dict[Sequence, EnvSteps] = field(default_factory=dict)  # at the door, numbers not acknowledged yet
    route: Route | None = None  # None: away
    gone: bool = False  # said Goodbye, was superseded or forgotten: its account is closed
    heard_at: Seconds = 0.0
    spoke_at: Seconds = 0.0
    wanted_after: Version | None = None

    @property
    def acked(self) -> Sequence:
        """Every message below this number has left the queue or was refused."""
        return min(self.waiting, default=self.expected)


def progress(peer: Peer) -> dict[str, Any]:
    """How far a peer is settled: what waits or trains now will be sent again, or is lost with this learner."""
    acked, account = peer.acked, peer.account
    pending = sum(peer.waiting.values()) + sum(peer.taken.values())
    received = account.received - pending
    books = {
        "received": received,
        "dropped_by_peer": account.dropped_by_peer,
        "produced": received + sum(account.dropped_by_peer.values()),
    }
    refused = sorted((seq, steps) for seq, steps in peer.refused.items() if seq >= acked)
    return {"name": peer.key.name, "incarnation": peer.key.incarnation, "acked": acked, "account": books, "refused": refused}
