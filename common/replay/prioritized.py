"""Which transitions are drawn, and how often: proportional to their priorities, or each alike.

A slot is a place in the memory; only slots that were entered are drawn. Sources: Schaul et al. 2016 (arXiv:1511.05952).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.errors import InternalError
from common.replay.sumtree import SumTree


class PrioritySettings(NamedTuple):
    """A transition of error delta has priority p = (|delta| + epsilon)^alpha (section 3.3)."""

    alpha: float = 0.6  # 0: each alike, 1: proportional to the error
    epsilon: float = 1e-6  # keeps what was learned well from never being seen again


class Draw(NamedTuple):
    """`slot` [N] int64 and `weight` [N] float32, the importance weights."""

    slot: NDArray[np.int64]
    weight: NDArray[np.float32]


class Prioritized:
    """Draws slots in proportion to their priorities."""

    def __init__(self, slots: int, settings: PrioritySettings) -> None:
        self._settings = settings
        self._tree = SumTree(slots)
        self._largest = 1.0  # priority, raised to alpha, of what is new: seen soon, since its error is unknown

    @property
    def total(self) -> float:
        """Sum of the priorities."""
        return self._tree.total

    def enter(self, slots: NDArray[np.int64], error: NDArray[np.float32]) -> None:
        """Let slots [K] be drawn, with priorities by |error| [K]; where that is NaN, the largest priority so far."""
        self._set(slots, np.where(np.isnan(error), self._largest, self._priority(error)))

    def leave(self, slots: NDArray[np.int64]) -> None:
        """Draw slots [K] no more."""
        self._tree.set(slots, 0.0)

    def update(self, slots: NDArray[np.int64], error: NDArray[np.float32]) -> None:
        """Give slots [K] that are entered priorities by |error| [K]. Raises `InternalError` where one is not finite."""
        if not np.isfinite(error).all():
            raise InternalError(
                "errors that set priorities", found="NaN or infinity", wanted="finite", fix="has training diverged?"
            )
        self._set(slots, self._priority(error))

    def draw(self, number: int, rng: np.random.Generator, *, beta: float, entered: int) -> Draw:
        """`number` slots out of `entered`, stratified, and w_i = (N P(i))^-beta / max_j w_j (section 3.4)."""
        slots = self._tree.draw(number, rng)
        weight = (entered / self._tree.total * self._tree.get(slots)) ** -beta
        return Draw(slots, (weight / weight.max()).astype(np.float32))

    def state_dict(self, slots: int) -> dict[str, Any]:
        """Return the priorities of the first `slots`, the only ones ever set, and the largest priority so far."""
        return {"priority": self._tree.get(np.arange(slots)), "largest": self._largest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict` into a tree without priorities."""
        priority = state["priority"]
        self._tree.set(np.arange(len(priority)), priority)
        self._largest = state["largest"]

    def _priority(self, error: NDArray[np.float32]) -> NDArray[np.float64]:
        return (np.abs(error, dtype=np.float64) + self._settings.epsilon) ** self._settings.alpha

    def _set(self, slots: NDArray[np.int64], priority: NDArray[np.float64]) -> None:
        if slots.size:
            self._tree.set(slots, priority)
            self._largest = max(self._largest, float(priority.max()))


def draw_uniform(number: int, rng: np.random.Generator, *, span: NDArray[np.uint8], entered: int) -> Draw:
    """`number` slots where `span` > 0, of which there are `entered` > 0, each alike; all weights are 1."""
    drawn = np.empty(0, np.int64)
    while (missing := number - len(drawn)) > 0:
        tries = rng.integers(len(span), size=int(1.2 * missing * len(span) / entered) + 8)
        drawn = np.concatenate([drawn, tries[span[tries] > 0][:missing]])
    return Draw(drawn, np.ones(number, np.float32))
