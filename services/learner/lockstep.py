"""Lockstep: every update trains on the same share of every actor, all collected by the newest policy.

Then nothing depends on who was faster: which messages make a batch, and in which order, follows from the settings alone.
Pure decisions; `Intake` holds the credits back until the next policy is on its way, and the loop tells what broke.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from common.runtime.tree import Settings
from common.units import Version
from services.learner.intake import Item


@dataclass(frozen=True, slots=True, kw_only=True)
class Lockstep:
    """A batch is `share` messages of each of `actors` actors."""

    actors: int
    share: int

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
        """Why another run need not have these very `items` of `choose` for its update of policy `version`; "" if it has."""
        for number, item in enumerate(items):
            expected = version * self.share + number % self.share
            actor, message = f"actor {item.index}", item.experience
            if item.generation > 0:
                return f"{actor} was replaced: found incarnation {item.generation} of its place, wanted 0"
            if message.seq != expected:
                return f"{actor} lost experience: found message {message.seq}, wanted {expected}"
            if message.version != version:
                return f"{actor} acted by an older policy: found {message.version}, wanted {version}"
        return ""
