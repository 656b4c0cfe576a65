"""The arithmetic of deep Q-learning: what an action value is trained towards, and the loss.

Axes: N transitions, n actions. Transition i leads from o_i by a_i over k_i env steps, at most n-step, to next_i; the sum of its
discounted rewards and the discount gamma^k_i (0 where the episode terminated) are formed when it is sampled.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from common.algorithms.losses import require_vectors
from common.errors import InternalError


class QLoss(NamedTuple):
    """`loss` to minimise, scalar; `td_error` [N], target less value, without gradient; `value` [N], Q(o, a), likewise."""

    loss: Tensor
    td_error: Tensor
    value: Tensor


def next_value(target_q: Tensor, selecting_q: Tensor | None = None) -> Tensor:
    """What follows is worth, [N]: one action value of next_i by the target network.

        max_a Q_target(next, a)                        (Mnih et al. 2015, Methods, "training algorithm")
        Q_target(next, argmax_a Q_online(next, a))     (van Hasselt et al. 2016, arXiv:1509.06461, eq. 4)

    The second, Double Q-learning, lets one network select and the other evaluate: the largest of several noisy values is
    too large on average, the value of an action that another network selected is not.

    Args:
        target_q: [N, n] float32, Q_target(next, .).
        selecting_q: [N, n] float32, Q_online(next, .); None for the first form.
    """
    selecting = target_q if selecting_q is None else selecting_q
    if target_q.ndim != 2 or selecting.shape != target_q.shape:  # noqa: PLR2004 - N and n
        found = [tuple(target_q.shape), tuple(selecting.shape)]
        raise InternalError("action values of different shapes", found=found, wanted="[N, n]")
    return target_q.gather(1, selecting.argmax(dim=1, keepdim=True)).squeeze(1)


def td_target(*, reward: Tensor, discount: Tensor, value: Tensor) -> Tensor:
    """R_i + gamma^k_i * V(next_i) [N] (Sutton 1988; n-step as in Hessel et al. 2018, arXiv:1710.02298, eq. 3).

    The actions between are those of the policies that acted: no correction is made for k_i > 1, which is usual for small n.

    Args:
        reward: [N] float32, R_i = sum over j < k_i of gamma^j * r_{i+j}.
        discount: [N] float32, gamma^k_i, 0 where the episode terminated within the window.
        value: [N] float32, see `next_value`.
    """
    require_vectors(reward, discount, value)
    return torch.addcmul(reward, discount, value)


def q_loss(q: Tensor, action: Tensor, *, target: Tensor, weight: Tensor, huber: float | None) -> QLoss:
    """mean(w_i * l(target_i - Q(o_i, a_i))), l half the square, or Huber's where an error beyond `huber` counts linearly.

    Huber's loss bounds the gradient of one transition (Mnih et al. 2015 clip the error to -1..1, which is `huber` 1).

    Args:
        q: [N, n] float32 with gradient, Q(o_i, .).
        action: [N] int64, a_i.
        target: [N] float32.
        weight: [N] float32, w_i of importance sampling (Schaul et al. 2016, arXiv:1511.05952, section 3.4); 1 for uniform.
        huber: delta > 0; None for the squared error.
    """
    value = q.gather(1, action.unsqueeze(1)).squeeze(1)
    require_vectors(value, target, weight)
    if huber is None:
        losses = 0.5 * (value - target).square()
    else:
        losses = functional.huber_loss(value, target, reduction="none", delta=huber)
    value_seen = value.detach()
    return QLoss((weight * losses).mean(), target - value_seen, value_seen)
