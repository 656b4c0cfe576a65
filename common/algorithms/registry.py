"""The algorithms by name, ours and a user's own, and the constructors that the services call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from common import extensions
from common.algorithms import a3c, a3c_grad, dqn, impala, ppo, pqn, sac, td3
from common.algorithms.api import Algorithm, Entry, NetworkPolicy, Policy, WorkerContext
from common.algorithms.payload import Payload, trajectory_schema
from common.algorithms.ranks import ALONE, Ranks
from common.algorithms.sections import AlgorithmSection, ReplaySection
from common.envs.spec import EnvSpec
from common.errors import ConfigError
from common.models import arithmetic
from common.models.arithmetic import CPU
from common.models.memory import Recurrent
from common.models.spec import ModelSettings, Precision
from common.protocol.messages import ArraySpec
from common.replay.blocks import STREAMS

ALGORITHMS: Mapping[str, Entry] = MappingProxyType(
    {
        "ppo": ppo.ENTRY,
        "impala": impala.ENTRY,
        "a3c": a3c.ENTRY,
        "a3c-grad": a3c_grad.ENTRY,
        "pqn": pqn.ENTRY,
        "dqn": dqn.ENTRY,
        "td3": td3.ENTRY,
        "sac": sac.ENTRY,
    }
)


def entry(name: str) -> Entry:
    """The algorithm that settings of this name belong to: one of `ALGORITHMS`, or `package.module:ENTRY`, an `Entry` elsewhere.

    Raises ConfigError where that cannot be imported, or lacks a method.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    found: Entry = extensions.import_attribute(
        name, setting="algorithm.name", what="ENTRY", accepts=lambda thing: isinstance(thing, Entry)
    )
    if not issubclass(found.settings, AlgorithmSection):
        base = "rookery.AlgorithmSection"
        fact = f"{name}: the settings of an algorithm are a section"
        raise ConfigError(fact, found=found.settings, wanted=f"a class derived from {base}")
    require_arguments(found.algorithm, ("settings", "model", "env", "seed"), of=name)
    require_arguments(found.policy, ("settings", "model", "env", "precision", "seed", "context"), of=name)
    require_protocol(found.algorithm, Algorithm, of=name)
    require_protocol(found.policy, Policy, of=name)
    return found


def in_native_precision(settings: AlgorithmSection, device: torch.device) -> AlgorithmSection:
    """These settings with a precision that `device` has instructions for."""
    found = arithmetic.native(settings.precision, device)
    return settings if found == settings.precision else settings.model_copy(update={"precision": found})


_WITHOUT = {
    "device": "set learner.device=cpu",
    "ranks": "set learner.ranks=1",
    "streams": f"let actors step {STREAMS} environments at most",
    "normalize_reward": "set env.normalize_reward=false",
    "length": "set model.recurrent=null",
}
"""What to change where an algorithm does not take an argument that not all of them take."""


def build_algorithm(
    settings: AlgorithmSection,
    *,
    model: ModelSettings,
    env: EnvSpec,
    seed: int,
    device: torch.device = CPU,
    ranks: Ranks = ALONE,
    streams: int = STREAMS,
    normalize_reward: bool = False,
    length: int = 0,
) -> Algorithm:
    """The learner's side of the algorithm that `settings` belongs to, to train on `device`, as one of `ranks`.

    A replay memory is laid out for `streams` environments that write to it, and where the network has memory for rollouts of
    `length` rows (T). Raises ConfigError where it cannot train on `env`, on `device`, as one of several ranks, on normalised
    rewards or with memory. The last five are arguments of the algorithm only where they are not the CPU, not `ALONE`, more than
    `STREAMS` of an algorithm with a replay memory, True, and needed by such a memory.
    """
    settings = in_native_precision(settings, device)
    build = entry(settings.name).algorithm
    elsewhere: dict[str, object] = {} if device == CPU else {"device": device}
    elsewhere |= {} if ranks.count == 1 else {"ranks": ranks}
    elsewhere |= {"streams": streams} if streams > STREAMS and isinstance(settings, ReplaySection) else {}
    elsewhere |= {"normalize_reward": True} if normalize_reward else {}
    elsewhere |= {"length": length} if model.recurrent and isinstance(settings, ReplaySection) else {}
    for name in elsewhere:
        fix = f"{_WITHOUT[name]}, or let its constructor take `{name}`"
        require_arguments(build, ("settings", "model", "env", "seed", name), of=settings.name, fix=fix)
    built = build(settings=settings, model=model, env=env, seed=seed, **elsewhere)
    require_protocol(built, Algorithm, of=settings.name)
    if model.recurrent and not any(isinstance(module, Recurrent) for module in built.model.modules()):
        fact, wanted = f"{settings.name} has no memory", "null, or ppo, impala, a3c, a3c-grad, pqn or dqn"
        raise ConfigError(fact, found=f"model.recurrent {model.recurrent}", wanted=wanted)
    return built


def build_policy(
    settings: AlgorithmSection, *, model: ModelSettings, env: EnvSpec, precision: Precision, seed: int, context: WorkerContext
) -> Policy:
    """The acting side; it acts in `precision`, as far as the CPU has that, and draws its actions from `seed`."""
    built = entry(settings.name).policy(
        settings=in_native_precision(settings, CPU),
        model=model,
        env=env,
        precision=arithmetic.native(precision, CPU),
        seed=seed,
        context=context,
    )
    require_protocol(built, Policy, of=settings.name)
    size = built.memory.shape[1] if isinstance(built, NetworkPolicy) else 0
    if size != model.state_size:
        fix = "pass state_size=model.state_size to NetworkPolicy, or set model.recurrent to null"
        raise ConfigError(f"{settings.name}: numbers in the state of its policy", found=size, wanted=model.state_size, fix=fix)
    return built


def rollout_schema(
    settings: AlgorithmSection, *, model: ModelSettings, env: EnvSpec, length: int, num_envs: int
) -> tuple[ArraySpec, ...]:
    """The arrays of a rollout of T = `length` steps by B = `num_envs`: a trajectory, and what the policy records beside it."""
    recorded = entry(settings.name).recorded(settings=settings, length=length, num_envs=num_envs)
    return trajectory_schema(env, length=length, num_envs=num_envs, state_size=model.state_size, recorded=recorded)


def build_payload(settings: AlgorithmSection, *, model: ModelSettings, env: EnvSpec, length: int, num_envs: int) -> Payload:
    """The experience messages from actor to learner."""
    rollout = rollout_schema(settings, model=model, env=env, length=length, num_envs=num_envs)
    payload = entry(settings.name).payload
    return payload(settings=settings, model=model, env=env, length=length, num_envs=num_envs, rollout=rollout)


def require_protocol(thing: object, protocol: type, *, of: str) -> None:
    """Refuse (ConfigError) a class or an object of algorithm `of` that lacks a member of `protocol`.

    Attributes that are no methods are required of objects only, since `__init__` may set them. A function that builds passes:
    the object that it returns is checked later.
    """
    kind = thing if isinstance(thing, type) else type(thing)
    if not isinstance(thing, type) and inspect.isroutine(thing):
        return
    members = [name for name in vars(protocol) if not name.startswith("_")]
    if isinstance(thing, type):
        members = [name for name in members if callable(getattr(protocol, name))]
    missing = [name for name in members if not hasattr(thing, name) or getattr(kind, name, None) is getattr(protocol, name)]
    abstract = [name for name in dir(kind) if getattr(getattr(kind, name, None), "__isabstractmethod__", False)]
    if missing or abstract:
        raise ConfigError(
            f"{of}: {kind.__name__} is no {protocol.__name__}",
            found=f"no {', '.join([*missing, *abstract])}",
            wanted=f"the members of rookery.{protocol.__name__}",
            fix="write those that are missing, or derive from a class that has them",
        )


def require_arguments(function: Callable[..., object], names: tuple[str, ...], *, of: str, fix: str = "") -> None:
    """Refuse (ConfigError) a constructor of algorithm `of` that does not take arguments of these names."""
    if wrong := extensions.signature_error(function, **dict.fromkeys(names)):
        name = getattr(function, "__name__", repr(function))
        raise ConfigError(f"{of}: {name} cannot be built", found=wrong, wanted=f"arguments {', '.join(names)}", fix=fix)
