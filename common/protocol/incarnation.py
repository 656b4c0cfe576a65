"""One incarnation of a worker as the learner sees it, and its form in a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain, repeat
from typing import Any, Final, TypeAlias

from common.errors import InternalError
from common.protocol.events import Route, WorkerKey
from common.protocol.ledger import Account
from common.protocol.messages import ExperienceMessage, Reject, Snapshot
from common.units import EnvSteps, Seconds, Sequence, Version

EpisodeCheck: TypeAlias = Callable[[ExperienceMessage], ExperienceMessage]
"""Raises `ProtocolError` for a report of episodes that cannot be; returns the message with those that count."""


HOLES = 1024  # numbers remembered one by one, because they are missing or were completed early: more than any window


class WorkerState(StrEnum):
    """State of one incarnation of a worker in one learner process."""

    EXPECTED = "expected"  # no Hello accepted yet: a new incarnation, or one in the checkpoint of a resumed learner
    CONNECTED = "connected"  # welcomed, and heard within the silence limit
    AWAY = "away"  # its connection ended or fell silent; its account is open
    CLOSED = "closed"  # its account is closed; nothing more of this incarnation is accepted


TRANSITIONS: Final[Mapping[WorkerState, Mapping[WorkerState, str]]] = {
    WorkerState.EXPECTED: {
        WorkerState.CONNECTED: "Hello accepted",
        WorkerState.CLOSED: "absent too long, slot needed, newer incarnation, or end of the run",
    },
    WorkerState.CONNECTED: {
        WorkerState.AWAY: "silence, connection lost, or Hello on another connection",
        WorkerState.CLOSED: "Goodbye, eviction, newer incarnation, or end of the run",
    },
    WorkerState.AWAY: {
        WorkerState.CONNECTED: "Hello accepted",
        WorkerState.CLOSED: "absent too long, slot needed, newer incarnation, or end of the run",
    },
    WorkerState.CLOSED: {},
}
"""Each transition with its causes. docs/protocol.md draws it."""


@dataclass(slots=True, kw_only=True)
class Worker:
    """One incarnation of one worker. An experience message is expected, then waiting, then taken, then completed."""

    key: WorkerKey
    role: str
    index: int
    generation: int
    public_key: str = ""  # of its connection; "" where there are no keys
    account: Account = field(default_factory=Account)
    written: tuple[EnvSteps, Sequence, bool] | None = None  # `mark` of its last line in the accounts file
    crossing: Seconds = 0.0  # of its largest experience message on the slowest link: no other message arrives meanwhile
    episodes: EpisodeCheck | None = None  # None: nothing arrived yet
    expected: Sequence = 0  # next number to arrive
    waiting: dict[Sequence, EnvSteps] = field(default_factory=dict)  # in the queue
    taken: dict[Sequence, EnvSteps] = field(default_factory=dict)  # out of the queue, being trained on
    bad_messages: int = 0  # in a row
    evicted_until: Seconds = float("-inf")
    rejects: list[Reject] = field(default_factory=list)  # to be sent with the next Credit
    ahead: dict[Sequence, EnvSteps] = field(default_factory=dict)  # completed (trained on or dropped) before a lower number
    continues: bool = True  # in lockstep: whether it began bit for bit where its slot had stopped
    claim_limit: EnvSteps | None = None  # most env steps beyond those that arrived; None: no Hello reached this learner
    state: WorkerState = WorkerState.EXPECTED
    route: Route | None = None  # of its connection; None unless connected
    heard_at: Seconds | None = None  # None: expected, and had no turn yet
    sent_at: Seconds = 0.0
    turn_at: Seconds = math.inf  # when `WorkerRegistry.take_due` returns it; infinity: never
    wanted_after: Version | None = None
    snapshot: Snapshot | None = None  # of an evaluator: the last one sent, which it plays
    challenger: Route | None = None  # another connection that greeted by this name: a Credit on `route` shows which one stands
    challenged_at: Seconds = float("-inf")
    evaluations: int = 0  # that arrived since `evaluations_since`
    evaluations_since: Seconds = float("-inf")

    def enter(self, state: WorkerState) -> None:
        """Change the state. Raises `InternalError` for a transition that is not in `TRANSITIONS`."""
        if state not in TRANSITIONS[self.state]:
            wanted = ", ".join(TRANSITIONS[self.state]) or "none"
            raise InternalError(f"state of worker {self.key.name} after {self.state}", found=state, wanted=wanted)
        self.state = state

    @property
    def mark(self) -> tuple[EnvSteps, Sequence, bool]:
        """Return the values with which its account in the accounts file changes."""
        return self.account.produced, self.completed, self.state is WorkerState.CLOSED

    @property
    def acked(self) -> Sequence:
        """Every message below this number has left the queue or was refused."""
        return min(self.waiting, default=self.expected)

    @property
    def completed(self) -> Sequence:
        """Every message below this number was trained on or dropped: where a resumed learner continues."""
        return min((*self.waiting, *self.taken), default=self.expected)

    def silent(self, now: Seconds) -> Seconds:
        """Return the time since its last message; of one from a checkpoint the time since its first turn."""
        return 0.0 if self.heard_at is None else now - self.heard_at

    def complete(self, seqs: Iterable[Sequence], env_steps: EnvSteps) -> None:
        """Record that messages, of `env_steps` together, were trained on or dropped, for as long as a lower one was not."""
        self.ahead.update(zip(seqs, chain([env_steps], repeat(0)), strict=False))
        if (completed := self.completed) > min(self.ahead, default=completed):
            self.ahead = {number: steps for number, steps in self.ahead.items() if number >= completed}

    def expect(self, seq: Sequence) -> None:
        """Make message `seq` the next, unless it was completed before the checkpoint of this learner."""
        self.expected = seq
        while self.expected in self.ahead:
            self.expected += 1

    def skip(self, seq: Sequence, env_steps: EnvSteps) -> None:
        """Make message `seq` the next: those before it, of `env_steps` together, were dropped without having arrived."""
        holes = [number for number in range(self.expected, min(seq, self.expected + HOLES)) if number not in self.ahead]
        self.expect(seq)
        self.complete(holes, env_steps)

    def missing(self, seq: Sequence, env_steps_sent: EnvSteps) -> tuple[int, EnvSteps]:
        """Return messages and env steps that never arrived, where all messages before `seq` held `env_steps_sent` env steps."""
        if not self.ahead:
            return max(0, seq - self.expected), max(0, env_steps_sent - self.account.received)
        messages = seq - self.expected - sum(self.expected <= number < seq for number in self.ahead)
        later = sum(steps for number, steps in self.ahead.items() if number >= seq)
        return max(0, messages), max(0, env_steps_sent - (self.account.received - later))


def progress(worker: Worker) -> dict[str, Any]:
    """Return the progress of a worker in JSON values: messages in the queue or in training count as not received."""
    account = worker.account
    pending = 0 if worker.state is WorkerState.CLOSED else sum(worker.waiting.values()) + sum(worker.taken.values())
    return {
        "name": worker.key.name,
        "incarnation": worker.key.incarnation,
        "role": worker.role,
        "index": worker.index,
        "generation": worker.generation,
        "public_key": worker.public_key,
        "closed": worker.state is WorkerState.CLOSED,
        "expected": worker.completed,
        "ahead": sorted(worker.ahead.items()),
        "account": {
            "produced": account.produced,
            "received": account.received - pending,
            "lost": account.lost,
            "dropped_by_worker": account.dropped_by_worker,
        },
    }


def restored(state: Mapping[str, Any], *, most: int) -> Worker:
    """Return the worker that `progress` describes, away until its Hello. Its incarnation is at most `most`."""
    return Worker(
        key=WorkerKey(name=state["name"], incarnation=min(state["incarnation"], most)),
        role=state["role"],
        index=state["index"],
        generation=state["generation"],
        public_key=state.get("public_key", ""),
        state=WorkerState.CLOSED if state["closed"] else WorkerState.EXPECTED,
        expected=state["expected"],
        ahead=dict(state["ahead"]),
        account=Account(**state["account"]),
    )
