"""The ranks of a data-parallel learner, as an algorithm sees them: sums and gathers over all of them, and means built on these.

Each rank trains on the experience of its own actors. All ranks call the same operations in the same order, get the same results,
bit for bit, and so keep the same weights. A learner of one rank is `ALONE`, the only addend of each sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

import torch
from torch import Tensor, nn


class Ranks(Protocol):
    """The operations that all ranks take part in. A rank that is lost ends them with `LostRankError`."""

    @property
    def index(self) -> int:
        """This rank, from 0."""

    @property
    def count(self) -> int:
        """The number of ranks, N."""

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of the `values` of all ranks, of one shape and dtype; `values` may be overwritten."""

    def gather(self, values: Tensor) -> Tensor:
        """Return the `values` of all ranks, of one shape and dtype, by rank: [N, *shape]."""


class _Alone:
    """A learner of one rank, the only addend of each sum."""

    index = 0
    count = 1

    def sum(self, values: Tensor) -> Tensor:
        return values

    def gather(self, values: Tensor) -> Tensor:
        return values.unsqueeze(0)


ALONE: Final[Ranks] = _Alone()


def total(value: float, ranks: Ranks) -> float:
    """Return the sum of a number over all ranks."""
    return value if ranks.count == 1 else float(ranks.sum(torch.tensor([value], dtype=torch.float64)).item())


def weighted_mean(value: float, weight: float, ranks: Ranks) -> float:
    """Return the mean of the `value` of each rank by its `weight`; a value of weight 0 may be anything."""
    if ranks.count == 1:
        return value
    both = torch.tensor([value * weight if weight else 0.0, weight], dtype=torch.float64)
    weighted, weights = ranks.sum(both).tolist()
    return float(weighted / weights) if weights else value


def merged_moments(count: float, mean: Tensor, m2: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor, Tensor]:
    """Return number, mean and sum of squared deviations of the numbers of all ranks, from those of this one.

    As `Moments.merge`, for all ranks at once. Both tensors are of one shape; float64 is returned. Where `count` is 0 they are not
    used.
    """
    own = torch.cat(
        [torch.full((1,), count, dtype=torch.float64, device=mean.device), mean.double().flatten(), m2.double().flatten()]
    )
    gathered = ranks.gather(own if count else torch.zeros_like(own))
    numbers, means, squares = torch.split(gathered, [1, mean.numel(), m2.numel()], dim=1)
    everything = numbers.sum()
    joint = (numbers * means).sum(dim=0) / everything.clamp_min(1.0)
    deviations = (squares + numbers * (means - joint).square()).sum(dim=0)
    return everything, joint.view(mean.shape), deviations.view(m2.shape)


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter], loss: Tensor, *, rows: float, ranks: Ranks) -> Tensor:
    """Replace the gradients by their mean over all ranks; return the mean of their losses, without gradient.

        g = sum_r rows_r * g_r / sum_r rows_r

    `rows` is the number of rows (or the sum of weights) that the loss of this rank is a mean of. Where it is 0, the loss and the
    gradients of this rank are not used. One collective operation, on a flat buffer of all gradients, the loss and the rows. A
    number that is not finite on one rank makes the result not finite on every rank.
    """
    if ranks.count == 1:
        return loss.detach()
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    sizes = [parameter.numel() for parameter in trained]
    flat = torch.zeros(sum(sizes) + 2, device=loss.device)
    if rows:
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in trained]
        torch.cat([*(gradient.flatten() for gradient in gradients), loss.detach().float().view(1)], out=flat[:-1])
        flat[:-1] *= rows
        flat[-1] = rows
    flat = ranks.sum(flat)
    mean = flat[:-1] / flat[-1]
    for parameter, part in zip(trained, torch.split(mean[:-1], sizes), strict=True):
        parameter.grad = torch.empty_like(parameter).copy_(part.view(parameter.shape))  # in the layout of the parameter
    return mean[-1]
