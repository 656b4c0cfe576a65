"""Lockstep: every update trains on the same share of every actor, all collected by the newest policy.

Then nothing depends on which process was faster: the messages of a batch, and their order, follow from the settings alone.
Pure decisions; `Intake` holds the credits back until the next policy is sent, and the train loop reports what broke.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from common import units
from common.config.schema import Settings
from common.protocol.events import Experience, WorkerKey
from common.units import Version


@dataclass(slots=True, kw_only=True)
class Lockstep:
    """A batch is `share` messages of each of the `actors` actors of this rank."""

    actors: int
    share: int
    _last: dict[int, tuple[WorkerKey, units.Sequence]] = field(default_factory=dict)  # message of each slot
    _taken: defaultdict[int, deque[tuple[Experience, bool]]] = field(default_factory=lambda: defaultdict(deque))
    """Messages of each slot that are not trained on yet, and whether each follows the one before it."""
    _incarnations: Counter[int] = field(default_factory=Counter)  # of the stream of each slot: another one after each gap

    @classmethod
    def of(cls, settings: Settings) -> Self | None:
        """Return the lockstep of a run with these settings; None where it is asynchronous."""
        actors = settings.rank_actors
        return cls(actors=actors, share=settings.batch // actors) if settings.lockstep else None

    def choose(self, queue: Iterable[Experience]) -> list[Experience]:
        """Return the oldest messages of every actor, in the order of their slots; none while one of them is missing."""
        shares: defaultdict[int, list[Experience]] = defaultdict(list)
        for item in queue:
            if len(shares[item.index]) < self.share:
                shares[item.index].append(item)
        whole = [share for _, share in sorted(shares.items()) if len(share) == self.share]
        return [item for share in whole[: self.actors] for item in share] if len(whole) >= self.actors else []

    def broken(self, items: Sequence[Experience], version: Version) -> str:
        """Return why another run may choose other `items` for its update of policy `version`; "" if it must choose these.

        Call it for each batch, in order: each message is compared with the one before it of the same slot.
        """
        reasons = []
        for item in items:
            reason = self._gap(item)
            self._taken[item.index].append((item, not reason))
            if not reason and item.version != version:
                reason = f"acted by an older policy: found {item.version}, wanted {version}"
            reasons += [f"actor {item.index} {reason}"] if reason else []
            self._last[item.index] = item.worker, item.seq
        return reasons[0] if reasons else ""

    def _gap(self, item: Experience) -> str:
        """Return why a message does not continue bit for bit from the previous message of the same slot."""
        worker, seq = self._last.get(item.index, (None, -1))
        expected = seq + 1 if worker == item.worker else 0
        if item.seq != expected:
            return f"lost experience: found message {item.seq}, wanted {expected}"
        if item.continues or worker == item.worker:
            return ""
        return "was replaced: found no state to go on from, wanted that of the process before it"

    def streams(self, items: Sequence[Experience], version: Version) -> list[Experience]:
        """Return `items`, the batch of policy `version`, as messages of their slots, whichever processes sent them.

        Numbers are consecutive, also where one process replaced another. After a gap, a slot has another incarnation: none that
        an earlier process of the learner gave, since it is from the number after the gap.
        """
        counts: Counter[int] = Counter()
        messages = []
        for item in items:
            seq = version * self.share + counts[item.index]
            if not self._follows(item):
                self._incarnations[item.index] = seq + 1
            worker = WorkerKey(name=f"slot {item.index}", incarnation=self._incarnations[item.index])
            messages.append(replace(item, worker=worker, seq=seq))
            counts[item.index] += 1
        return messages

    def _follows(self, item: Experience) -> bool:
        """Return whether a message follows the last one of its slot that was trained on; those between were dropped as stale."""
        follows, taken = True, self._taken[item.index]
        while taken:
            other, after = taken.popleft()
            follows = follows and after
            if other is item:
                break
            follows = False
        return follows
