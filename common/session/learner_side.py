"""The protocol as the learner sees it: one `Peer` per welcomed peer, one `Account` per actor, one `Ledger` per run.

Admission: an experience message enters the queue only from a welcomed peer, in order, by the run's schema, finite,
and acted by a policy that was published. Whatever is refused is counted by reason, and its sender is told.
Credits: a peer's window shrinks when a message is sent and grows when one leaves the queue, so the queue can hold at
most `window x actors` messages, whatever the actors do. All decisions of the learner's side are in this file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from common.errors import DropReason, InternalError, PeerError
from common.session import events as e
from common.session.events import PeerKey, RefusalCode, Route
from common.session.ledger import Account, Ledger
from common.session.roster import ROLES, Peer, Terms, progress
from common.units import EnvSteps, Seconds, Sequence, Version
from common.wire.arrays import check_finite, check_schema
from common.wire.messages import (
    Credit,
    Drain,
    Dropped,
    Envelope,
    Evaluation,
    Experience,
    Goodbye,
    Hello,
    Message,
    Refusal,
    Reject,
    Report,
    Snapshot,
    SnapshotWanted,
    Welcome,
)


class LearnerSide:
    """State machine of the learner. Feed it events, perform its instructions; read `ledger` and the counts."""

    def __init__(self, terms: Terms, *, check: Callable[[Experience], None] = lambda _: None) -> None:
        """`check` raises `PeerError` for experience that fits the schema and still cannot be trained on."""
        self.terms = terms
        self._check = check
        self.ledger = Ledger()
        self.snapshot: Snapshot | None = None
        self.draining = False
        self.messages_dropped: Counter[str] = Counter()
        self.sequence_gaps = 0
        self.reconnects = 0
        self._peers: dict[PeerKey, Peer] = {}
        self._routes: dict[Route, Peer] = {}
        self._current: dict[str, PeerKey] = {}  # newest incarnation of each name
        self._generations: Counter[str] = Counter()
        self._indexes: dict[tuple[str, str], int] = {}
        self._credit_due: dict[PeerKey, list[Reject]] = {}
        self._restored: dict[PeerKey, Mapping[str, Any]] = {}

    # --- reading ---

    def connected(self, role: str) -> int:
        """Peers of this role that are welcome and were heard of lately."""
        return sum(peer.role == role for peer in self._routes.values())

    @property
    def window(self) -> int:
        """Credits of each actor: the setting, or more where few actors must fill one batch."""
        return max(self.terms.credits, -(-self.terms.batch // max(1, self.connected("actor"))))

    @property
    def queue_capacity(self) -> int:
        """Most messages the queue can hold while the connected actors stay the same."""
        return self.window * self.connected("actor")

    @property
    def version(self) -> Version:
        """Newest published policy; -1 before the first."""
        return self.snapshot.version if self.snapshot else -1

    def check_ledger(self) -> None:
        """Raise `InternalError` unless produced = trained + queued + in flight + dropped, for the run and its actors alike."""
        self.ledger.check(sum(peer.account.in_flight for peer in self._peers.values()))

    # --- resuming ---

    def state_dict(self) -> dict[str, Any]:
        """What a resumed learner must know: the ledger of what is settled, and how far each actor got. JSON values."""
        settled = {"produced": self.ledger.trained + self.ledger.dropped.total(), "trained": self.ledger.trained}
        return {
            "ledger": {**settled, "dropped": dict(self.ledger.dropped)},
            "peers": [progress(peer) for peer in self._peers.values() if not peer.gone],
            "indexes": [[role, name, index] for (role, name), index in self._indexes.items()],
            "generations": dict(self._generations),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: its actors are recognised when they greet."""
        self.ledger = Ledger.restored(state["ledger"])
        self._restored = {PeerKey(name=peer["name"], incarnation=peer["incarnation"]): peer for peer in state["peers"]}
        self._indexes = {(role, name): index for role, name, index in state["indexes"]}
        self._generations = Counter(state["generations"])

    # --- events ---

    def handle(self, event: e.Event, now: Seconds) -> list[e.Instruction]:
        """Advance by one event at monotonic time `now` (seconds); returns what to do, in order."""
        match event:
            case e.Received(route=route, envelope=envelope):
                out = self._received(route, envelope, now)
            case e.Undecodable():
                out = self._undecodable(event)
            case e.Taken(items=items):
                out = self._taken(items)
            case e.Settled(items=items, reason=reason):
                out = self._settled(items, reason)
            case e.Published(snapshot=snapshot):
                self.snapshot = snapshot
                out = [send for peer in self._routes.values() for send in self._answer(peer)]
            case e.Tick():
                out = self._tick(now)
            case e.Unsent(route=route, message=message):
                out = self._unsent(route, message)
            case e.DrainAsked(reason=reason, deadline_seconds=deadline_seconds):
                self.draining = True
                drain = Drain(reason=reason, deadline_seconds=deadline_seconds)
                out = [e.Send(route=route, message=drain) for route in self._routes]
            case e.Ended():
                for peer in self._peers.values():
                    if not peer.gone:
                        self._close(peer)
                out = []
            case _:
                raise InternalError("an event of a peer's side reached the learner's session", found=type(event).__name__)
        return out + self._credits(now)

    def _received(self, route: Route, envelope: Envelope, now: Seconds) -> list[e.Instruction]:
        message = envelope.message
        if isinstance(message, Hello):
            return self._greeted(route, envelope.run, message, now)
        peer = self._routes.get(route)
        if peer is None:
            return self._stranger(route, message)
        peer.heard_at = now
        match message:
            case Experience():
                return self._experience(peer, message)
            case SnapshotWanted(after=after):
                peer.wanted_after = after
                return self._answer(peer)
            case Report(produced=produced, dropped=dropped):
                self._reported(peer, produced, dropped)
                return []
            case Evaluation():
                return [e.Evaluated(message=message)]
            case Goodbye(reason=reason, produced=produced, dropped=dropped):
                self._reported(peer, produced, dropped)
                self._close(peer)
                return [e.Note(event="peer_left", fields={"peer": peer.key.name, "reason": reason})]
        self.messages_dropped[DropReason.DECODE] += 1
        return _refuse(route, RefusalCode.ROLE, f"a learner takes no {message.tag}", retry=False)

    # --- greeting ---

    def _greeted(self, route: Route, run: str, hello: Hello, now: Seconds) -> list[e.Instruction]:
        key = PeerKey(name=hello.peer, incarnation=hello.incarnation)
        objection = self._objection(key, run, hello)
        if objection is not None:
            code, reason, retry = objection
            self.messages_dropped[DropReason.STRANGER] += 1
            return _refuse(route, code, reason, retry=retry)
        again = key in self._peers
        peer = self._peers[key] if again else self._join(key, hello)
        self.reconnects += again
        self._away(peer)
        self._routes[route] = peer
        peer.route, peer.heard_at, peer.wanted_after = route, now, None
        reason = DropReason.ROLLED_BACK if self._restored.pop(key, None) else DropReason.GAP
        out = self._skipped(peer, hello.resend_from, hello.settled, reason)
        self._reported(peer, hello.produced, ())
        self._owe_credit_to_all()
        fields = {"peer": key.name, "role": peer.role, "index": peer.index, "again": again, "software": hello.software}
        return [e.Send(route=route, message=self._welcome(peer)), e.Note(event="peer_welcome", fields=fields), *out]

    def _objection(self, key: PeerKey, run: str, hello: Hello) -> tuple[RefusalCode, str, bool] | None:
        terms, current, known = self.terms, self._current.get(key.name), self._peers.get(key)
        if hello.role not in ROLES:
            return RefusalCode.ROLE, f"role: found {hello.role!r}, wanted one of {', '.join(ROLES)}", False
        if run not in ("", terms.run):
            return RefusalCode.RUN, f"run: found {run!r}, wanted {terms.run!r}; restart this peer to join the run", False
        if hello.env_signature not in ("", terms.env_signature):
            difference = f"environment signature: found {hello.env_signature}, wanted {terms.env_signature}"
            return RefusalCode.ENVIRONMENT, f"{difference}; install the learner's environment packages here", False
        if current is not None and key.incarnation < current.incarnation:
            return RefusalCode.SUPERSEDED, f"a newer process took the name {key.name!r}; give each peer its own name", False
        if known is not None and known.gone:
            return RefusalCode.FORGOTTEN, "this incarnation's account is closed; greet as a new incarnation", True
        if self.draining:
            return RefusalCode.DRAINING, "the run is ending", False
        if known is None and hello.role == "actor" and self.connected("actor") >= terms.max_actors:
            return RefusalCode.FULL, f"the run has its {terms.max_actors} actors; raise learner.max_actors to admit more", True
        return None

    def _join(self, key: PeerKey, hello: Hello) -> Peer:
        older = self._current.get(key.name)
        if older is not None:
            self._close(self._peers[older])
        self._current[key.name] = key
        where = (hello.role, key.name)
        index = self._indexes.setdefault(where, sum(role == hello.role for role, _ in self._indexes))
        progress = self._restored.get(key)
        if progress is None:  # what it did before this learner knew it is not in this ledger
            self._generations[key.name] += 1
            account, expected, refused = Account(produced=hello.settled, received=hello.settled), hello.resend_from, {}
        else:
            account, expected, refused = Account(**progress["account"]), progress["acked"], dict(progress["refused"])
        peer = self._peers[key] = Peer(key=key, role=hello.role, index=index, account=account, expected=expected, refused=refused)
        return peer

    def _welcome(self, peer: Peer) -> Welcome:
        actor = peer.role == "actor"
        return Welcome(
            index=peer.index,
            generation=self._generations[peer.key.name] - 1,
            config=self.terms.config,
            env_signature=self.terms.env_signature,
            schema=self.terms.schema if actor else (),
            credits=self.window if actor else 0,
            version=self.version,
            heartbeat_seconds=self.terms.heartbeat_seconds,
        )

    # --- experience ---

    def _experience(self, peer: Peer, message: Experience) -> list[e.Instruction]:
        if message.seq < peer.expected:
            self.messages_dropped[DropReason.DUPLICATE] += 1
            self._credit_due.setdefault(peer.key, [])  # its acknowledgement may have been lost
            return []
        out = self._skipped(peer, message.seq, message.shipped - message.env_steps, DropReason.GAP)
        peer.expected = message.seq + 1
        peer.account.received += message.env_steps
        self._reported(peer, 0, ())
        try:
            self._admissible(message)
        except PeerError as error:
            return out + self._refused(peer, message, error)
        peer.waiting[message.seq] = message.env_steps
        self.ledger.queued += message.env_steps
        return [*out, e.Admit(peer=peer.key, experience=message)]

    def _admissible(self, message: Experience) -> None:
        if self.draining:
            raise PeerError(DropReason.RUN_ENDED, "the run is ending")
        if message.version > self.version:
            wanted = f"at most {self.version}"
            raise PeerError(DropReason.VERSION, "policy version that was never published", found=message.version, wanted=wanted)
        check_schema(message.arrays, self.terms.schema)
        check_finite(message.arrays)
        self._check(message)

    def _refused(self, peer: Peer, message: Experience, error: PeerError) -> list[e.Instruction]:
        self.ledger.drop(error.reason, message.env_steps)
        self.messages_dropped[error.reason] += 1
        acked = peer.acked
        peer.refused = {seq: steps for seq, steps in peer.refused.items() if seq >= acked} | {message.seq: message.env_steps}
        reject = Reject(seq=message.seq, reason=error.reason, detail=str(error))
        self._credit_due.setdefault(peer.key, []).append(reject)
        fields = {"peer": peer.key.name, "seq": message.seq, "reason": str(error.reason), "detail": str(error)}
        return [e.Note(event="experience_refused", fields=fields, warning=True)]

    def _skipped(self, peer: Peer, seq: Sequence, shipped: EnvSteps, reason: DropReason) -> list[e.Instruction]:
        """Account for the messages before `seq` that never came; `shipped` counts the env steps of all before `seq`."""
        if seq <= peer.expected:
            return []
        messages = seq - peer.expected - sum(peer.expected <= refused < seq for refused in peer.refused)
        env_steps = max(0, shipped - peer.account.received)
        peer.expected = seq
        peer.account.received += env_steps
        self._reported(peer, 0, ())
        self.ledger.drop(reason, env_steps)
        self.sequence_gaps += messages
        fields = {"peer": peer.key.name, "messages": messages, "env_steps": env_steps, "reason": str(reason)}
        return [e.Note(event="experience_lost", fields=fields, warning=True)] if messages else []

    def _reported(self, peer: Peer, produced: EnvSteps, dropped: tuple[Dropped, ...]) -> None:
        """Take over a peer's own counters. They only grow, and never claim less than what has arrived."""
        account, known = peer.account, {str(reason) for reason in DropReason}
        for drop in dropped:
            reason = drop.reason if drop.reason in known else DropReason.UNFINISHED
            news = max(0, drop.env_steps - account.dropped_by_peer.get(reason, 0))
            account.dropped_by_peer[reason] = account.dropped_by_peer.get(reason, 0) + news
            self.ledger.drop(reason, news)
        news = max(0, max(produced, account.received + sum(account.dropped_by_peer.values())) - account.produced)
        account.produced += news
        self.ledger.produced += news

    def _taken(self, items: tuple[tuple[PeerKey, Sequence], ...]) -> list[e.Instruction]:
        for key, seq in items:
            peer = self._peers[key]
            peer.taken[seq] = peer.waiting.pop(seq)
            self._credit_due.setdefault(key, [])
        return []

    def _settled(self, items: tuple[tuple[PeerKey, Sequence], ...], reason: str | None) -> list[e.Instruction]:
        for key, seq in items:
            env_steps = self._peers[key].taken.pop(seq)
            self.ledger.queued -= env_steps
            if reason is None:
                self.ledger.trained += env_steps
            else:
                self.ledger.drop(reason, env_steps)
                self.messages_dropped[reason] += 1
        return []

    # --- bad peers ---

    def _stranger(self, route: Route, message: Message) -> list[e.Instruction]:
        self.messages_dropped[DropReason.STRANGER] += 1
        if isinstance(message, Goodbye):
            return []
        return _refuse(route, RefusalCode.STRANGER, f"{message.tag} before a hello that this learner knows", retry=True)

    def _undecodable(self, event: e.Undecodable) -> list[e.Instruction]:
        self.messages_dropped[DropReason.DECODE] += 1
        code = RefusalCode.PROTOCOL if event.protocol else RefusalCode.DECODE
        return _refuse(event.route, code, event.detail, retry=not event.protocol)

    # --- coming, going, credits ---

    def _tick(self, now: Seconds) -> list[e.Instruction]:
        out: list[e.Instruction] = []
        for peer in list(self._peers.values()):
            silent = now - peer.heard_at
            if peer.gone:
                if self._current[peer.key.name] != peer.key and not peer.waiting and not peer.taken:
                    del self._peers[peer.key]
            elif peer.route is None and silent > self.terms.forget_seconds:
                self._close(peer)
                out.append(
                    e.Note(
                        event="peer_forgotten", fields={"peer": peer.key.name, "silent_seconds": round(silent, 1)}, warning=True
                    )
                )
            elif peer.route is not None and silent > self.terms.silence_seconds:
                self._away(peer)
                out.append(
                    e.Note(event="peer_silent", fields={"peer": peer.key.name, "silent_seconds": round(silent, 1)}, warning=True)
                )
            elif peer.route is not None:
                out += self._answer(peer)
                if now - peer.spoke_at >= self.terms.heartbeat_seconds:
                    self._credit_due.setdefault(peer.key, [])
        return out

    def _unsent(self, route: Route, message: Message) -> list[e.Instruction]:
        peer = self._routes.get(route)
        if peer is not None and isinstance(message, Snapshot):
            peer.wanted_after = message.version - 1  # the next Tick tries again, with the newest
        return []

    def _away(self, peer: Peer) -> None:
        if peer.route is not None:
            del self._routes[peer.route]
            peer.route = None
            self._owe_credit_to_all()

    def _close(self, peer: Peer) -> None:
        """Close the account: what is still in flight will never be accepted."""
        self._away(peer)
        peer.gone = True
        self.ledger.drop(DropReason.PEER_LOST, peer.account.in_flight)
        peer.account.received += peer.account.in_flight

    def _owe_credit_to_all(self) -> None:
        """The window depends on how many actors there are."""
        for peer in self._routes.values():
            self._credit_due.setdefault(peer.key, [])

    def _answer(self, peer: Peer) -> list[e.Instruction]:
        """Serve an open SnapshotWanted where there is another policy. After a learner's rollback that is an older number."""
        if self.snapshot is None or peer.route is None or peer.wanted_after is None or self.version == peer.wanted_after:
            return []
        peer.wanted_after = None
        return [e.Send(route=peer.route, message=self.snapshot)]

    def _credits(self, now: Seconds) -> list[e.Instruction]:
        due, self._credit_due = self._credit_due, {}
        out: list[e.Instruction] = []
        for key, rejects in due.items():
            peer = self._peers.get(key)
            if peer is None or peer.route is None:
                continue  # it will learn from the acknowledgement after its next greeting
            peer.spoke_at = now
            window = self.window if peer.role == "actor" else 0
            credit = Credit(acked=peer.acked, credits=window, version=self.version, rejects=tuple(rejects))
            out.append(e.Send(route=peer.route, message=credit))
        return out


def _refuse(route: Route, code: RefusalCode, reason: str, *, retry: bool) -> list[e.Instruction]:
    note = e.Note(event="peer_refused", fields={"code": str(code), "reason": reason}, warning=True)
    return [e.Send(route=route, message=Refusal(code=code, reason=reason, retry=retry)), note]
