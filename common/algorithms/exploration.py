"""How often an environment's action is drawn at random, in place of the best known one: epsilon, of each environment."""

from __future__ import annotations

import torch
from torch import Tensor

from common.algorithms.api import Place
from common.algorithms.settings.dqn import DQNSettings
from common.units import EnvSteps


def annealed(env_steps: EnvSteps, *, initial: float, final: float, over: EnvSteps) -> float:
    """From `initial` at the start of the run in a straight line to `final` after `over` env steps, which then stays."""
    done = min(1.0, env_steps / over) if over else 1.0
    return initial + (final - initial) * done


def ladder(place: Place, *, largest: float, alpha: float) -> Tensor:
    """A fixed epsilon for each environment of this actor, [B] float32 (Horgan et al. 2018, arXiv:1803.00933, section 4).

        epsilon_i = largest^(1 + alpha * i / (N - 1)),    i = 0 .. N-1 over all environments of all actors

    The rungs go round the actors, so that each has high and low ones, and none takes a part of the ladder with it when it
    dies. An actor beyond the expected number repeats the rungs of another. A single environment gets `largest`.
    """
    actors = max(1, place.peers)
    rung = torch.arange(place.num_envs) * actors + place.index % actors
    return largest ** (1.0 + alpha * rung / max(1, actors * place.num_envs - 1))


def epsilon(settings: DQNSettings, place: Place, *, env_steps: EnvSteps) -> Tensor:
    """Epsilon of each environment at this `place` and point of the run, [B] float32, by whichever of the two was chosen.

    An evaluator's is that of the end of training: its sampled episodes show what the exploration costs a finished policy.
    """
    if settings.exploration == "ladder":
        return ladder(place, largest=settings.epsilon, alpha=settings.ladder_alpha)
    now = annealed(env_steps, settings) if place.training else settings.epsilon
    return torch.full((place.num_envs,), now)


def annealed(env_steps: EnvSteps, settings: DQNSettings) -> float:
    """From `epsilon_initial` at the start of the run in a straight line to `epsilon`, which then stays."""
    done = min(1.0, env_steps / max(1, settings.epsilon_env_steps))
    return settings.epsilon_initial + (settings.epsilon - settings.epsilon_initial) * done


def ladder(place: Place, *, largest: float, alpha: float) -> Tensor:
    """A fixed epsilon for each environment of this actor, [B] float32 (Horgan et al. 2018, arXiv:1803.00933, section 4).

        epsilon_i = largest^(1 + alpha * i / (N - 1)),    i = 0 .. N-1 over all environments of all actors

    The rungs go round the actors, so that each has high and low ones, and none takes a part of the ladder with it when it
    dies. An actor beyond the expected number repeats the rungs of another. A single environment gets `largest`.
    """
    actors = max(1, place.peers)
    rung = torch.arange(place.num_envs) * actors + place.index % actors
    return largest ** (1.0 + alpha * rung / max(1, actors * place.num_envs - 1))
