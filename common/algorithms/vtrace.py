"""Returns from experience of another policy than the one that learns: V-trace (Espeholt et al. 2018, arXiv:1802.01561).

Axes, ends of episodes and invalid rows are those of `common.algorithms.returns`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.algorithms.returns import Returns, accumulate, td_errors
from common.errors import InternalError


def vtrace(
    *,
    log_ratio: Tensor,
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor,
    gamma: float | Tensor,
    lambda_: float,
    rho_clip: float | None,
    c_clip: float | None,
    pg_rho_clip: float | None,
) -> Returns:
    """Targets v_t of eq. 1 and advantages for the policy gradient of eq. 4, both cut at the ends of episodes.

        rho_t   = min(rho_clip, pi/mu),   c_t = lambda * min(c_clip, pi/mu)                          (and remark 2)
        delta_t = rho_t * (r_t + gamma * V(next_t) * (1 - terminated_t) - V(o_t))
        v_t     = V(o_t) + sum_k gamma^k * (c_t ... c_{t+k-1}) * delta_{t+k}
        A_t     = min(pg_rho_clip, pi/mu) * (r_t + gamma * ((1 - lambda) * V(next_t) + lambda * v_{t+1}) - V(o_t))

    rho_clip decides which policy the values belong to (none: pi itself; 0: they stay as they are), c_clip how far back a
    surprise reaches, which is speed against variance. With lambda_ = 1, A_t is the paper's r_t + gamma * v_{t+1} - V(o_t).
    The mixture below 1 is a departure: it makes A_t and v_t those of `gae` where both policies are the same. v_{t+1} is
    V(next_t) after the last row and where the episode was truncated, 0 where it terminated.

    Args:
        log_ratio: [T, B] float, log pi(a_t | o_t) - log mu(a_t | o_t), mu the policy that acted. Not looked at in invalid rows.
        reward: [T, B] float.
        value: [T, B] float, V(o_t).
        next_value: [T, B] float, V of what followed a_t.
        terminated: [T, B] bool.
        truncated: [T, B] bool.
        valid: [T, B] bool.
        gamma: discount per env step, one or one for each environment [B].
        lambda_: 0 to 1.
        rho_clip: rho-bar of the paper; None does not clip.
        c_clip: c-bar of the paper; None does not clip.
        pg_rho_clip: the same for the weight of the policy gradient; None does not clip.
    """
    if log_ratio.shape != reward.shape:
        raise InternalError("log-ratios of another shape", found=tuple(log_ratio.shape), wanted=tuple(reward.shape))
    ratio = torch.where(valid, log_ratio, 0.0).exp()
    delta, decay = td_errors(
        reward=reward, value=value, next_value=next_value, terminated=terminated, truncated=truncated, valid=valid, gamma=gamma
    )
    decay = decay * lambda_
    correction = accumulate(_clipped(ratio, rho_clip) * delta, decay * _clipped(ratio, c_clip))  # v_t - V(o_t)
    following = torch.cat([correction[1:], torch.zeros_like(correction[:1])])
    advantage = _clipped(ratio, pg_rho_clip) * (delta + decay * following)
    return Returns(advantage, torch.where(valid, value + correction, 0.0))


def _clipped(ratio: Tensor, clip: float | None) -> Tensor:
    return ratio if clip is None else ratio.clamp_max(clip)
