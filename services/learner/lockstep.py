"""Lockstep: every update trains on the same share of every actor, all collected by the newest policy.

Then nothing depends on who was faster: which messages make a batch, and in which order, follows from the settings alone.
Pure decisions; `Intake` holds the credits back until the next policy is on its way, and the loop tells what broke.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from common import units
from common.runtime.tree import Settings
from common.session.events import PeerKey
from common.units import Version
from services.learner.intake import Item


@dataclass(slots=True, kw_only=True)
class Lockstep:
    """A batch is `share` messages of each of `actors` actors."""

    actors: int
    share: int
    _last: dict[int, tuple[PeerKey, units.Sequence]] = field(default_factory=dict)  # message of each place
    _gaps: Counter[int] = field(default_factory=Counter)  # times that a message of a place did not follow the one before

    @classmethod
    def of(cls, settings: Settings) -> Self | None:
        """As the settings say; None where the run is asynchronous."""
        actors = settings.actor.count
        return cls(actors=actors, share=settings.batch // actors) if settings.lockstep else None

    def choose(self, queue: Iterable[Item]) -> list[Item]:
        """The oldest messages of every actor, in the order of the actors' places; none while one of them is missing."""
        shares: defaultdict[int, list[Item]] = defaultdict(list)
        for item in queue:
            if len(shares[item.index]) < self.share:
                shares[item.index].append(item)
        whole = [share for _, share in sorted(shares.items()) if len(share) == self.share]
        return [item for share in whole[: self.actors] for item in share] if len(whole) >= self.actors else []

    def broken(self, items: Sequence[Item], version: Version) -> str:
        """Return why another run may choose other `items` for its update of policy `version`; "" if it must choose these.

        Call it for each batch, in order: each message is compared with the one before it of the same place.
        """
        reasons = []
        for item in items:
            if reason := self._gap(item):
                self._gaps[item.index] += 1
            elif item.experience.version != version:
                reason = f"acted by an older policy: found {item.experience.version}, wanted {version}"
            reasons += [f"actor {item.index} {reason}"] if reason else []
            self._last[item.index] = item.peer, item.experience.seq
        return reasons[0] if reasons else ""

    def _gap(self, item: Item) -> str:
        """Return why a message does not continue bit for bit from the previous message of the same place."""
        peer, seq = self._last.get(item.index, (None, -1))
        expected = seq + 1 if peer == item.peer else 0
        if item.experience.seq != expected:
            return f"lost experience: found message {item.experience.seq}, wanted {expected}"
        return (
            ""
            if item.continues or peer == item.peer
            else "was replaced: found no state to go on from, wanted that of the process before it"
        )

    def streams(self, items: Sequence[Item], version: Version) -> Iterator[tuple[int, units.Sequence]]:
        """Return, for each of `items`, the batch of policy `version`, its place and its number at that place.

        Numbers are consecutive where experience is, also where one process replaced another.
        """
        counts: Counter[int] = Counter()
        for item in items:
            yield item.index, version * self.share + counts[item.index] + self._gaps[item.index]
            counts[item.index] += 1
