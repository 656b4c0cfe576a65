"""States from which actors continue in lockstep, by place. The learner keeps them, and never decodes those of an actor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from common.session.events import PeerKey
from common.units import Sequence

State: TypeAlias = NDArray[np.uint8]
"""Bytes [N] of one actor's environments, policy and rollout; none where an actor cannot read them."""


class PlaceState(NamedTuple):
    """State after one message of a place."""

    actor: State
    episodes: Mapping[str, NDArray[Any]]  # the learner's own sums of the running episodes, where it keeps any


class ActorStates:
    """States of each place: after the newest admitted message, for joining actors; after the newest trained one, to be saved."""

    def __init__(self) -> None:
        """Begin without any message."""
        self._newest: dict[int, PlaceState] = {}
        self._trained: dict[int, PlaceState] = {}
        self._pending: dict[tuple[PeerKey, Sequence], tuple[int, PlaceState]] = {}

    def newest(self, index: int) -> PlaceState | None:
        """Return the state after the newest admitted message of a place; None before the first."""
        return self._newest.get(index)

    def admitted(self, index: int, key: PeerKey, seq: Sequence, state: PlaceState) -> None:
        """Record that a message of the actor at a place entered the queue."""
        self._newest[index] = state
        self._pending[key, seq] = index, state

    def settled(self, key: PeerKey, seq: Sequence, *, trained: bool) -> None:
        """Record that an admitted message was trained on, or dropped."""
        pending = self._pending.pop((key, seq), None)
        if pending is not None and trained:
            index, state = pending
            self._trained[index] = state

    def state_dict(self) -> dict[int, dict[str, Any]]:
        """Return the state after the newest trained message of each place."""
        return {index: {"actor": state.actor, "episodes": dict(state.episodes)} for index, state in self._trained.items()}

    def load_state_dict(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Restore `state_dict`: messages admitted since were lost with the learner that admitted them."""
        self._trained = {index: PlaceState(**kept) for index, kept in state.items()}
        self._newest = dict(self._trained)
