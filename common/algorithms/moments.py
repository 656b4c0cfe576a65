"""Running statistics that the learner keeps of value targets, and of vector observations (`model.normalize_observation`).

Networks take new statistics only between two versions of the policy, so that all experience of a version, its log-probabilities
and the learner's evaluation of them go through one normalisation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from common.algorithms.losses import LEAST_STD
from common.algorithms.ranks import Ranks, merged_moments
from common.envs.leaves import vectors
from common.envs.spec import EnvSpec
from common.models.layers import Network
from common.protocol.events import Experience

_ZERO = torch.zeros((), dtype=torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Mean and variance of a stream of numbers, or of each component of a stream of arrays of one shape.

    As count, mean and sum of squared deviations (`m2`), [*shape] float64 on the CPU each. Before the first number `normalize` and
    `denormalize` return the values unchanged.
    """

    count: float = 0
    mean: Tensor = _ZERO
    m2: Tensor = _ZERO

    @classmethod
    def of(cls, values: Tensor) -> Moments:
        """The moments of values [N, *shape], N >= 0, taken in float64."""
        if len(values) == 0:
            nothing = torch.zeros(values.shape[1:], dtype=torch.float64)
            return cls(count=0, mean=nothing, m2=nothing)
        variance, mean = (moment.cpu() for moment in torch.var_mean(values.double(), dim=0, correction=0))
        return cls(count=len(values), mean=mean, m2=variance * len(values))

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Moments:
        """Inverse of `asdict`; a checkpoint may hold the moments of numbers as floats."""
        mean, m2 = (torch.as_tensor(state[name], dtype=torch.float64) for name in ("mean", "m2"))
        return cls(count=state["count"], mean=mean, m2=m2)

    def merge(self, other: Moments) -> Moments:
        """The moments of both streams together (Chan, Golub, LeVeque 1979, eq. 2.1), in any order within rounding."""
        if not self.count:
            return other
        count = self.count + other.count
        delta = other.mean - self.mean
        return Moments(
            count=count,
            mean=self.mean + delta * other.count / count,
            m2=self.m2 + other.m2 + delta.square() * self.count * other.count / count,
        )

    def faded(self, keep: float) -> Moments:
        """The same mean and deviation, with a share of their weight in a merge."""
        return replace(self, count=self.count * keep, m2=self.m2 * keep)

    def over(self, ranks: Ranks) -> Moments:
        """The moments of the streams of all ranks together."""
        if ranks.count == 1:
            return self
        count, mean, m2 = merged_moments(self.count, self.mean, self.m2, ranks)
        return Moments(count=int(count.item()), mean=mean, m2=m2)

    @property
    def std(self) -> Tensor:
        """Population standard deviation [*shape], at least `LEAST_STD`; 1 before the first number."""
        return (self.m2 / self.count).sqrt().clamp_min(LEAST_STD) if self.count else torch.ones_like(self.m2)

    def normalize(self, values: Tensor) -> Tensor:
        """Shifted and scaled to mean 0 and deviation 1 of the stream."""
        return (values - self.mean) / self.std

    def denormalize(self, values: Tensor) -> Tensor:
        """Inverse of `normalize`."""
        return values * self.std + self.mean


class ObservationStatistics:
    """Owns the moments of the observations that a learner trained on, and sets the normalisation of its networks.

    Networks that normalise no vectors need none: then only `calibrate` has an effect, on images. A module that is no `Network`
    normalises by itself, and is left as it is.
    """

    def __init__(self, networks: Callable[[], Iterable[nn.Module]], *, env: EnvSpec, ranks: Ranks) -> None:
        """`networks` returns all that the learner evaluates: trained, targets, averages."""
        self._all, self._env, self._ranks = networks, env, ranks
        self._moments = Moments()

    def calibrate(self, frames: Tensor) -> None:
        """Begin with the statistics of example observations [N, *frame]."""
        for net in self._networks():
            net.calibrate(frames)
        if self._needed:
            self._set(Moments.of(torch.from_numpy(vectors(self._env, frames.cpu().numpy()))))

    def add(self, samples: Sequence[Experience]) -> None:
        """Add the observations of trajectories on which an action was taken, and let the networks normalise by all so far."""
        if not self._needed:
            return
        none = np.empty((0, *self._env.observation_shape), self._env.observation_dtype)
        observations = vectors(self._env, np.concatenate([none, *map(_acted_on, samples)]))
        batch = Moments.of(torch.from_numpy(observations)).over(self._ranks)
        if batch.count:
            self._set(self._moments.merge(batch))

    def state_dict(self) -> dict[str, Any]:
        """The moments; empty where there are none."""
        return asdict(self._moments) if self._moments.count else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; the networks have their normalisation among their parameters."""
        self._moments = Moments.restored(state) if state else Moments()

    def _networks(self) -> list[Network]:
        return [net for net in self._all() if isinstance(net, Network)]

    @property
    def _needed(self) -> bool:
        return any(net.normalizes_vectors for net in self._networks())

    def _set(self, moments: Moments) -> None:
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
