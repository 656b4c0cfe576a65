"""The parts of actor-critic losses, and measures of an update. Scalars from [N] float32, N valid env steps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from common.algorithms.ranks import ALONE, Ranks, merged_moments
from common.errors import InternalError

LEAST_STD = 1e-4
"""Smallest standard deviation that values are divided by: keeps normalised values of a constant stream finite."""


class PolicyLoss(NamedTuple):
    """`loss` to minimise; without gradient: `clip_fraction` 0..1, `ratio_error` max |r - 1|."""

    loss: Tensor
    clip_fraction: Tensor
    ratio_error: Tensor


def policy_loss(*, log_prob: Tensor, proximal_log_prob: Tensor, importance: Tensor, advantage: Tensor, clip: float) -> PolicyLoss:
    """Clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, eq. 7), in the decoupled form of Hilton et al. 2021.

        r_t  = pi(a_t | o_t) / pi_prox(a_t | o_t)
        loss = - mean( w_t * min(r_t * A_t, clip(r_t, 1 - eps, 1 + eps) * A_t) ),    w_t = pi_prox / mu, see `importance`

    With the proximal policy equal to the one that acted, mu, every w_t is 1 and this is eq. 7 of PPO; else it is the
    decoupled objective (arXiv:2110.00641, section 3), which clips around a recent policy and not around a stale one.

    Args:
        log_prob: [N] log pi(a_t | o_t), with gradient.
        proximal_log_prob: [N] log pi_prox(a_t | o_t).
        importance: [N] w_t.
        advantage: [N] A_t.
        clip: eps.
    """
    require_vectors(log_prob, proximal_log_prob, importance, advantage)
    ratio = (log_prob - proximal_log_prob).exp()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1.0 - clip, 1.0 + clip) * advantage)
    with torch.no_grad():
        distance = (ratio - 1.0).abs()
        clip_fraction = (distance > clip).float().mean()
    return PolicyLoss(-(importance * surrogate).mean(), clip_fraction, distance.amax())


def approximate_kl(*, log_prob: Tensor, before: Tensor) -> Tensor:
    """KL(before, pi) in nats of log-probabilities [N] of actions that the policy before has drawn, or one near it.

    The estimator k3: unbiased, and never negative (Schulman 2020, "Approximating KL divergence").
    """
    require_vectors(log_prob, before)
    log_ratio = log_prob - before
    return (log_ratio.exp() - 1.0 - log_ratio).mean()


def importance_weight(*, proximal_log_prob: Tensor, behaviour_log_prob: Tensor, cap: float) -> Tensor:
    """min(pi_prox / mu, cap) [N], of the policies at the start of the update and when acting; the cap bounds the variance."""
    require_vectors(proximal_log_prob, behaviour_log_prob)
    return (proximal_log_prob - behaviour_log_prob).exp().clamp_max(cap)


def standardized(advantage: Tensor, *, least_std: float = 0.0, ranks: Ranks = ALONE) -> Tensor:
    """Advantages [N] of one gradient step, brought to mean 0 and deviation 1; to less where theirs is below `least_std`.

    With several `ranks` by the statistics of the advantages of all of them in this step.

    By their own statistics, not those of the whole batch, so that the advantages of every step have mean 0. Measured on Pong:
    mean100 of 18 after 0.38 M and 0.43 M env steps (two seeds) where statistics of the batch took 0.55 M and 0.61 M.
    """
    require_vectors(advantage)
    floor = max(least_std, LEAST_STD)
    if ranks.count == 1:
        return (advantage - advantage.mean()) / advantage.std(correction=0).clamp_min(floor)
    mean = advantage.double().mean()
    count, mean, m2 = merged_moments(len(advantage), mean, (advantage - mean).square().sum(), ranks)
    return ((advantage - mean) / (m2 / count).sqrt().clamp_min(floor)).float()


def value_loss(*, value: Tensor, target: Tensor) -> Tensor:
    """Half the mean squared error of the values [N] against their targets [N]."""
    require_vectors(value, target)
    return 0.5 * (value - target).square().mean()


def explained_variance(*, value: Tensor, target: Tensor) -> Tensor:
    """1 - Var(target - value) / Var(target): 1 is perfect, 0 no better than a constant (or nothing to explain)."""
    require_vectors(value, target)
    if not len(value):  # a rank without rows
        return torch.zeros(())
    variance = target.var(correction=0)
    return torch.where(variance > 0.0, 1.0 - (target - value).var(correction=0) / variance, 0.0)


def require_vectors(*arrays: Tensor) -> None:
    """Refuse anything but [N] of one N: (N,) and (N, 1) would broadcast to (N, N), and train on wrong values without an error."""
    if len({array.shape for array in arrays}) != 1 or arrays[0].ndim != 1:
        raise InternalError("a loss needs vectors of one length", found=[tuple(a.shape) for a in arrays], wanted="[N]")
