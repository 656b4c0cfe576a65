"""The algorithms by name, ours and a user's own: settings, learner's side, acting side, what actors record and send."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from common import extensions
from common.algorithms import policy as acting
from common.algorithms import q_policy
from common.algorithms.a3c import A3C
from common.algorithms.a3c_grad import A3CGrad, GradientPolicy
from common.algorithms.api import Algorithm, Place, Policy
from common.algorithms.dqn import DQN
from common.algorithms.gradient import gradients
from common.algorithms.impala import Impala
from common.algorithms.noisy_policy import NoisyPolicy
from common.algorithms.ppo import PPO
from common.algorithms.promises import require, require_call
from common.algorithms.settings.a3c import A3CGradSettings, A3CSettings
from common.algorithms.settings.base import AlgorithmSection
from common.algorithms.settings.dqn import DQNSettings
from common.algorithms.settings.impala import ImpalaSettings
from common.algorithms.settings.ppo import PPOSettings
from common.algorithms.settings.td3 import TD3Settings
from common.algorithms.shipment import Shipment, trajectories
from common.algorithms.td3 import TD3
from common.algorithms.trajectory import trajectory_schema
from common.envs.spec import EnvSpec
from common.errors import ConfigError
from common.models import arithmetic
from common.models.arithmetic import CPU
from common.models.spec import ModelSettings, Precision
from common.wire.messages import ArraySpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One algorithm: how its two sides are built, and what passes between them."""

    settings: type[AlgorithmSection]
    algorithm: Callable[..., Algorithm]  # settings=, model=, env=, seed=
    policy: Callable[..., Policy] = acting.ActorCriticPolicy  # settings=, model=, env=, precision=, seed=, place=
    recorded: Callable[..., tuple[ArraySpec, ...]] = acting.recorded  # settings=, length=, num_envs=
    ships: Callable[..., Shipment] = trajectories  # settings=, model=, env=, length=, num_envs=, rollout= its schema


ALGORITHMS: Mapping[str, Entry] = MappingProxyType(
    {
        "ppo": Entry(settings=PPOSettings, algorithm=PPO),
        "impala": Entry(settings=ImpalaSettings, algorithm=Impala),
        "a3c": Entry(settings=A3CSettings, algorithm=A3C),
        "a3c-grad": Entry(settings=A3CGradSettings, algorithm=A3CGrad, policy=GradientPolicy, ships=gradients),
        "dqn": Entry(settings=DQNSettings, algorithm=DQN, policy=q_policy.EpsilonGreedyPolicy, recorded=q_policy.recorded),
        "td3": Entry(settings=TD3Settings, algorithm=TD3, policy=NoisyPolicy, recorded=lambda **_: ()),
    }
)


def entry(name: str) -> Entry:
    """The algorithm that settings of this name belong to: one of `ALGORITHMS`, or `package.module:ENTRY`, an `Entry` elsewhere.

    Raises ConfigError where that cannot be imported, or lacks a method.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    found: Entry = extensions.find(name, setting="algorithm.name", what="ENTRY", accepts=lambda thing: isinstance(thing, Entry))
    if not issubclass(found.settings, AlgorithmSection):
        base = "common.algorithms.settings.base.AlgorithmSection"
        fact = f"{name}: the settings of an algorithm are a section"
        raise ConfigError(fact, found=found.settings, wanted=f"a class derived from {base}")
    require_call(found.algorithm, ("settings", "model", "env", "seed"), of=name)
    require_call(found.policy, ("settings", "model", "env", "precision", "seed", "place"), of=name)
    require(found.algorithm, Algorithm, of=name)
    require(found.policy, Policy, of=name)
    return found


def in_native_precision(settings: AlgorithmSection, device: torch.device) -> AlgorithmSection:
    """These settings with a precision that `device` has instructions for."""
    found = arithmetic.native(settings.precision, device)
    return settings if found == settings.precision else settings.model_copy(update={"precision": found})


def build_algorithm(
    settings: AlgorithmSection, *, model: ModelSettings, env: EnvSpec, seed: int, device: torch.device = CPU
) -> Algorithm:
    """The learner's side of the algorithm that `settings` belongs to, to train on `device`.

    Raises ConfigError where it cannot train on `env`, or there. Only who trains elsewhere than on the CPU is told where.
    """
    settings = in_native_precision(settings, device)
    build, elsewhere = entry(settings.name).algorithm, {} if device == CPU else {"device": device}
    require_call(build, ("settings", "model", "env", "seed", *elsewhere), of=settings.name)
    built = build(settings=settings, model=model, env=env, seed=seed, **elsewhere)
    require(built, Algorithm, of=settings.name)
    return built


def build_policy(
    settings: AlgorithmSection, *, model: ModelSettings, env: EnvSpec, precision: Precision, seed: int, place: Place
) -> Policy:
    """The acting side; it acts in `precision`, as far as the CPU has that, and draws its actions from `seed`."""
    built = entry(settings.name).policy(
        settings=in_native_precision(settings, CPU),
        model=model,
        env=env,
        precision=arithmetic.native(precision, CPU),
        seed=seed,
        place=place,
    )
    require(built, Policy, of=settings.name)
    return built


def rollout_schema(settings: AlgorithmSection, *, env: EnvSpec, length: int, num_envs: int) -> tuple[ArraySpec, ...]:
    """The arrays an actor writes down while it steps T = `length` by B = `num_envs`: a trajectory, and what the policy adds."""
    recorded = entry(settings.name).recorded(settings=settings, length=length, num_envs=num_envs)
    return trajectory_schema(env, length=length, num_envs=num_envs, recorded=recorded)


def shipment(settings: AlgorithmSection, *, model: ModelSettings, env: EnvSpec, length: int, num_envs: int) -> Shipment:
    """What passes from actor to learner."""
    rollout = rollout_schema(settings, env=env, length=length, num_envs=num_envs)
    ships = entry(settings.name).ships
    return ships(settings=settings, model=model, env=env, length=length, num_envs=num_envs, rollout=rollout)
