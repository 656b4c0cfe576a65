"""Advantages and targets from rewards and values: GAE, V-trace for experience of another policy, and Q(lambda).

Axes: [T, B], time first. Index t is the action a_t chosen on o_t: `reward[t]` and the ends at t follow it, `value[t]` is
V(o_t), `next_value[t]` is V of the observation that really followed a_t (the last one of the episode where it ended, never
the first of the next). There is no index T: the bootstrap of the last row is `next_value[T-1]`.
"""

from __future__ import annotations

from typing import NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from common.errors import InternalError


class Returns(NamedTuple):
    """`advantage` [T, B] and `target` [T, B], the lambda-return that the value of o_t is trained towards; 0 in invalid rows."""

    advantage: Tensor
    target: Tensor


class ReturnInputs(TypedDict):
    """The arguments that `gae` and `vtrace` share, [T, B] each: three float, three bool."""

    reward: Tensor
    value: Tensor  # V(o_t)
    next_value: Tensor  # V of what followed a_t
    terminated: Tensor
    truncated: Tensor
    valid: Tensor


def gae(*, gamma: float, lambda_: float, **inputs: Unpack[ReturnInputs]) -> Returns:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 16), cut at the ends of episodes.

        delta_t = r_t + gamma * V(next_t) * (1 - terminated_t) - V(o_t)
        A_t     = delta_t + gamma * lambda * (1 - ended_t) * A_{t+1},    ended = terminated or truncated

    Terminated: nothing follows, V(next) counts 0. Truncated: something would have followed, V(next) counts, but the sum
    ends. Rows that are not `valid` (resets) contribute nothing, and nothing crosses them. lambda_ = 0 gives the one-step
    error, lambda_ = 1 the discounted rewards until the end (or the bootstrap) minus V(o_t).

    Args:
        gamma: discount per env step.
        lambda_: 0 (trust the values) to 1 (trust the rewards).
        inputs: see `ReturnInputs`.
    """
    delta, decay = _td_errors(**inputs, gamma=gamma)
    advantage = _accumulate(delta, decay * lambda_)
    return Returns(advantage, torch.where(inputs["valid"], advantage + inputs["value"], 0.0))


def q_lambda(*, gamma: float, lambda_: float, **inputs: Unpack[ReturnInputs]) -> Tensor:
    """The Q(lambda) returns G [T, B] of PQN (Gallici et al. 2024, arXiv:2407.04811, section 3), cut at the ends of episodes.

        G_t = r_t + gamma * (lambda * G_{t+1} + (1 - lambda) * max_a Q(next_t, a))

    Terminated: nothing follows, G_t = r_t. Truncated, and in the last row: G_t = r_t + gamma * max_a Q(next_t, a). It is 0 in
    rows that are not `valid`, and nothing crosses them. The return continues over actions that were not greedy, as in Peng's
    Q(lambda) (Peng and Williams 1996). With V(o) = max_a Q(o, a) it is the lambda-return that `gae` trains values towards.

    Args:
        gamma: discount per env step.
        lambda_: 0 (trust the action values) to 1 (trust the rewards).
        inputs: see `ReturnInputs`; `value` and `next_value` are max_a Q of o_t and of what followed a_t.
    """
    return gae(**inputs, gamma=gamma, lambda_=lambda_).target


def vtrace(
    *,
    log_ratio: Tensor,
    gamma: float | Tensor,
    lambda_: float,
    rho_clip: float | None,
    c_clip: float | None,
    pg_rho_clip: float | None,
    **inputs: Unpack[ReturnInputs],
) -> Returns:
    """V-trace (Espeholt et al. 2018, arXiv:1802.01561): targets v_t of eq. 1, advantages of eq. 4, cut at the ends of episodes.

        rho_t   = min(rho_clip, pi/mu),   c_t = lambda * min(c_clip, pi/mu)                          (and remark 2)
        delta_t = rho_t * (r_t + gamma * V(next_t) * (1 - terminated_t) - V(o_t))
        v_t     = V(o_t) + sum_k gamma^k * (c_t ... c_{t+k-1}) * delta_{t+k}
        A_t     = min(pg_rho_clip, pi/mu) * (r_t + gamma * ((1 - lambda) * V(next_t) + lambda * v_{t+1}) - V(o_t))

    rho_clip decides which policy the values belong to (none: pi itself; 0: they stay as they are), c_clip how far back a
    surprise reaches, which is speed against variance. With lambda_ = 1, A_t is the paper's r_t + gamma * v_{t+1} - V(o_t).
    The mixture below 1 is a departure: it makes A_t and v_t those of `gae` where both policies are the same. v_{t+1} is
    V(next_t) after the last row and where the episode was truncated, 0 where it terminated.

    Args:
        log_ratio: [T, B] float, log pi(a_t | o_t) - log mu(a_t | o_t), mu the policy that acted. Unused in invalid rows.
        gamma: discount per env step, one or one for each environment [B].
        lambda_: 0 to 1.
        rho_clip: rho-bar of the paper; None does not clip.
        c_clip: c-bar of the paper; None does not clip.
        pg_rho_clip: the same for the weight of the policy gradient; None does not clip.
        inputs: see `ReturnInputs`.
    """
    value, valid, shape = inputs["value"], inputs["valid"], inputs["reward"].shape
    if log_ratio.shape != shape:
        raise InternalError("log-ratios of another shape", found=tuple(log_ratio.shape), wanted=tuple(shape))
    ratio = torch.where(valid, log_ratio, 0.0).exp()
    delta, decay = _td_errors(**inputs, gamma=gamma)
    decay = decay * lambda_
    correction = _accumulate(_clipped(ratio, rho_clip) * delta, decay * _clipped(ratio, c_clip))  # v_t - V(o_t)
    following = torch.cat([correction[1:], torch.zeros_like(correction[:1])])
    advantage = _clipped(ratio, pg_rho_clip) * (delta + decay * following)
    return Returns(advantage, torch.where(valid, value + correction, 0.0))


def _td_errors(
    *,
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor,
    gamma: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """One-step errors delta_t of `gae`, 0 in invalid rows, and gamma, 0 where row t + 1 does not go on from t: [T, B] each."""
    arrays = (reward, value, next_value, terminated, truncated, valid)
    if len({array.shape for array in arrays}) != 1 or reward.ndim != 2:  # noqa: PLR2004 - T and B
        raise InternalError("returns need arrays of one shape", found=[tuple(a.shape) for a in arrays], wanted="[T, B]")
    delta = torch.where(valid, reward + gamma * next_value.masked_fill(terminated, 0.0) - value, 0.0)
    return delta, (valid & ~(terminated | truncated)).to(delta.dtype) * gamma


def _accumulate(delta: Tensor, decay: Tensor) -> Tensor:
    """A [T, B] with A_t = delta_t + decay_t * A_{t+1}, nothing after the last row."""
    total = torch.empty_like(delta)
    carry = torch.zeros_like(delta[0])
    rows = zip(delta.unbind(), decay.unbind(), total.unbind(), strict=True)
    for delta_t, decay_t, total_t in reversed(tuple(rows)):
        carry = torch.addcmul(delta_t, decay_t, carry, out=total_t)
    return total


def _clipped(ratio: Tensor, clip: float | None) -> Tensor:
    return ratio if clip is None else ratio.clamp_max(clip)
