"""The messages of the protocol, each defined once. `docs/protocol.md` is the authority in prose.

A message is a frozen value: scalar fields travel in the msgpack header, `arrays` as one raw buffer each.
Bytes belong to `codec`, the order of messages to `worker_side` and `learner_side`, sockets to `transport`.

Axes of experience arrays: T env steps first, then B environments of the sending actor.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, ClassVar, Final, TypeAlias

import numpy as np

from common.errors import DecodeError
from common.protocol.limits import WORKER_NAME_BYTES
from common.units import AtLeast, Count, EnvSteps, Seconds, Sequence, Version

PROTOCOL_VERSION = 2
ROLES = ("actor", "evaluator")  # of the workers of a learner, in Hello
ENV_WORKER: Final = "env_worker"  # role of the workers of a policy server
MODES = ("greedy", "sampled")  # of Evaluation: the likeliest action, or one drawn as in training

WORKER_NAME: Final = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._:-]{{0,{WORKER_NAME_BYTES - 1}}}")
"""A whole name of a worker: harmless in a log line, a metric's label and a file name."""
WORKER_NAME_WANTED: Final = f"1 to {WORKER_NAME_BYTES} of A-Z a-z 0-9 _ . : - with none of . : - in front"

Arrays: TypeAlias = Mapping[str, np.ndarray]
NO_ARRAYS: Arrays = MappingProxyType({})

ACTOR_STATE: Final = "actor_state"
"""Array uint8 [N] of experience and Welcome in lockstep: the state from which the next rollout begins, opaque to the learner."""


def server_of(role: str) -> str:
    """Return the name of the process that workers of this role connect to."""
    return "policy server" if role == ENV_WORKER else "learner"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """Name, dtype and shape of one array of an experience message; -1 in `shape` is a length chosen by the sender."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """Env steps that a worker dropped itself, cumulative over its incarnation, under one reason."""

    reason: str
    env_steps: EnvSteps


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """One message that the learner refused, experience or Evaluation: its number, the drop reason, one sentence."""

    seq: Sequence  # of an Evaluation, which has no number: 0
    reason: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Base of all messages. `arrays` is empty unless the class of the message describes them."""

    tag: ClassVar[str]
    arrays: Arrays = field(default_factory=lambda: NO_ARRAYS)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all arrays together."""
        return sum(array.nbytes for array in self.arrays.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    """Worker → learner: first message, again after every loss of the learner, until a Welcome or a Refusal comes."""

    tag: ClassVar[str] = "hello"
    role: str  # "actor" or "evaluator"; to a policy server "env_worker"
    worker: str  # stable name of the worker, unique in a run; a `WORKER_NAME`
    incarnation: Count  # larger at each start of the worker's process
    software: str  # rookery version, for people
    env_signature: str  # "" before the environment is built
    resend_from: Sequence  # lowest number the worker may still send; all below were acknowledged or dropped
    completed: EnvSteps  # env steps of all experience messages below `resend_from`
    produced: EnvSteps  # env steps of the rollouts that this incarnation finished or dropped so far
    welcomed: bool = False  # whether a Welcome has reached this incarnation

    def __post_init__(self) -> None:
        if not WORKER_NAME.fullmatch(self.worker):
            raise DecodeError("hello.worker", found=reprlib.repr(self.worker), wanted=WORKER_NAME_WANTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome(Message):
    """Learner → worker: the answer to a Hello; all facts of the run that a worker needs.

    In lockstep it has the array `actor_state` where the learner has the state of the slot's earlier holder, from which this
    incarnation continues.
    """

    tag: ClassVar[str] = "welcome"
    index: Count  # slot of the worker within its role, from 0; with `generation` it selects the worker's random streams
    generation: Count  # slot generation: incarnations, of this worker or another, that held the slot before
    config: str  # the run's configuration, JSON
    env_signature: str
    schema: tuple[ArraySpec, ...]  # arrays of an experience message
    credits: Count  # most unacknowledged experience messages
    version: Annotated[Version, AtLeast(-1)]  # newest published policy; -1: none yet
    heartbeat_seconds: Seconds  # either side sends a message at least this often
    incarnation: Annotated[Count, AtLeast(-1)] = -1  # that of the Hello; -1: whichever
    snapshot_bytes: Count = 0  # arrays of a snapshot, all of one size; 0: unknown

    @property
    def described(self) -> tuple[object, ...]:
        """The facts from which a worker is built."""
        return self.config, self.env_signature, self.schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal(Message):
    """Learner → worker: a code and a sentence. `retry`: a new Hello may be accepted, as `incarnation` if one is named."""

    tag: ClassVar[str] = "refusal"
    code: str  # a `common.protocol.events.RefusalCode`
    reason: str
    retry: bool
    incarnation: Annotated[Count, AtLeast(-1)] = -1  # to greet as; -1: as before


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperienceMessage(Message):
    """Common part of Trajectory and Gradient: numbered, credited, acknowledged, counted in the ledger."""

    seq: Sequence
    version: Version  # policy that acted
    env_steps: EnvSteps  # in this message
    env_steps_sent: EnvSteps  # in all experience messages of this incarnation up to this one, it included


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory(ExperienceMessage):
    """Actor → learner: a rollout. Arrays by the Welcome's schema (see `common.algorithms.payload`)."""

    tag: ClassVar[str] = "trajectory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient(ExperienceMessage):
    """Actor → learner: the gradient of the loss on the actor's own rollout; arrays by the Welcome's schema."""

    tag: ClassVar[str] = "gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit(Message):
    """Learner → worker: acknowledges messages, grants credits, names the newest version. Also the heartbeat."""

    tag: ClassVar[str] = "credit"
    acked: Sequence  # every experience message below this number was taken from the queue or refused
    credits: Count
    version: Annotated[Version, AtLeast(-1)]
    rejects: tuple[Reject, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotWanted(Message):
    """Worker → learner: send me the newest policy once it is not `after`. At most one is open per worker."""

    tag: ClassVar[str] = "snapshot_wanted"
    after: Annotated[Version, AtLeast(-1)]  # -1: any


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot(Message):
    """Learner → worker: arrays {"parameters": [P] float32, or uint16 holding bfloat16 bits}."""

    tag: ClassVar[str] = "snapshot"
    version: Version
    env_steps: EnvSteps  # trained on when it was published: schedules of exploration follow it
    precision: str  # "fp32" or "bf16"
    layout: str  # fingerprint of the parameters' names, order and shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Message):
    """Worker → learner: heartbeat with the worker's cumulative counters. Episodes travel with the experience that ended them."""

    tag: ClassVar[str] = "report"
    produced: EnvSteps  # as in Hello
    dropped: tuple[Dropped, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation(Message):
    """Evaluator → learner: arrays {"episode_return": [E] float32 raw, "episode_length": [E] int32 env steps}."""

    tag: ClassVar[str] = "evaluation"
    version: Version
    mode: str  # "greedy" or "sampled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye(Message):
    """Worker → learner: a clean end; nothing follows. Carries the last counters, so that the ledger closes."""

    tag: ClassVar[str] = "goodbye"
    reason: str
    produced: EnvSteps  # as in Hello
    dropped: tuple[Dropped, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain(Message):
    """Learner → worker: the run ends; send nothing new but a Goodbye within `deadline_seconds`."""

    tag: ClassVar[str] = "drain"
    reason: str
    deadline_seconds: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Act(Message):
    """Policy server → env worker: take one env step with arrays {"action": [R, ...]}, or begin new episodes with `seed`.

    R is the number of environments of the env worker. An Act that is sent again has its old number and is answered again.
    """

    tag: ClassVar[str] = "act"
    number: Sequence  # larger than that of every earlier Act to this env worker
    seed: Annotated[int, AtLeast(-1)] = -1  # of the new episodes, without arrays; -1: take a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Observe(Message):
    """Env worker → policy server: the answer to an Act. Arrays by the Welcome's schema (see `common.envs.remote`)."""

    tag: ClassVar[str] = "observe"
    number: Sequence  # of the Act


MESSAGE_TYPES: tuple[type[Message], ...] = (
    Hello, Welcome, Refusal, Trajectory, Gradient, Credit, SnapshotWanted, Snapshot, Report, Evaluation, Goodbye, Drain, Act,
    Observe,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """A message and the run it belongs to ("" before a worker's first Welcome)."""

    run: str
    message: Message
