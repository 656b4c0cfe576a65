"""Running statistics that the learner keeps of value targets, and of vector observations (`model.normalize_observation`).

Networks take new statistics only between two versions of the policy, so that all experience of a version, its log-probabilities
and the learner's evaluation of them go through one normalisation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.algorithms.losses import LEAST_STD
from common.algorithms.ranks import ALONE, Ranks, merged_moments
from common.models.layers import Network
from common.protocol.events import Experience


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Mean and variance of a stream of numbers, as count, mean and sum of squared deviations (`m2`).

    Before the first number `normalize` and `denormalize` return the values unchanged.
    """

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0

    @classmethod
    def of(cls, values: Tensor) -> Moments:
        """The moments of the values themselves, of any shape, taken in float64."""
        if values.numel() == 0:
            return cls()
        variance, mean = torch.var_mean(values.double(), correction=0)
        return cls(count=values.numel(), mean=mean.item(), m2=variance.item() * values.numel())

    def merge(self, other: Moments) -> Moments:
        """The moments of both streams together (Chan, Golub, LeVeque 1979, eq. 2.1)."""
        count = self.count + other.count
        if count == 0:
            return self
        delta = other.mean - self.mean
        mean = self.mean + delta * other.count / count
        return Moments(count=count, mean=mean, m2=self.m2 + other.m2 + delta**2 * self.count * other.count / count)

    def over(self, ranks: Ranks) -> Moments:
        """The moments of the streams of all ranks together."""
        if ranks.count == 1:
            return self
        own = torch.tensor([self.mean, self.m2], dtype=torch.float64)
        count, mean, m2 = merged_moments(self.count, own[:1], own[1:], ranks)
        return Moments(count=int(count.item()), mean=mean.item(), m2=m2.item())

    @property
    def std(self) -> float:
        """Population standard deviation, at least `LEAST_STD`; 1 before the first number."""
        return max(math.sqrt(self.m2 / self.count), LEAST_STD) if self.count else 1.0

    def normalize(self, values: Tensor) -> Tensor:
        """Shifted and scaled to mean 0 and deviation 1 of the stream."""
        return (values - self.mean) / self.std

    def denormalize(self, values: Tensor) -> Tensor:
        """Inverse of `normalize`."""
        return values * self.std + self.mean


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentMoments:
    """Number of observations, and mean and sum of squared deviations (`m2`) of each of their components, [*frame] float64."""

    count: int
    mean: Tensor
    m2: Tensor

    @classmethod
    def of(cls, observations: np.ndarray) -> ComponentMoments:
        """The moments of observations [N, *frame], N > 0."""
        values = torch.from_numpy(observations.astype(np.float64))
        variance, mean = torch.var_mean(values, dim=0, correction=0)
        return cls(count=len(values), mean=mean, m2=variance * len(values))

    def merge(self, other: ComponentMoments) -> ComponentMoments:
        """The moments of all observations of both (Chan, Golub, LeVeque 1979, eq. 2.1), in any order within rounding."""
        count = self.count + other.count
        delta = other.mean - self.mean
        return ComponentMoments(
            count=count,
            mean=self.mean + delta * (other.count / count),
            m2=self.m2 + other.m2 + delta.square() * (self.count * other.count / count),
        )

    @property
    def std(self) -> Tensor:
        """Population standard deviation [*frame]."""
        return (self.m2 / self.count).sqrt()


class ObservationStatistics:
    """Owns the moments of the observations that a learner trained on, and sets the normalisation of its networks.

    Networks that normalise no vectors need none: then only `calibrate` has an effect, on images.
    """

    def __init__(self, networks: Callable[[], Iterable[Network]], *, shape: tuple[int, ...] = (), ranks: Ranks = ALONE) -> None:
        """`networks` returns all that the learner evaluates: trained, targets, averages. `shape` is that of a frame."""
        self._networks, self._shape, self._ranks = networks, shape, ranks
        self._moments: ComponentMoments | None = None

    def calibrate(self, frames: Tensor) -> None:
        """Begin with the statistics of example observations [N, *frame]."""
        for net in self._networks():
            net.calibrate(frames)
        if self._needed:
            self._set(ComponentMoments.of(frames.numpy()))

    def add(self, samples: Sequence[Experience]) -> None:
        """Add the observations of trajectories on which an action was taken, and let the networks normalise by all so far."""
        if not self._needed:
            return
        observations = np.concatenate([_acted_on(sample) for sample in samples]) if samples else np.empty(0)
        own = ComponentMoments.of(observations) if len(observations) else None
        if (batch := self._over_ranks(own)) is not None:
            self._set(batch if self._moments is None else self._moments.merge(batch))

    def state_dict(self) -> dict[str, Any]:
        """The moments; empty where there are none."""
        return {} if self._moments is None else asdict(self._moments)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; the networks have their normalisation among their parameters."""
        self._moments = ComponentMoments(**state) if state else None

    def _over_ranks(self, own: ComponentMoments | None) -> ComponentMoments | None:
        """The moments of the observations of all ranks, from those of this one; None where no rank has any."""
        if self._ranks.count == 1:
            return own
        nothing = torch.zeros(self._shape, dtype=torch.float64)
        known = own or ComponentMoments(count=0, mean=nothing, m2=nothing)
        count, mean, m2 = merged_moments(known.count, known.mean, known.m2, self._ranks)
        return ComponentMoments(count=int(count.item()), mean=mean, m2=m2) if count else None

    @property
    def _needed(self) -> bool:
        return any(net.normalizes_vectors for net in self._networks())

    def _set(self, moments: ComponentMoments) -> None:
        if not moments.m2.isfinite().all():  # the gradient steps on such observations are left out too
            return
        self._moments = moments
        for net in self._networks():
            net.set_moments(moments.mean, moments.std)


def _acted_on(sample: Experience) -> np.ndarray:
    """The newest frames [N, *frame] of the valid rows of a trajectory."""
    frames, valid = sample.arrays["obs"], sample.arrays["valid"]
    older = len(frames) - len(valid) - 1
    acted_on: np.ndarray = frames[older : older + len(valid)][valid]
    return acted_on
