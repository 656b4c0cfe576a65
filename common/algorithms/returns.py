"""Advantages and value targets from rewards and values.

Axes: [T, B], time first. Index t is the action a_t chosen on o_t: `reward[t]` and the ends at t follow it, `value[t]` is
V(o_t), `next_value[t]` is V of the observation that really followed a_t (the last one of the episode where it ended, never
the first of the next). There is no index T: the bootstrap of the last row is `next_value[T-1]`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from common.errors import InternalError


class Returns(NamedTuple):
    """`advantage` [T, B] and `target` [T, B], the lambda-return that the value of o_t is trained towards; 0 in invalid rows."""

    advantage: Tensor
    target: Tensor


def gae(
    *,
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor,
    gamma: float,
    lambda_: float,
) -> Returns:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 16), cut at the ends of episodes.

        delta_t = r_t + gamma * V(next_t) * (1 - terminated_t) - V(o_t)
        A_t     = delta_t + gamma * lambda * (1 - ended_t) * A_{t+1},    ended = terminated or truncated

    Terminated: nothing follows, V(next) counts 0. Truncated: something would have followed, V(next) counts, but the sum
    ends. Rows that are not `valid` (resets) contribute nothing, and nothing crosses them. lambda_ = 0 gives the one-step
    error, lambda_ = 1 the discounted rewards until the end (or the bootstrap) minus V(o_t).

    Args:
        reward: [T, B] float.
        value: [T, B] float, V(o_t).
        next_value: [T, B] float, V of what followed a_t.
        terminated: [T, B] bool.
        truncated: [T, B] bool.
        valid: [T, B] bool.
        gamma: discount per env step.
        lambda_: 0 (trust the values) to 1 (trust the rewards).
    """
    delta, decay = td_errors(
        reward=reward, value=value, next_value=next_value, terminated=terminated, truncated=truncated, valid=valid, gamma=gamma
    )
    advantage = accumulate(delta, decay * lambda_)
    return Returns(advantage, torch.where(valid, advantage + value, 0.0))


def td_errors(
    *,
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor,
    gamma: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """The one-step errors delta_t of `gae` [T, B], 0 in invalid rows, and gamma [T, B], 0 where row t + 1 does not go on from t.

    Arguments as for `gae`; `gamma` may also be one for each environment, [B].
    """
    arrays = (reward, value, next_value, terminated, truncated, valid)
    if len({array.shape for array in arrays}) != 1 or reward.ndim != 2:  # noqa: PLR2004 - T and B
        raise InternalError("returns need arrays of one shape", found=[tuple(a.shape) for a in arrays], wanted="[T, B]")
    delta = torch.where(valid, reward + gamma * next_value.masked_fill(terminated, 0.0) - value, 0.0)
    return delta, (valid & ~(terminated | truncated)).to(delta.dtype) * gamma


def accumulate(delta: Tensor, decay: Tensor) -> Tensor:
    """A [T, B] with A_t = delta_t + decay_t * A_{t+1}, nothing after the last row."""
    total = torch.empty_like(delta)
    carry = torch.zeros_like(delta[0])
    rows = zip(delta.unbind(), decay.unbind(), total.unbind(), strict=True)
    for delta_t, decay_t, total_t in reversed(tuple(rows)):
        carry = torch.addcmul(delta_t, decay_t, carry, out=total_t)
    return total
