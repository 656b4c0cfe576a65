"""Events that a session handles, and the instructions that it returns.

Both sides of the protocol are state machines: `handle(event, now) -> list[Instruction]`. They own every decision
and no clock, socket, thread or queue: the caller passes events with their time, and performs the instructions.
Requests of a worker's own application are methods of its session, which return instructions as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

from common.protocol.messages import Act, Arrays, Drain, Envelope, Evaluation, Message, Reject, Snapshot, Welcome
from common.units import EnvSteps, Seconds, Sequence, Version

Route: TypeAlias = bytes
"""The learner's handle of one connection; a worker that reconnects comes by a new route."""

SENTENCE = 500  # characters of a reason, all ASCII: a header must hold those of all messages that one Credit rejects


def sentence(text: str) -> str:
    """Return `text`, which may be or quote bytes of another process, in at most SENTENCE ASCII characters."""
    return text[:SENTENCE].encode("ascii", "backslashreplace").decode()[:SENTENCE]


class RefusalCode(StrEnum):
    """Reason for which a learner refuses a worker, or a policy server an env worker."""

    UNKNOWN_SENDER = "unknown_sender"  # sent a message before a Hello, or the learner has restarted since its Hello: greet again
    DECODE = "decode"  # sent bytes that are no message
    PROTOCOL = "protocol"  # sends another protocol version
    RUN = "run"  # belongs to another run
    ENVIRONMENT = "environment"  # built another environment than the run's
    SUPERSEDED = "superseded"  # a newer incarnation of the same worker has greeted: start a new incarnation
    IN_USE = "in_use"  # a connected worker, or a worker of another key, has the name: greet again later
    FORGOTTEN = "forgotten"  # was silent so long that its experience was dropped: start a new incarnation
    EVICTED = "evicted"  # sent nothing but messages that were refused: greet again later
    FULL = "full"  # the run has as many workers as it accepts
    ROLE = "role"  # neither actor nor evaluator, or the message or the name belongs to another role
    DRAINING = "draining"  # the run is ending


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerKey:
    """One incarnation of one worker, which has sequence numbers and a ledger account of its own."""

    name: str
    incarnation: int


# --- events of both sides ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; sent a few times a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A message arrived. `route` is empty on the worker's side: it has one connection."""

    envelope: Envelope
    route: Route = b""
    public_key: str = ""  # that authenticated the connection; "" on the worker's side, and where there are no keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsent:
    """A `Send` could not be performed: no connection, or its buffers are full."""

    message: Message
    route: Route = b""


# --- events of the learner side ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Undecodable:
    """Bytes arrived that are no message; `protocol` where they were of another protocol version."""

    route: Route
    detail: str
    protocol: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Experience messages left the queue: their credits return."""

    items: tuple[tuple[WorkerKey, Sequence], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """Taken messages were trained on (`reason` None), or dropped."""

    items: tuple[tuple[WorkerKey, Sequence], ...]
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The learner has a new policy."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainAsked:
    """The run ends: drain all workers, accept nothing more."""

    reason: str
    deadline_seconds: Seconds


@dataclass(frozen=True, slots=True)
class Ended:
    """The drain is over: every account is closed; experience in flight will never be accepted."""


# --- instructions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Put this message on the wire (`route` as in `Received`)."""

    message: Message
    route: Route = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEvent:
    """Worth a log line: an event name and its fields. A code or reason of a closed list is a member of its enum."""

    event: str
    fields: dict[str, Any] = field(default_factory=dict)
    warning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """Learner: one admitted experience message with its sender, from the session over the queue to `Algorithm.ingest`.

    The queue has room for it: the credits ensure that. Messages of one `stream` with consecutive `seq` follow one another in
    time: an episode that does not end in one continues in the next.
    """

    worker: WorkerKey = WorkerKey(name="", incarnation=0)
    index: int = 0  # slot of the worker among the actors
    continues: bool = True  # in lockstep: whether the worker began bit for bit where its slot had stopped
    seq: Sequence = 0
    version: Version  # policy that acted
    env_steps: EnvSteps
    arrays: Arrays  # by the run's schema, without the state of the actor
    arrived_at: Seconds = 0.0  # on the clock of the session

    @property
    def number(self) -> tuple[WorkerKey, Sequence]:
        """Return the identity of the message in the session."""
        return self.worker, self.seq

    @property
    def stream(self) -> tuple[str, int]:
        """Return the identity of the worker as plain values."""
        return self.worker.name, self.worker.incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """Learner: an evaluator reported a result that passed all checks."""

    message: Evaluation
    snapshot: Snapshot | None = None  # the policy that was played; None where it is not the last one sent to that evaluator


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Worker: the learner refused this worker for good."""

    code: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NewIncarnation:
    """Worker: goes on as a new incarnation; its counters start from 0 again."""

    incarnation: int


Event: TypeAlias = Tick | Received | Unsent | Undecodable | Taken | Completed | Published | DrainAsked | Ended
Instruction: TypeAlias = (
    Send | LogEvent | Experience | Evaluated | Refused | NewIncarnation | Welcome | Snapshot | Reject | Drain | Act
)
"""A message among a worker's instructions has arrived, for its application to use."""
