"""Normalisation of observations: of images by fixed statistics, of vectors by running statistics.

Both kinds keep mean and scale as parameters that are not trained: they belong to the policy, so snapshots and checkpoints carry
them, and learner and actors of one version use the same.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from common.envs.spec import EnvSpec

CLIP = 10.0
"""Largest absolute value of a normalised component of a vector."""

LEAST_DEVIATION = 1e-4
"""A component of a vector with a smaller deviation counts as having this one: one that has not moved yet must not explode."""


class ImageNormalisation(nn.Module):
    """Images centred on a fixed mean image and divided by one fixed number, both taken from examples.

    Every pixel has its own mean. They share one divisor, twice the largest deviation, which brings nearly all values into -1..1:
    dividing each by its own deviation would give pixels that hardly ever change the largest values. Images of bytes are computed
    in the dtype of the network, which holds bytes exactly; others as `VectorNormalisation` computes, for the same reason.
    """

    def __init__(self, env: EnvSpec) -> None:
        super().__init__()
        self._bytes, shape = env.observation_dtype == "uint8", env.observation_shape
        self.mean = nn.Parameter(torch.zeros(shape if self._bytes else (3, *shape)), requires_grad=False)
        self.divisor = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, observation: Tensor, dtype: torch.dtype) -> Tensor:
        """[N, (S,) *frame] of any dtype → the same shape in `dtype`."""
        if self._bytes:
            return (observation.to(dtype) - self.mean.to(dtype)).mul_(self.divisor.reciprocal().to(dtype))
        return (observation.float() - self.mean.float().sum(0)).div_(self.divisor.float()).to(dtype)

    @torch.no_grad()
    def calibrate(self, frames: Tensor) -> None:
        """Take mean and divisor from example images [N, *frame]."""
        values = frames.float()
        mean, divisor = values.mean(0), 2.0 * values.std(0).max().clamp_min(1e-3)
        self.mean.copy_(mean if self._bytes else _three_parts(mean))
        self.divisor.copy_(divisor if self._bytes else divisor.bfloat16())


class VectorNormalisation(nn.Module):
    """Vectors centred on their mean and divided by their deviation, component by component, then clipped to -10..10.

    The computation is in float32 whatever the network computes in, because bfloat16 would round away the difference of two values
    far from 0. Snapshots in bfloat16 change nothing either: the mean is the sum of three parameters that bfloat16 holds exactly,
    with all 24 binary digits of float32, and the scale is rounded to bfloat16.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(3, *shape), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(shape), requires_grad=False)

    def forward(self, observation: Tensor, dtype: torch.dtype) -> Tensor:
        """[N, (S,) *frame] of any dtype → the same shape in `dtype`."""
        normalised = (observation.float() - self.mean.float().sum(0)).mul_(self.scale.float())
        # 0 times infinity is not a number: the clip must not hide an observation that is not finite.
        return normalised.clamp(-CLIP, CLIP).add_(normalised.mul_(0.0)).to(dtype)

    @torch.no_grad()
    def set_moments(self, mean: Tensor, std: Tensor) -> None:
        """Take mean and standard deviation [*frame] float64."""
        self.mean.copy_(_three_parts(mean))
        self.scale.copy_(std.clamp_min(LEAST_DEVIATION).reciprocal().bfloat16())


def _three_parts(mean: Tensor) -> Tensor:
    """Return [3, *mean] bfloat16 whose sum is `mean`, to all 24 binary digits of float32."""
    first = mean.bfloat16()
    second = (mean - first).bfloat16()
    return torch.stack([first, second, (mean - first - second).bfloat16()])
