"""Counts the environments that have not ended an episode yet, before which a mean over ended episodes is biased.

Environments that begin at the same time end their shortest episodes first. A mean over the episodes that have ended is one over
short episodes until each environment has ended one: far too high where each step costs, too low where each step is rewarded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.algorithms.episode_reports import EPISODE_ENV
from common.protocol.events import Experience


class Coverage(NamedTuple):
    """Environments of the actors that send experience."""

    environments: int = 0
    unfinished: int = 0  # of them, those that have ended no episode since their actor started
    left: int = 0  # environments that were just lost or began anew, and had ended none, where others of the same actor had


NO_ACTORS = Coverage()


@dataclass(slots=True)
class _Actor:
    incarnation: int | None  # None: the next one continues it, or begins anew
    unfinished: set[int]  # environments
    running: NDArray[np.bool_] | None = None  # [B], after the last row, of env workers: an episode is under way

    def cut_off(self, arrays: Mapping[str, NDArray[Any]]) -> set[int]:
        """Return the environments whose running episode was cut by missing rows of an env worker: they begin anew."""
        if not arrays.keys() >= {"valid", "start", "terminated", "truncated"}:
            return set()
        valid, start = arrays["valid"], arrays["start"]
        before = np.zeros_like(valid[:1]) if self.running is None else self.running[np.newaxis]
        running = np.concatenate([before, valid & ~(arrays["terminated"] | arrays["truncated"])])
        self.running = running[-1]
        return set(np.flatnonzero((running[:-1] & ~valid & ~start[1:]).any(axis=0)).tolist())


@dataclass(slots=True)
class EpisodeCoverage:
    """Which environment of which actor has ended an episode. The thread of the train loop owns it.

    A new incarnation of an actor begins its environments anew, unless it continues them, as in lockstep. So does an env worker
    after missing rows. An actor counts from its first message until its account is closed, however long a slow simulator takes
    for the next one.
    """

    num_envs: int  # of each actor
    lockstep: bool = False
    _actors: dict[str, _Actor] = field(default_factory=dict)  # by name, in lockstep by index

    def add(self, samples: Sequence[Experience], open_actors: Collection[str]) -> Coverage:
        """Enter the ends of episodes in `samples`; return the state of all actors. `open_actors`: those with an open account."""
        sent, left = set[str](), 0
        for sample in samples:
            name = str(sample.index) if self.lockstep else sample.worker.name
            actor = self._actors.get(name)
            if actor is None or (actor.incarnation != sample.worker.incarnation and not (self.lockstep and sample.continues)):
                left += len(actor.unfinished) % self.num_envs if actor else 0
                actor = self._actors[name] = _Actor(None, set(range(self.num_envs)))
            actor.incarnation = sample.worker.incarnation
            sent.add(name)
            if actor.unfinished:
                actor.unfinished.difference_update(_ended(sample, actor.unfinished))
                cut_off = len(actor.unfinished & actor.cut_off(sample.arrays))
                left += cut_off if len(actor.unfinished) < self.num_envs else 0
        stay = sent if self.lockstep else sent.union(open_actors)  # in lockstep each batch has all actors
        left += sum(len(actor.unfinished) % self.num_envs for name, actor in self._actors.items() if name not in stay)
        self._actors = {name: actor for name, actor in self._actors.items() if name in stay}
        return Coverage(len(self._actors) * self.num_envs, sum(len(actor.unfinished) for actor in self._actors.values()), left)

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
