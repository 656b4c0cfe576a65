"""Counts the environments that have not ended an episode yet, before which a mean over ended episodes is biased.

Environments that begin at the same time end their shortest episodes first. A mean over the episodes that have ended is one over
short episodes until each environment has ended one: far too high where each step costs, too low where each step is rewarded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np

from common.algorithms.episode_reports import EPISODE_ENV
from common.protocol.events import Experience
from common.units import Seconds

GONE_SECONDS: Seconds = 60.0  # without a message, after which an actor is not waited for, as its account closes then
GONE_PAUSES = 2  # or so many times the longest time between two messages of an actor, where a slow simulator makes it longer


class Coverage(NamedTuple):
    """Environments of the actors that send experience."""

    environments: int = 0
    unfinished: int = 0  # of them, those that have ended no episode since their actor started


NO_ACTORS = Coverage()


@dataclass(slots=True)
class _Actor:
    incarnation: int | None  # None: the next one continues it, or begins anew
    unfinished: set[int]  # environments
    newest: Seconds = -math.inf  # time of the newest message


@dataclass(slots=True)
class EpisodeCoverage:
    """Which environment of which actor has ended an episode. The thread of the train loop owns it.

    A new incarnation of an actor begins its environments anew, unless it continues them, as in lockstep.
    """

    num_envs: int  # of each actor
    lockstep: bool = False
    _actors: dict[str, _Actor] = field(default_factory=dict)  # by name, in lockstep by index
    _longest: Seconds = 0.0  # between two messages of one actor

    def add(self, samples: Sequence[Experience], now: Seconds) -> Coverage:
        """Enter the ends of episodes in `samples`; return the state of all actors."""
        for sample in samples:
            name = str(sample.index) if self.lockstep else sample.worker.name
            actor = self._actors.get(name)
            if actor is None or (actor.incarnation != sample.worker.incarnation and not (self.lockstep and sample.continues)):
                actor = self._actors[name] = _Actor(None, set(range(self.num_envs)))
            if math.isfinite(actor.newest):
                self._longest = max(self._longest, now - actor.newest)
            actor.incarnation, actor.newest = sample.worker.incarnation, now
            if actor.unfinished:
                actor.unfinished.difference_update(_ended(sample, actor.unfinished))
        gone = max(GONE_SECONDS, GONE_PAUSES * self._longest)
        actors = [actor for actor in self._actors.values() if now - actor.newest < gone]
        return Coverage(len(actors) * self.num_envs, sum(len(actor.unfinished) for actor in actors))

    def state_dict(self) -> dict[str, list[int]]:
        """Return the environments of each actor that have ended no episode, for actors that continue them: JSON values."""
        return {name: sorted(actor.unfinished) for name, actor in self._actors.items()} if self.lockstep else {}

    def load_state_dict(self, state: Mapping[str, Sequence[int]]) -> None:
        """Restore `state_dict`; where actors do not continue, nothing is restored."""
        if self.lockstep:
            self._actors = {name: _Actor(None, set(left)) for name, left in state.items()}


def _ended(sample: Experience, unfinished: Iterable[int]) -> list[int]:
    """Return the environments whose episodes a message reports.

    A payload of the user's own may not name them: then its starts do, or each episode stands for another environment.
    """
    if (env := sample.arrays.get(EPISODE_ENV)) is not None:
        return list(env.tolist())
    reported = len(sample.arrays.get("episode_return", ()))
    if reported and (start := sample.arrays.get("start")) is not None:
        return list(np.flatnonzero(start[1:].any(axis=0)).tolist())
    return list(islice(unfinished, reported))
