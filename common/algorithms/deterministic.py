"""The arithmetic of twin delayed deterministic policy gradients (Fujimoto et al. 2018, arXiv:1802.09477).

Axes: N transitions, A components of an action; 2 critics first, [2, N]. Actions are those of the networks, -1 to 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from common.algorithms.losses import require_vectors
from common.errors import InternalError


class Loss(NamedTuple):
    """`loss` to minimise and its `gradient` [N] by the values, both without a graph."""

    loss: Tensor
    gradient: Tensor


def smoothed(action: Tensor, noise: Tensor, *, clip: float) -> Tensor:
    """Target policy smoothing: clip(mu'(next) + clip(noise, -c, c), -1, 1) [N, A] (section 5.3, algorithm 1).

    Similar actions should be worth the same: without noise a deterministic policy finds the peaks of the critic's errors.

    Args:
        action: [N, A] of the target actor, in -1..1.
        noise: [N, A] Gaussian.
        clip: c >= 0.
    """
    if action.shape != noise.shape:
        raise InternalError("noise of another shape", found=tuple(noise.shape), wanted=tuple(action.shape))
    return (action + noise.clamp(-clip, clip)).clamp_(-1.0, 1.0)


def clipped_double(values: Tensor) -> Tensor:
    """Min over k of Q'_k(next, a') [N] of both critics [2, N] (eq. 10): overestimates that only one of them makes have no say."""
    _require_twins(values)
    return values.amin(dim=0)


def critic_loss(value: Tensor, *, target: Tensor) -> Loss:
    """Mean_i (y_i - Q_k(o_i, a_i))^2 of one critic; both are trained towards the same y (algorithm 1).

    Args:
        value: [N] float32, Q_k.
        target: [N] float32, y = R + gamma^k * `clipped_double`; see `q_learning.td_target`.
    """
    require_vectors(value, target)
    error = value - target
    return Loss(error.square().mean(), error * (2.0 / len(error)))


def actor_loss(value: Tensor, *, rows: int) -> Loss:
    """- sum_i Q_1(o_i, mu(o_i)) / rows: the deterministic policy gradient (eq. 2) by the first critic.

    Args:
        value: [N] float32, those of the minibatch or of a part of it.
        rows: of the whole minibatch: the losses of all parts add up to the mean.
    """
    require_vectors(value)
    return Loss(value.sum() / -rows, torch.full_like(value, -1.0 / rows))


def _require_twins(values: Tensor) -> None:
    if values.ndim != 2 or len(values) != 2:  # noqa: PLR2004 - two critics
        raise InternalError("the values of both critics are needed", found=tuple(values.shape), wanted="[2, N]")
