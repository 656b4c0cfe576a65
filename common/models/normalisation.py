"""Normalisation of observations inside a network: images by fixed statistics, vectors by running statistics.

Both kinds keep mean and scale as parameters that are not trained: they belong to the policy, so snapshots and checkpoints carry
them, and learner and actors of one version use the same.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

CLIP = 10.0
"""Largest absolute value of a normalised component of a vector."""

LEAST_DEVIATION = 1e-4
"""A component of a vector with a smaller deviation counts as having this one: one that has not moved yet must not explode."""


class ImageNormalisation(nn.Module):
    """Images centred on a fixed mean image and divided by one fixed number, both taken from examples.

    Every pixel has its own mean. They share one divisor, twice the largest deviation, which brings nearly all values into -1..1:
    dividing each by its own deviation would give pixels that hardly ever change the largest values.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.empty(shape), requires_grad=False)
        self.divisor = nn.Parameter(torch.empty(()), requires_grad=False)

    def reset_parameters(self) -> None:
        """Set mean 0 and divisor 1."""
        nn.init.zeros_(self.mean)
        nn.init.ones_(self.divisor)

    def forward(self, observation: Tensor, dtype: torch.dtype) -> Tensor:
        """[N, (S,) *frame] of any dtype → the same shape in `dtype`, which is computed in: it holds bytes exactly."""
        return (observation.to(dtype) - self.mean.to(dtype)).mul_(self.divisor.reciprocal().to(dtype))

    @torch.no_grad()
    def calibrate(self, frames: Tensor) -> None:
        """Take mean and divisor from example images [N, *frame]."""
        values = frames.float()
        self.mean.copy_(values.mean(0))
        self.divisor.copy_(2.0 * values.std(0).max().clamp_min(1e-3))


class VectorNormalisation(nn.Module):
    """Vectors centred on their mean and divided by their deviation, component by component, then clipped to -10..10.

    The computation is in float32 whatever the network computes in, because bfloat16 would round away the difference of two values
    far from 0. Snapshots in bfloat16 change nothing either: the mean is the sum of two parameters that bfloat16 holds exactly, 16
    binary digits together, and the scale is rounded to bfloat16.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.empty(2, *shape), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(shape), requires_grad=False)

    def reset_parameters(self) -> None:
        """Set mean 0 and scale 1."""
        nn.init.zeros_(self.mean)
        nn.init.ones_(self.scale)

    def forward(self, observation: Tensor, dtype: torch.dtype) -> Tensor:
        """[N, (S,) *frame] of any dtype → the same shape in `dtype`."""
        normalised = (observation.float() - self.mean.float().sum(0)).mul_(self.scale.float())
        # 0 times infinity is not a number: the clip must not hide an observation that is not finite.
        return normalised.clamp(-CLIP, CLIP).add_(normalised.mul_(0.0)).to(dtype)

    @torch.no_grad()
    def set_moments(self, mean: Tensor, std: Tensor) -> None:
        """Take mean and standard deviation [*frame] float64."""
        first = mean.bfloat16()
        self.mean.copy_(torch.stack([first, (mean - first).bfloat16()]))
        self.scale.copy_(std.clamp_min(LEAST_DEVIATION).reciprocal().bfloat16())


Normalisation = ImageNormalisation | VectorNormalisation
