"""Mean and variance of a stream of numbers, held in three numbers that merge exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_STD = 1e-4
"""Deviation that a constant stream is given: keeps normalised values finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Count, mean and sum of squared deviations (`m2`) of the numbers seen; an empty one normalises to the same value."""

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
        """As if both streams had been one (Chan, Golub, LeVeque 1979, eq. 2.1)."""
        count = self.count + other.count
        if count == 0:
            return self
        delta = other.mean - self.mean
        mean = self.mean + delta * other.count / count
        return Moments(count=count, mean=mean, m2=self.m2 + other.m2 + delta**2 * self.count * other.count / count)

    @property
    def std(self) -> float:
        """Population standard deviation; 1 before anything was seen, never quite 0."""
        return max(math.sqrt(self.m2 / self.count), LEAST_STD) if self.count else 1.0

    def normalize(self, values: Tensor) -> Tensor:
        """Shifted and scaled to mean 0 and deviation 1 of the stream."""
        return (values - self.mean) / self.std

    def denormalize(self, values: Tensor) -> Tensor:
        """Inverse of `normalize`."""
        return values * self.std + self.mean
