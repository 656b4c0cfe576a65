"""How the learning rate moves over a run: pure functions of the progress, or of the last value and what it led to."""

from __future__ import annotations

from common.algorithms.api import Progress

KL_FACTOR = 1.5
"""The step of `kl_adaptive`, up and down."""

LOWEST, HIGHEST = 1e-6, 1e-2
"""The bounds of `kl_adaptive`: outside them Adam does nothing, or harm."""


def linear(initial: float, progress: Progress) -> float:
    """`initial` at the start, 0 at the planned end of the run and after it."""
    return initial * max(0.0, 1.0 - progress.env_steps / progress.env_steps_planned)


def kl_adaptive(current: float, *, kl: float, target: float) -> float:
    """The next learning rate: smaller where an update moved the policy more than twice the wanted KL, larger where under half.

    As the adaptive penalty of PPO (Schulman et al. 2017, section 4), applied to the step size in place of the penalty.
    """
    if kl > 2.0 * target:
        current /= KL_FACTOR
    elif kl < 0.5 * target:
        current *= KL_FACTOR
    return min(max(current, LOWEST), HIGHEST)
