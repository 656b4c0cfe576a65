"""An incarnation of an actor: its environments, its policy and its running rollout.

In lockstep it has a state, from which another process continues.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from common.algorithms.api import HasRandomState, NetworkPolicy, Policy
from common.algorithms.registry import build_payload, rollout_schema
from common.config.run_config import RunConfig
from common.envs.leaves import Array
from common.envs.spec import EnvSpec
from common.envs.state import StateError
from common.envs.trial import random_actions
from common.envs.vector import Transition, VectorEnvironment
from common.errors import DecodeError
from common.observability import logs
from common.protocol.limits import FREE_LENGTH
from common.protocol.messages import ACTOR_STATE, ExperienceMessage, Welcome
from common.protocol.plain import pack, unpack
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


@dataclass(slots=True, kw_only=True)
class Incarnation:
    """Environments, policy and running rollout of one incarnation of an actor, built from its Welcome."""

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
        assert isinstance(self.environment, VectorEnvironment)  # those of env workers take no part in lockstep
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
        assert isinstance(self.environment, VectorEnvironment)
        self.rollout.load_state_dict(rollout)
        if isinstance(self.policy, NetworkPolicy):
            self.policy.memory = torch.from_numpy(self.rollout.memory)
        self.environment.load_state_dict(environment)
        try:
            self._random_policy().set_random_state(policy)
        except StateError:
            raise
        except Exception as error:  # a user's policy may raise anything
            raise StateError("random state of the policy", found=repr(error)[:200], wanted="a state of its kind") from error

    def try_steps(self) -> None:
        """Take two env steps with random actions: the first brings only a reset where an episode is over.

        Raises `StateError` where one fails. This object must not be used afterwards.
        """
        assert isinstance(self.environment, VectorEnvironment)
        spec, random, seen = self.environment.spec, np.random.default_rng(0), self.rollout.observation
        newest = seen if spec.frame_stack == 1 else seen[:, -1]
        try:
            second = self.environment.step(random_actions(spec, newest, random)).observation
            self.environment.step(random_actions(spec, second, random))
        except Exception as error:  # an environment may raise anything
            found, wanted = repr(error)[:200], "none from the first env steps"
            raise StateError("error of the environments in their restored state", found=found, wanted=wanted) from error

    def _random_policy(self) -> HasRandomState:
        if not isinstance(self.policy, HasRandomState):
            raise StateError("random state of the policy", found=type(self.policy).__name__, wanted="a HasRandomState")
        return self.policy


def build_incarnation(worker: WelcomedWorker[RunConfig], environment: Environments, policy: Policy) -> Incarnation:
    """Return an incarnation that acts in `environment`, seeded as its Welcome says."""
    run, size = worker.run, {"length": worker.run.rollout.length, "num_envs": environment.num_envs}
    schema = rollout_schema(run.algorithm, model=run.model, env=environment.spec, **size)
    return Incarnation(
        environment=environment, policy=policy, rollout=Rollout(schema, environment.reset(worker.seed("environment")))
    )


def message_type_of(run: RunConfig, environment: Environments) -> type[ExperienceMessage]:
    """Return the type of the messages in which an actor sends what its policy makes of a rollout."""
    size = {"length": run.rollout.length, "num_envs": environment.num_envs}
    return build_payload(run.algorithm, model=run.model, env=environment.spec, **size).message_type


def begin_incarnation(build: Callable[[], Incarnation], welcome: Welcome) -> Incarnation:
    """Return an incarnation that begins: seeded anew, or in the state in `welcome` where it has one.

    The state is tried first, by env steps of an incarnation that is thrown away: an error in the first step would end this actor
    and each of its successors, which get the same state. Where it does not fit, or the steps fail, the incarnation begins from
    its seeds and sends no state, by which the learner detects that lockstep is broken.
    """
    incarnation, state = build(), welcome.arrays.get(ACTOR_STATE)
    if state is None:
        return incarnation
    try:
        incarnation.restore(state)
        incarnation.try_steps()
        incarnation = build()
        incarnation.restore(state)
    except (StateError, DecodeError) as error:
        _log.warning("actor_state_refused", detail=str(error), consequence="this actor begins anew; lockstep is broken")
        incarnation = build()
        incarnation.readable = False
    return incarnation


def begin_alike(first: Welcome, second: Welcome) -> bool:
    """Return whether two Welcomes of lockstep are for the same slot and with the same state, from which its actor continues."""
    empty = np.empty(0, np.uint8)
    before, after = (welcome.arrays.get(ACTOR_STATE, empty) for welcome in (first, second))
    return first.index == second.index and np.array_equal(before, after)
