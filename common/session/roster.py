"""Who the learner deals with: what it offers to all peers (`Terms`), and whom it knows, by name and incarnation (`Roster`).

A role has as many places as peers of it are welcome at once. A name holds a place, its index, from its first Hello on,
while it is away and after it has gone, so that it finds its index when it comes back. It loses the place only to a new
name that finds none free, and is forgotten. So the roster is bounded however many names come and go, and an index is
always below the number of places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from common.session.events import PeerKey
from common.session.peer import Peer, progress, restored
from common.units import Seconds
from common.wire.limits import INCARNATION_MAX
from common.wire.messages import ArraySpec, Hello


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
    lockstep: bool = False  # each batch needs all actors alike: no window is widened while some of them are not here
    max_evaluators: int = 16  # each costs the learner a snapshot per evaluation, and nobody has use for more
    heartbeat_seconds: Seconds = 1.0
    silence_seconds: Seconds = 10.0  # without a word a peer counts as away
    forget_seconds: Seconds = 60.0  # away for this long, its experience in flight is given up

    def window(self, actors: int) -> int:
        """Credits of each of so many actors: the setting, or more where few must fill one batch."""
        return self.credits if self.lockstep else max(self.credits, -(-self.batch // max(1, actors)))

    def places(self, role: str) -> int:
        """How many peers of this role are welcome at once."""
        return self.max_actors if role == "actor" else self.max_evaluators


class Roster:
    """The newest incarnation of each name, and closed ones whose messages are still in the queue or being trained on."""

    def __init__(self, terms: Terms) -> None:
        """Nobody is known."""
        self.forgotten = -1  # largest incarnation of a name that was forgotten; `admission.check_identity` says what for
        self.named = -1  # largest incarnation that a refusal named: no two workers are named the same
        self._terms = terms
        self._peers: dict[PeerKey, Peer] = {}
        self._newest: dict[str, Peer] = {}
        self._generations: Counter[tuple[str, int]] = Counter()  # (role, index) -> incarnations that held it so far

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    def __getitem__(self, key: PeerKey) -> Peer:
        return self._peers[key]

    def holders(self, role: str) -> list[Peer]:
        """Who holds a place of this role: one peer for each name."""
        return [peer for peer in self._newest.values() if peer.role == role]

    def find(self, hello: Hello) -> Peer | None:
        """The newest incarnation of the name; of a forgotten one the very incarnation, while its messages are in the queue."""
        key = PeerKey(name=hello.peer, incarnation=hello.incarnation)
        return self._newest.get(hello.peer) or self._peers.get(key)

    def name_incarnation(self, name: str) -> int:
        """Return an incarnation above all known ones of this name; each is returned once."""
        newest = self._newest[name].key.incarnation if name in self._newest else self.forgotten
        self.named = max(self.named, newest) + 1
        return self.named

    def join(self, key: PeerKey, role: str) -> Peer:
        """A new incarnation: of a known name at its place, else at the first that is free."""
        older = self._newest.get(key.name)
        index = older.index if older is not None and older.role == role else self._free(role)
        peer = Peer(key=key, role=role, index=index, generation=self._generations[role, index])
        self._generations[role, index] += 1  # the index's, not the name's: whoever holds it next has random streams of its own
        self._newest[key.name] = self._peers[key] = peer
        return peer

    def adopt(self, other: Peer) -> Peer:
        """Return the peer of an incarnation that another learner knew, at its place: with its account here, or with a new one."""
        known = self._peers.get(other.key)
        if known is None:
            known = Peer(
                key=other.key,
                role=other.role,
                index=other.index,
                generation=other.generation,
                public_key=other.public_key,
            )
            self._newest[other.key.name] = self._peers[other.key] = known
        return known

    def raise_numbers(self, other: Roster) -> None:
        """Skip the numbers that another learner gave: generations of places, and incarnations."""
        self.forgotten, self.named = max(self.forgotten, other.forgotten), max(self.named, other.named)
        self._generations |= other._generations

    def crowded_out(self, role: str, now: Seconds) -> list[Peer]:
        """Who must be forgotten before a new name joins: who has been gone longest, then who has been away longest."""
        holders = self.holders(role)
        absent = [peer for peer in holders if peer.route is None]
        absent.sort(key=lambda peer: (peer.gone, peer.silent(now)), reverse=True)
        return absent[: max(0, len(holders) + 1 - self._terms.places(role))]

    def forget(self, peer: Peer) -> None:
        """Free the place of a name; what is in its closed account stays in the ledger's sums."""
        del self._newest[peer.key.name]
        self.forgotten = max(self.forgotten, peer.key.incarnation)

    def sweep(self) -> None:
        """Let go of closed incarnations whose last message has met its end."""
        for peer in list(self):
            if self._newest.get(peer.key.name) is not peer and not peer.waiting and not peer.taken:
                del self._peers[peer.key]

    def state_dict(self) -> dict[str, Any]:
        """Names, places and how far each peer got. JSON values."""
        return {
            "peers": [progress(peer) for peer in self._newest.values()],
            "generations": [[role, index, number] for (role, index), number in self._generations.items()],
            "forgotten": self.forgotten,
            "named": self.named,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; everybody is away."""
        self.named = state.get("named", -1)  # an earlier release took, and kept, any incarnation
        most = max(INCARNATION_MAX, self.named)
        self._peers = {peer.key: peer for peer in (restored(peer, most=most) for peer in state["peers"])}
        self._newest = {peer.key.name: peer for peer in self}
        self._generations = Counter({(role, index): number for role, index, number in state["generations"]})
        self.forgotten = min(state["forgotten"], most)

    def _free(self, role: str) -> int:
        taken = {peer.index for peer in self.holders(role)}
        return next(index for index in count() if index not in taken)
