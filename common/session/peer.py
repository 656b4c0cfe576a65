"""What the learner knows of one peer, and the form of it that a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from common.session.events import PeerKey, Route
from common.session.ledger import Account
from common.units import EnvSteps, Seconds, Sequence, Version
from common.wire.messages import Experience, Reject

EpisodeCheck: TypeAlias = Callable[[Experience], Experience]
"""Raises `PeerError` for a report of episodes that cannot be; returns the message with those that count."""


@runtime_checkable
class RunningEpisodes(Protocol):
    """An `EpisodeCheck` that keeps sums of running episodes, which another incarnation continues in lockstep."""

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the sums after the last message."""

    def go_on(self, state: Mapping[str, np.ndarray], seq: Sequence) -> None:
        """Restore the sums in `state`, which message `seq` continues."""


HOLES = 1024  # missing numbers remembered one by one: more than any window


@dataclass(slots=True, kw_only=True)
class Peer:
    """One incarnation of one peer. An experience message is expected, then waiting, then taken, then settled."""

    key: PeerKey
    role: str
    index: int
    generation: int
    public_key: str = ""  # of its connection; "" where there are no keys
    account: Account = field(default_factory=Account)
    episodes: EpisodeCheck | None = None  # None: nothing arrived yet
    expected: Sequence = 0  # next number to arrive
    waiting: dict[Sequence, EnvSteps] = field(default_factory=dict)  # in the queue
    taken: dict[Sequence, EnvSteps] = field(default_factory=dict)  # out of the queue, being trained on
    bad_messages: int = 0  # in a row
    evicted_until: Seconds = float("-inf")
    rejects: list[Reject] = field(default_factory=list)  # refused, and the peer not told yet
    credit_due: bool = False
    ahead: dict[Sequence, EnvSteps] = field(default_factory=dict)  # met their end (refused, settled) before a lower number
    continues: bool = True  # in lockstep: whether it goes on bit for bit where its place stopped
    greeted: bool = False  # in this learner's life: not yet, if known from a checkpoint
    route: Route | None = None  # None: away
    gone: bool = False  # said Goodbye, was superseded or given up: its account is closed
    heard_at: Seconds | None = None  # None: never, by this learner
    spoke_at: Seconds = 0.0
    wanted_after: Version | None = None
    challenger: Route | None = None  # another connection that greeted by this name: a Credit on `route` shows which one stands
    challenged_at: Seconds = float("-inf")
    evaluations: int = 0  # that arrived since `evaluations_since`
    evaluations_since: Seconds = float("-inf")

    @property
    def acked(self) -> Sequence:
        """Every message below this number has left the queue or was refused."""
        return min(self.waiting, default=self.expected)

    @property
    def settled(self) -> Sequence:
        """Every message below this number met its end: where a learner resumed from here goes on."""
        return min((*self.waiting, *self.taken), default=self.expected)

    def silent(self, now: Seconds) -> Seconds:
        """Time since its last word; of one known from a checkpoint since this was first asked."""
        if self.heard_at is None:
            self.heard_at = now
        return now - self.heard_at

    def settle(self, seq: Sequence, env_steps: EnvSteps) -> None:
        """Remember that message `seq` met its end, for as long as a lower one did not."""
        self.ahead[seq] = env_steps
        if (settled := self.settled) > min(self.ahead):
            self.ahead = {number: steps for number, steps in self.ahead.items() if number >= settled}

    def expect(self, seq: Sequence) -> None:
        """Message `seq` is next, unless it met its end before the checkpoint that this learner resumed from."""
        self.expected = seq
        while self.expected in self.ahead:
            self.expected += 1

    def skip(self, seq: Sequence, env_steps: EnvSteps) -> None:
        """Message `seq` is next: those before it, `env_steps` together, met their end without having come."""
        holes = [number for number in range(self.expected, min(seq, self.expected + HOLES)) if number not in self.ahead]
        self.expect(seq)
        for number in holes:
            self.settle(number, env_steps)
            env_steps = 0

    def missing(self, seq: Sequence, shipped: EnvSteps) -> tuple[int, EnvSteps]:
        """Messages and env steps that never came, where the peer says that all messages before `seq` held `shipped` env steps."""
        messages = seq - self.expected - sum(self.expected <= number < seq for number in self.ahead)
        later = sum(steps for number, steps in self.ahead.items() if number >= seq)
        return max(0, messages), max(0, shipped - (self.account.received - later))


def progress(peer: Peer) -> dict[str, Any]:
    """How far a peer is settled, in JSON values: what waits or trains now will be sent again, or is lost with this learner."""
    account = peer.account
    pending = 0 if peer.gone else sum(peer.waiting.values()) + sum(peer.taken.values())
    return {
        "name": peer.key.name,
        "incarnation": peer.key.incarnation,
        "role": peer.role,
        "index": peer.index,
        "generation": peer.generation,
        "public_key": peer.public_key,
        "gone": peer.gone,
        "expected": peer.settled,
        "ahead": sorted(peer.ahead.items()),
        "account": {
            "produced": account.produced,
            "received": account.received - pending,
            "dropped_by_peer": account.dropped_by_peer,
        },
    }


def restored(state: Mapping[str, Any], *, most: int) -> Peer:
    """Return the peer that `progress` describes, away until it greets the resumed learner. Its incarnation is at most `most`."""
    return Peer(
        key=PeerKey(name=state["name"], incarnation=min(state["incarnation"], most)),
        role=state["role"],
        index=state["index"],
        generation=state["generation"],
        public_key=state.get("public_key", ""),
        gone=state["gone"],
        expected=state["expected"],
        ahead=dict(state["ahead"]),
        account=Account(**state["account"]),
    )
