"""The states from which actors go on in lockstep, by place: the learner keeps them, and never looks inside those of an actor."""

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
    """After one message of a place."""

    actor: State
    episodes: Mapping[str, NDArray[Any]]  # the learner's own sums of the running episodes, where it keeps any


class ActorStates:
    """Of each place: after the newest admitted message, for actors that join; after the newest trained one, for checkpoints."""

    def __init__(self) -> None:
        """No message has come."""
        self._newest: dict[int, PlaceState] = {}
        self._trained: dict[int, PlaceState] = {}
        self._pending: dict[tuple[PeerKey, Sequence], tuple[int, PlaceState]] = {}

    def newest(self, index: int) -> PlaceState | None:
        """After the newest admitted message of a place; None before the first."""
        return self._newest.get(index)

    def admitted(self, index: int, key: PeerKey, seq: Sequence, state: PlaceState) -> None:
        """A message of the actor at a place is in the queue."""
        self._newest[index] = state
        self._pending[key, seq] = index, state

    def settled(self, key: PeerKey, seq: Sequence, *, trained: bool) -> None:
        """An admitted message was trained on, or dropped."""
        pending = self._pending.pop((key, seq), None)
        if pending is not None and trained:
            index, state = pending
            self._trained[index] = state

    def state_dict(self) -> dict[int, dict[str, Any]]:
        """After the newest trained message of each place."""
        return {index: {"actor": state.actor, "episodes": dict(state.episodes)} for index, state in self._trained.items()}

    def load_state_dict(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Inverse of `state_dict`: what was admitted since was lost with the learner that admitted it."""
        self._trained = {index: PlaceState(**kept) for index, kept in state.items()}
        self._newest = dict(self._trained)
