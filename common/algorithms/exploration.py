"""How much each environment explores: epsilon, the probability of an action drawn at random, and its rank among all others."""

from __future__ import annotations

import torch
from torch import Tensor

from common.algorithms.api import Place
from common.algorithms.settings.dqn import DQNSettings
from common.units import EnvSteps


def epsilon(settings: DQNSettings, place: Place, *, env_steps: EnvSteps) -> Tensor:
    """Epsilon of each environment at this `place` and point of the run, [B] float32, annealed or a rung of the ladder.

    An evaluator's is that of the end of training: its sampled episodes show what the exploration costs a finished policy.
    """
    if settings.exploration == "ladder":
        return ladder(place, largest=settings.epsilon, alpha=settings.ladder_alpha)
    return torch.full((place.num_envs,), annealed(env_steps, settings) if place.training else settings.epsilon)


def annealed(env_steps: EnvSteps, settings: DQNSettings) -> float:
    """From `epsilon_initial` at the start of the run in a straight line to `epsilon`, which then stays."""
    done = min(1.0, env_steps / max(1, settings.epsilon_env_steps))
    return settings.epsilon_initial + (settings.epsilon - settings.epsilon_initial) * done


def ladder(place: Place, *, largest: float, alpha: float) -> Tensor:
    """A fixed epsilon for each environment of this actor, [B] float32 (Horgan et al. 2018, arXiv:1803.00933, section 4).

        epsilon_i = largest^(1 + alpha * i / (N - 1)),    i = 0 .. N-1 over all environments of all actors

    A single environment gets `largest`.
    """
    rungs: Tensor = largest ** (1.0 + alpha * rank(place))
    return rungs


def rank(place: Place) -> Tensor:
    """Where each environment of this actor stands among all, i / (N - 1) in 0..1 [B] float32; 0 for a single one.

    The ranks go round the actors, so that each has high and low ones, and none takes a part of the ladder with it when it
    dies. An actor beyond the expected number repeats the ranks of another.
    """
    actors = max(1, place.peers)
    rung = torch.arange(place.num_envs) * actors + place.index % actors
    return rung / max(1, actors * place.num_envs - 1)
