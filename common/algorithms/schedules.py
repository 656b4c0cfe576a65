"""How learning rate and entropy bonus move: pure functions of the progress, or of the last value and what it led to."""

from __future__ import annotations

from common.algorithms.api import Progress
from common.algorithms.settings.actor_critic import ActorCriticSection
from common.algorithms.settings.base import AlgorithmSection
from common.algorithms.settings.ppo import HIGHEST_RATE, LOWEST_RATE
from common.units import EnvSteps

KL_FACTOR = 1.5
"""The step of `kl_adaptive`, up and down."""


def learning_rate(settings: AlgorithmSection, progress: Progress) -> float:
    """What the settings plan for this point of the run.

    `linear`: from `learning_rate` to `lr_final` after `lr_env_steps` (0: the whole planned run), and `lr_final` from then on.
    """
    if settings.lr_schedule != "linear":
        return settings.learning_rate
    planned = settings.lr_env_steps or progress.env_steps_planned
    return _straight(settings.learning_rate, settings.lr_final, progress.env_steps / planned)


def entropy_coef(settings: ActorCriticSection, *, env_steps: EnvSteps) -> float:
    """Weight of the entropy bonus at this point of the run: from `entropy_coef` to `entropy_final` after `entropy_env_steps`."""
    if settings.entropy_env_steps == 0:
        return settings.entropy_coef
    return _straight(settings.entropy_coef, settings.entropy_final, env_steps / settings.entropy_env_steps)


def _straight(start: float, end: float, done: float) -> float:
    return start + (end - start) * min(1.0, done)


def kl_adaptive(current: float, *, kl: float, target: float) -> float:
    """The next learning rate: smaller where an update moved the policy more than twice the wanted KL, larger where under half.

    As the adaptive penalty of PPO (Schulman et al. 2017, section 4), applied to the step size in place of the penalty.
    """
    if kl > 2.0 * target:
        current /= KL_FACTOR
    elif kl < 0.5 * target:
        current *= KL_FACTOR
    return min(max(current, LOWEST_RATE), HIGHEST_RATE)
