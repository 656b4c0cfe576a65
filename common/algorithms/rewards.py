"""The scale of rewards that the learner keeps and divides them by (`env.normalize_reward`).

    G_t = r_t + gamma G_{t-1},   from 0 at the first env step of an episode;   r_t / std(G)

over all env steps of the run (Engstrom et al. 2020, arXiv:2005.12729, algorithm 1; gymnasium's `NormalizeReward`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common import units
from common.algorithms.losses import LEAST_STD
from common.algorithms.moments import Moments
from common.algorithms.ranks import Ranks
from common.protocol.events import Experience
from common.protocol.messages import Arrays

Rewards = TypeVar("Rewards", Tensor, NDArray[np.float32])


class _Stream(NamedTuple):
    """The discounted returns of the environments of one actor after its newest trajectory."""

    worker: str
    incarnation: int
    seq: units.Sequence  # of that trajectory
    discounted: Tensor  # [B] float64: gamma G of the last env step; 0 where its episode ended


class RewardStatistics:
    """Owns the moments of the discounted returns of all env steps that a learner received, and scales its rewards.

    Returns go on from one trajectory of an actor to the next. They begin at 0 after one that was lost or dropped, and where
    another actor takes the slot.
    """

    def __init__(self, *, enabled: bool, gamma: float, ranks: Ranks) -> None:
        """Keep statistics only where `enabled`; otherwise rewards stay as they are."""
        self._enabled, self._gamma, self._ranks = enabled, gamma, ranks
        self._set(Moments(), {})

    @property
    def metrics(self) -> dict[str, float]:
        """The divisor, `reward_std`; nothing where it is not enabled."""
        return {"reward_std": self._std} if self._enabled else {}

    def add(self, samples: Sequence[Experience]) -> None:
        """Add trajectories, of each actor in the order of their numbers, and those of the other ranks."""
        if not self._enabled:
            return
        returns = np.concatenate([np.empty(0), *(self._returns(sample) for sample in samples)])
        batch = Moments.of(torch.from_numpy(returns)).over(self._ranks)
        if batch.count:
            self._set(self._moments.merge(batch), self._streams)

    def scaled(self, reward: Rewards) -> Rewards:
        """Rewards, or sums of rewards, of any shape, over the newest deviation."""
        return reward / self._std if self._enabled else reward

    def state_dict(self) -> dict[str, Any]:
        """The moments, and the streams by the slots of their actors; empty where nothing was added."""
        if not self._moments.count:
            return {}
        streams = {str(index): stream._asdict() for index, stream in self._streams.items()}
        return {"moments": asdict(self._moments), "streams": streams}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        streams = {int(index): _Stream(**stream) for index, stream in state.get("streams", {}).items()}
        self._set(Moments.restored(state["moments"]) if state else Moments(), streams)

    def _set(self, moments: Moments, streams: dict[int, _Stream]) -> None:
        """Returns that hardly differ have no scale, as those of a first message with one env step: rewards stay as they are."""
        self._moments, self._streams = moments, streams
        std = moments.std.item()
        self._std = std if std > LEAST_STD else 1.0

    def _returns(self, sample: Experience) -> NDArray[np.float64]:
        """The discounted returns [N] after the env steps of a trajectory."""
        before = self._streams.get(sample.index)
        discounted = np.zeros(sample.arrays["reward"].shape[1])
        if before and (before.worker, before.incarnation, before.seq) == (*sample.stream, sample.seq - 1):
            discounted = before.discounted.numpy()
        returns, discounted = discounted_returns(sample.arrays, gamma=self._gamma, discounted=discounted)
        self._streams[sample.index] = _Stream(*sample.stream, sample.seq, torch.from_numpy(discounted))
        return returns


def discounted_returns(
    arrays: Arrays, *, gamma: float, discounted: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return G [N] after the env steps of a trajectory, and gamma G [B] after its last row, from that before its first.

    Reset rows, missing rows and rewards that are not finite do not count; an episode goes on after none of them.
    """
    counts = arrays["valid"] & np.isfinite(arrays["reward"])
    reward = np.where(counts, arrays["reward"], 0.0).astype(np.float64)
    factor = gamma * (counts & ~(arrays["terminated"] | arrays["truncated"] | arrays["start"][1:]))
    running, returns = discounted, np.empty_like(reward)
    for t in range(len(reward)):
        np.add(reward[t], running, out=returns[t])
        running = factor[t] * returns[t]
    return returns[counts], running
