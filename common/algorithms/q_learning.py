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


def window_errors(
    *,
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor,
    gamma: float,
    n_step: int,
) -> Tensor:
    """|delta| [T, B] of the windows that begin at each row of a rollout, as an actor sees them (Horgan et al. 2018, section 3).

        delta_t = r_t + .. + gamma^(k-1) r_{t+k-1} + gamma^k V(next_{t+k-1}) - Q(o_t, a_t),    V = max_a Q of the acting network

    k is `n_step`, or less where an episode or the rollout ends before; after a termination V counts 0. 0 in invalid rows.

    Args:
        reward: [T, B] float32, follows a_t.
        value: [T, B] float32, Q(o_t, a_t).
        next_value: [T, B] float32, V of what really followed a_t, the episode's last observation where it was truncated.
        terminated: [T, B] bool.
        truncated: [T, B] bool.
        valid: [T, B] bool, False for a reset row.
        gamma: discount per env step.
        n_step: n >= 1.
    """
    length = len(reward)
    target, runs = torch.zeros_like(reward), valid.clone()
    for k in range(min(n_step, length)):  # windows that begin at t take in the step t+k
        rows = length - k
        now = runs[:rows]
        last = terminated[k:] | truncated[k:]
        last[-1] = True
        if k == n_step - 1:
            last.fill_(True)
        following = gamma * next_value[k:].masked_fill(terminated[k:], 0.0)
        step = reward[k:] + torch.where(last, following, 0.0)
        target[:rows] += torch.where(now, gamma**k * step, 0.0)
        runs[:rows] = now & ~last
    return torch.where(valid, (target - value).abs(), 0.0)
