"""How often an environment's action is drawn at random, in place of the best known one: epsilon, of each environment."""

from __future__ import annotations

import torch
from torch import Tensor

from common.algorithms.api import Place
from common.units import EnvSteps


def annealed(env_steps: EnvSteps, *, initial: float, final: float, over: EnvSteps) -> float:
    """From `initial` at the start of the run in a straight line to `final` after `over` env steps, which then stays."""
    done = min(1.0, env_steps / over) if over else 1.0
    return initial + (final - initial) * done


def ladder(place: Place, *, largest: float, alpha: float) -> Tensor:
    """A fixed epsilon for each environment of this actor, [B] float32 (Horgan et al. 2018, arXiv:1803.00933, section 4).

        epsilon_i = largest^(1 + alpha * i / (N - 1)),    i = 0 .. N-1 over all environments of all actors

    A single environment gets `largest`.
    """
    return largest ** (1.0 + alpha * rank(place))


def rank(place: Place) -> Tensor:
    """Where each environment of this actor stands among all, i / (N - 1) in 0..1 [B] float32; 0 for a single one.

    The ranks go round the actors, so that each has high and low ones, and none takes a part of the ladder with it when it
    dies. An actor beyond the expected number repeats the ranks of another.
    """
    actors = max(1, place.peers)
    rung = torch.arange(place.num_envs) * actors + place.index % actors
    return rung / max(1, actors * place.num_envs - 1)
