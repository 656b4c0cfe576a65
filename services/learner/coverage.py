"""Counts the environments that have not ended an episode yet, before which a mean over ended episodes is biased.

Environments that begin at the same time end their shortest episodes first. A mean over the episodes that have ended is one over
short episodes until each environment has ended one: far too high where each step costs, too low where each step is rewarded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from common.protocol.events import Experience
from common.units import Seconds

GONE_SECONDS: Seconds = 60.0  # without a message, after which an actor is not waited for, as its account closes then


class Coverage(NamedTuple):
    """Environments of the actors that send experience."""

    environments: int = 0
    unfinished: int = 0  # of them, those that have ended no episode since their actor started


NO_ACTORS = Coverage()


@dataclass(slots=True)
class _Actor:
    incarnation: int
    unfinished: set[int]  # environments
    newest: Seconds = 0.0  # time of the newest message


@dataclass(slots=True)
class EpisodeCoverage:
    """Which environment of which actor has ended an episode. The thread of the train loop owns it."""

    num_envs: int  # of each actor
    _actors: dict[str, _Actor] = field(default_factory=dict)  # by name: a new incarnation takes the place of the one before

    def add(self, samples: Sequence[Experience], now: Seconds) -> Coverage:
        """Enter the ends of episodes in `samples`; return the state of all actors.

        Gradients hold no rows: as many episodes as there are environments stand for one of each.
        """
        for sample in samples:
            worker, start = sample.worker, sample.arrays.get("start")
            actor = self._actors.get(worker.name)
            if actor is None or actor.incarnation != worker.incarnation:
                actor = self._actors[worker.name] = _Actor(worker.incarnation, set(range(self.num_envs)))
            actor.newest = now
            if not actor.unfinished:
                continue
            if start is not None:
                actor.unfinished.difference_update(np.flatnonzero(start[1:].any(axis=0)).tolist())
            else:
                for _ in sample.arrays["episode_return"][: len(actor.unfinished)]:
                    actor.unfinished.pop()
        actors = [actor for actor in self._actors.values() if now - actor.newest < GONE_SECONDS]
        return Coverage(len(actors) * self.num_envs, sum(len(actor.unfinished) for actor in actors))
