"""The algorithms by name: settings, learner's side, acting side, and what actors record for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from common.algorithms import policy
from common.algorithms.api import Algorithm, Policy
from common.algorithms.ppo import PPO
from common.algorithms.settings import AlgorithmSettings, PPOSettings
from common.envs.spec import EnvSpec
from common.models.snapshot import Precision
from common.models.spec import ModelSettings
from common.wire.messages import ArraySpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One algorithm: how its two sides are built."""

    settings: type[AlgorithmSettings]
    build_algorithm: Callable[..., Algorithm]  # settings=, model=, env=, seed=
    build_policy: Callable[..., Policy]  # model=, env=, precision=, seed=
    recorded: Callable[..., tuple[ArraySpec, ...]]  # length=, num_envs=


ALGORITHMS: Mapping[str, Entry] = MappingProxyType(
    {"ppo": Entry(settings=PPOSettings, build_algorithm=PPO, build_policy=policy.ActorCriticPolicy, recorded=policy.recorded)}
)


def build_algorithm(settings: AlgorithmSettings, *, model: ModelSettings, env: EnvSpec, seed: int) -> Algorithm:
    """The learner's side of the algorithm that `settings` belongs to."""
    return ALGORITHMS[settings.name].build_algorithm(settings=settings, model=model, env=env, seed=seed)


def build_policy(settings: AlgorithmSettings, *, model: ModelSettings, env: EnvSpec, precision: Precision, seed: int) -> Policy:
    """The acting side; it acts in `precision` and draws its actions from `seed`."""
    return ALGORITHMS[settings.name].build_policy(model=model, env=env, precision=precision, seed=seed)


def recorded_specs(settings: AlgorithmSettings, *, length: int, num_envs: int) -> tuple[ArraySpec, ...]:
    """The arrays an actor adds to a trajectory of T = `length` and B = `num_envs` for this algorithm."""
    return ALGORITHMS[settings.name].recorded(length=length, num_envs=num_envs)
