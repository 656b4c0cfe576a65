"""In lockstep: the state of each actor slot, from which the next incarnation at the slot continues, and a resumed learner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from common.protocol.events import LogEvent, WorkerKey
from common.protocol.incarnation import Worker
from common.protocol.messages import ACTOR_STATE, ExperienceMessage
from common.units import Sequence

ActorState: TypeAlias = NDArray[np.uint8]
"""Bytes [N] of one actor's environments, policy and rollout, which the learner never decodes; empty where unreadable."""


@runtime_checkable
class RunningEpisodes(Protocol):
    """An `EpisodeCheck` that keeps sums of running episodes, which another incarnation continues in lockstep."""

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the sums after the last message."""

    def go_on(self, state: Mapping[str, np.ndarray], seq: Sequence) -> None:
        """Restore the sums in `state`, which message `seq` continues."""


class LockstepState(NamedTuple):
    """State after one message of an actor slot, from which the next incarnation at the slot continues."""

    actor: ActorState
    episodes: Mapping[str, NDArray[Any]]  # the learner's own sums of the running episodes, where it keeps any


class LockstepStates:
    """States of each actor slot: after its newest admitted message, for joining actors; after its newest trained one, to save."""

    def __init__(self) -> None:
        self._newest: dict[int, LockstepState] = {}
        self._trained: dict[int, LockstepState] = {}
        self._pending: dict[tuple[WorkerKey, Sequence], tuple[int, LockstepState]] = {}

    def newest(self, index: int) -> LockstepState | None:
        """Return the state after the newest admitted message of a slot; None before the first."""
        return self._newest.get(index)

    def continue_episodes(self, worker: Worker, message: ExperienceMessage) -> None:
        """Continue the episodes of the slot at the first message of an incarnation."""
        slot, state = self.newest(worker.index), message.arrays.get(ACTOR_STATE)
        if slot and slot.actor.size and state is not None and state.size and isinstance(worker.episodes, RunningEpisodes):
            worker.episodes.go_on(slot.episodes, message.seq)

    def admitted(self, worker: Worker, message: ExperienceMessage) -> list[LogEvent]:
        """Keep the state in a message of an actor that entered the queue. The first empty state is logged."""
        before, state = self.newest(worker.index), message.arrays[ACTOR_STATE]
        running = worker.episodes if isinstance(worker.episodes, RunningEpisodes) else None
        self._newest[worker.index] = LockstepState(state, running.state_dict() if running else {})
        self._pending[worker.key, message.seq] = worker.index, self._newest[worker.index]
        if state.size:
            return []
        if before is None:
            consequence = "a restart of it or of the learner breaks lockstep; its log has the reason"
            fields = {"worker": worker.key.name, "consequence": consequence}
            return [LogEvent(event="actor_state_unreadable", fields=fields, warning=True)]
        worker.continues = worker.continues and not before.actor.size  # it could not continue from the state that it got
        return []

    def completed(self, key: WorkerKey, seq: Sequence, *, trained: bool) -> None:
        """Record that an admitted message was trained on, or dropped."""
        pending = self._pending.pop((key, seq), None)
        if pending is not None and trained:
            index, state = pending
            self._trained[index] = state

    def state_dict(self) -> dict[int, dict[str, Any]]:
        """Return the state after the newest trained message of each slot."""
        return {index: {"actor": state.actor, "episodes": dict(state.episodes)} for index, state in self._trained.items()}

    def load_state_dict(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Restore `state_dict`: messages admitted since were lost with the learner that admitted them."""
        self._trained = {index: LockstepState(**kept) for index, kept in state.items()}
        self._newest = dict(self._trained)
