"""What happens to a session (events) and what it asks for in return (instructions).

Both sides of the protocol are state machines: `handle(event, now) -> list[Instruction]`. They own every decision
and no clock, socket, thread or queue: the caller tells them what happened and when, and performs what they answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

from common.units import EnvSteps, Seconds, Sequence, Version
from common.wire.messages import Drain, Dropped, Envelope, Evaluation, Experience, Message, Reject, Snapshot, Welcome

Route: TypeAlias = bytes


class RefusalCode(StrEnum):
    """Why a learner refuses a peer."""

    STRANGER = "stranger"  # spoke before it greeted, or greeted a learner that has since restarted: greet again
    DECODE = "decode"  # sent bytes that are no message
    PROTOCOL = "protocol"  # speaks another protocol version
    RUN = "run"  # belongs to another run
    ENVIRONMENT = "environment"  # built another environment than the run's
    SUPERSEDED = "superseded"  # a newer incarnation of the same peer has greeted: start a new incarnation
    IN_USE = "in_use"  # a connected worker, or a worker of another key, has the name: greet again later
    FORGOTTEN = "forgotten"  # was silent so long that its experience was given up: start a new incarnation
    EVICTED = "evicted"  # sent nothing but messages that were refused: greet again later
    FULL = "full"  # the run has as many peers as it accepts
    ROLE = "role"  # neither actor nor evaluator, or says or is called what only the other may
    DRAINING = "draining"  # the run is ending


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerKey:
    """One life of one peer: what sequence numbers and ledger accounts belong to."""

    name: str
    incarnation: int


# --- events of both sides ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; sent a few times a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A message arrived. `route` is empty on the peer's side: it has one connection."""

    envelope: Envelope
    route: Route = b""
    public_key: str = ""  # that authenticated the connection; "" on the peer's side, and where there are no keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsent:
    """A `Send` could not be performed: no connection, or its buffers are full."""

    message: Message
    route: Route = b""


# --- events of the actor side -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """The application has experience to send; `seq` and `shipped` are filled in by the session."""

    experience: Experience


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """The application has another message for the learner (an Evaluation): sent if there is a Welcome, and never kept."""

    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The application wants the newest policy after this version, whenever there is one."""

    after: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """The application's counters, cumulative over the incarnation."""

    produced: EnvSteps
    dropped: tuple[Dropped, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """The application ends and will send nothing more."""

    reason: str


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

    items: tuple[tuple[PeerKey, Sequence], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """Taken messages met their end: trained on (`reason` None), or dropped."""

    items: tuple[tuple[PeerKey, Sequence], ...]
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The learner has a new policy."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainAsked:
    """The run ends: tell all peers, accept nothing more."""

    reason: str
    deadline_seconds: Seconds


@dataclass(frozen=True, slots=True)
class Ended:
    """The drain is over: every account is closed; what is in flight will never be accepted."""


# --- instructions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Put this message on the wire (`route` as in `Received`)."""

    message: Message
    route: Route = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Worth a log line: an event name and its fields."""

    event: str
    fields: dict[str, Any] = field(default_factory=dict)
    warning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """Learner: put this experience into the queue. The queue has room: the credits see to that."""

    peer: PeerKey
    index: int  # the sender's place among the actors
    continues: bool  # in lockstep: whether it began bit for bit where its place had stopped
    experience: Experience


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """Learner: an evaluator reported a result, and it is sound."""

    message: Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeted:
    """Peer: the learner said welcome (again)."""

    welcome: Welcome
    run: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """Peer: a new policy is here."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Peer: the learner refused one message, experience or an Evaluation."""

    reject: Reject


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Peer: the learner refused this peer for good."""

    code: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Draining:
    """Peer: the learner asks for a clean end."""

    drain: Drain


@dataclass(frozen=True, slots=True, kw_only=True)
class Reborn:
    """Peer: goes on as a new incarnation; its counters start from 0 again."""

    incarnation: int


Event: TypeAlias = (
    Tick
    | Received
    | Unsent
    | Offered
    | Spoken
    | Wanted
    | Counted
    | Left
    | Undecodable
    | Taken
    | Settled
    | Published
    | DrainAsked
    | Ended
)
Instruction: TypeAlias = Send | Note | Admit | Evaluated | Greeted | Arrived | Rejected | Refused | Draining | Reborn
