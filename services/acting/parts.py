"""The parts that an actor is built of: its policy, which evaluators have too, its environments and its rollout.

In lockstep they have a state, from which another process continues.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from common.algorithms.api import HasRandomState, Policy, WorkerContext
from common.algorithms.registry import build_payload, build_policy, rollout_schema
from common.config.run_config import RunConfig
from common.envs.spec import EnvSpec
from common.envs.state import StateError
from common.envs.vector import Array, Transition
from common.errors import DecodeError, DropReason, ProtocolError
from common.models import arithmetic
from common.models.snapshot import to_tensor
from common.models.spec import Precision
from common.observability import logs
from common.protocol.limits import FREE_LENGTH
from common.protocol.messages import ACTOR_STATE, ExperienceMessage, Snapshot, Welcome
from common.protocol.plain import pack, unpack
from common.runtime import process
from common.transport.link import Link
from services.acting.rollout import Rollout
from services.worker import WelcomedWorker

_log = logs.EventLog(__name__)


class Environments(Protocol):
    """B environments that a policy acts on: a `VectorEnvironment`, or those of env workers."""

    spec: EnvSpec
    num_envs: int

    def reset(self, seed: int) -> Array:
        """Begin B episodes; return the first observations [B, *frame]."""

    def step(self, action: Array) -> Transition:
        """Take `action` [B, ...] in all of them."""

    def state_dict(self) -> dict[str, Any]:
        """Return their state; raises `StateError` where it cannot be read."""

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore `state_dict`; raises `StateError`."""


def policy_of(worker: WelcomedWorker[RunConfig], spec: EnvSpec, *, num_envs: int, precision: Precision, training: bool) -> Policy:
    """Return the run's policy for `num_envs` environments of `spec`, those of this process, for `training` or for evaluation.

    Raises `ConfigError` where that is not the learner's environment.
    """
    process.set_torch_threads(getattr(worker.invocation.settings, worker.role).torch_threads)
    worker.link.check_environment(spec)
    if arithmetic.native(precision, arithmetic.CPU) != precision:
        _log.info("no_bfloat16", setting="actor.precision", device="cpu", precision="fp32")
    policy = build_policy(
        worker.run.algorithm,
        model=worker.run.model,
        env=spec,
        precision=precision,
        seed=worker.seed("policy"),
        context=WorkerContext(index=worker.welcome.index, workers=worker.run.actors, num_envs=num_envs, training=training),
    )
    worker.link.layout = policy.layout
    return policy


def load_newest_policy(link: Link, policy: Policy) -> Snapshot | None:
    """Load the newest policy that arrived; None without one, or where it does not fit, which is counted and logged."""
    snapshot = link.take_snapshot()
    if snapshot is None:
        return None
    try:
        load_policy(snapshot, policy)
    except ProtocolError as error:
        link.refuse_snapshot(error)
        return None
    return snapshot


def load_policy(snapshot: Snapshot, policy: Policy) -> None:
    """Load the parameters; raises `ProtocolError` where they are not one array of the policy's size and a dtype of snapshots."""
    if list(snapshot.arrays) != ["parameters"]:
        raise ProtocolError(DropReason.SCHEMA, "arrays of a snapshot", found=list(snapshot.arrays), wanted="parameters alone")
    policy.load(snapshot.version, to_tensor(snapshot.arrays["parameters"]), env_steps=snapshot.env_steps)


@dataclass(slots=True, kw_only=True)
class ActorParts:
    """Environments, policy and running rollout of an actor, built from its Welcome."""

    environment: Environments
    policy: Policy
    rollout: Rollout
    readable: bool = True  # whether their state can be read; the first attempt decides

    def state(self) -> NDArray[np.uint8]:
        """Return the state between two rollouts, packed [N]; empty where it cannot be read, which is logged once."""
        if self.readable:
            try:
                return self._packed()
            except StateError as error:
                self.readable = False
                consequence = "lockstep does not survive a restart of this actor or of the learner"
                _log.warning("actor_state_unreadable", detail=str(error), consequence=consequence)
        return np.empty(0, np.uint8)

    def _packed(self) -> NDArray[np.uint8]:
        policy = self._random_policy()
        environment, rollout = self.environment.state_dict(), self.rollout.state_dict()
        packed = pack({"environment": environment, "policy": policy.random_state(), "rollout": rollout})
        if packed.size > FREE_LENGTH:
            found, wanted = f"{packed.size} bytes", f"at most {FREE_LENGTH}"
            raise StateError("the state of this actor is too large", found=found, wanted=wanted)
        return packed

    def restore(self, state: NDArray[np.uint8]) -> None:
        """Continue from a state of `state`. Raises `StateError` or `DecodeError`; this object must then not be used any more."""
        if state.dtype != np.uint8 or state.ndim != 1 or state.size > FREE_LENGTH:
            found, wanted = f"{state.dtype} {list(state.shape)}", f"uint8 [N] of at most {FREE_LENGTH} bytes"
            raise DecodeError("state of the actor", found=found, wanted=wanted)
        tree = unpack(state)
        parts = [tree.get(name) if isinstance(tree, dict) else None for name in ("environment", "policy", "rollout")]
        environment, policy, rollout = parts
        if not (isinstance(environment, dict) and isinstance(policy, np.ndarray) and isinstance(rollout, dict)):
            raise DecodeError("state of the actor", found="other parts", wanted="environment, policy, rollout")
        self.rollout.load_state_dict(rollout)
        self.environment.load_state_dict(environment)
        try:
            self._random_policy().set_random_state(policy)
        except StateError:
            raise
        except Exception as error:  # a user's policy may raise anything
            raise StateError("random state of the policy", found=repr(error)[:200], wanted="a state of its kind") from error

    def _random_policy(self) -> HasRandomState:
        if not isinstance(self.policy, HasRandomState):
            raise StateError("random state of the policy", found=type(self.policy).__name__, wanted="a HasRandomState")
        return self.policy


def acting_policy(worker: WelcomedWorker[RunConfig], spec: EnvSpec, *, num_envs: int) -> Policy:
    """Return the policy of an actor. Raises `ConfigError` as `policy_of`."""
    return policy_of(worker, spec, num_envs=num_envs, precision=worker.run.acting_precision, training=True)


def build_parts(worker: WelcomedWorker[RunConfig], environment: Environments, policy: Policy) -> ActorParts:
    """Return the parts of an actor in `environment`, seeded as its Welcome says."""
    run, size = worker.run, {"length": worker.run.rollout.length, "num_envs": environment.num_envs}
    schema = rollout_schema(run.algorithm, env=environment.spec, **size)
    return ActorParts(
        environment=environment, policy=policy, rollout=Rollout(schema, environment.reset(worker.seed("environment")))
    )


def message_type_of(run: RunConfig, environment: Environments) -> type[ExperienceMessage]:
    """Return the type of the messages in which an actor sends what its policy makes of a rollout."""
    size = {"length": run.rollout.length, "num_envs": environment.num_envs}
    return build_payload(run.algorithm, model=run.model, env=environment.spec, **size).message_type


def begin_incarnation(build: Callable[[], ActorParts], welcome: Welcome) -> ActorParts:
    """Return the parts that an incarnation begins with: seeded anew, or in the state in `welcome` where it has one.

    Where that state does not fit, they are built a second time: the incarnation begins from its seeds and sends no state, by
    which the learner detects that lockstep is broken.
    """
    parts, state = build(), welcome.arrays.get(ACTOR_STATE)
    if state is None:
        return parts
    try:
        parts.restore(state)
    except (StateError, DecodeError) as error:
        _log.warning("actor_state_refused", detail=str(error), consequence="this actor begins anew; lockstep is broken")
        parts = build()
        parts.readable = False
    return parts


def begin_alike(first: Welcome, second: Welcome) -> bool:
    """Return whether two Welcomes of lockstep are for the same slot and with the same state, from which its actor continues."""
    empty = np.empty(0, np.uint8)
    before, after = (welcome.arrays.get(ACTOR_STATE, empty) for welcome in (first, second))
    return first.index == second.index and np.array_equal(before, after)
