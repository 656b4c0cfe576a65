"""The protocol as the learner sees it: one `Roster` of peers and one `Ledger` per run.

Admission: an experience message enters the queue only from a welcomed peer, in order, by the run's schema, finite,
and acted by a policy that was published. Whatever is refused is counted by reason, and its sender is told.
Credits: a peer's window shrinks when a message is sent and grows when one leaves the queue. What an actor sends beyond
the largest window is refused, so the queue stays bounded whatever the actors do. Every decision is in this file;
the questions at the door are in `admission`, names and places in `roster`, the sums in `ledger`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from common.errors import DropReason, InternalError, PeerError
from common.session import events as e
from common.session.actor_states import ActorStates, PlaceState
from common.session.admission import (
    Objection,
    check_evaluation,
    check_evicted,
    check_experience,
    check_identity,
    check_room,
    check_terms,
    name_in_use,
    refusal,
    sentence,
    welcome,
)
from common.session.events import PeerKey, RefusalCode, Route
from common.session.ledger import Ledger
from common.session.peer import EpisodeCheck, Peer, RunningEpisodes
from common.session.roster import Roster, Terms
from common.session.saved import check_saved
from common.units import EnvSteps, Seconds, Sequence, Version
from common.wire.messages import (
    ACTOR_STATE,
    Credit,
    Drain,
    Dropped,
    Envelope,
    Evaluation,
    Experience,
    Goodbye,
    Hello,
    Message,
    Reject,
    Report,
    Snapshot,
    SnapshotWanted,
)

CHALLENGE_SECONDS: Seconds = 0.25  # between two Credits that try the connection of one worker; a worker greets every 0.5 s
BAD_MESSAGES = 16  # of one worker in a row: then it is evicted, because the check of each one costs the learner's time
EVICTED_SECONDS: Seconds = 60.0
BAD = (DropReason.DECODE, DropReason.SCHEMA, DropReason.NON_FINITE, DropReason.OUT_OF_RANGE, DropReason.EPISODES)
REJECTS = 64  # in one Credit; more only from a peer that sends without credits


class LearnerSide:
    """State machine of the learner. Feed it events, perform its instructions; read `ledger` and the counts."""

    def __init__(
        self,
        terms: Terms,
        *,
        check: Callable[[Experience], None] = lambda _: None,
        episodes: Callable[[], EpisodeCheck] = lambda: lambda message: message,
    ) -> None:
        """`check` raises `PeerError` for experience that fits the schema and still cannot be trained on.

        `episodes` makes the check of one worker's episodes.
        """
        self.terms = terms
        self._check = check
        self._new_episodes = episodes
        self.ledger = Ledger()
        self.snapshot: Snapshot | None = None
        self.messages_dropped: Counter[str] = Counter()
        self.sequence_gaps = 0
        self.reconnects = 0
        self.evictions = 0
        self._roster = Roster(terms)
        self._actor_states = ActorStates()
        self._routes: dict[Route, Peer] = {}
        self._drain: tuple[str, Seconds] | None = None  # why the run ends, and by when

    # --- reading ---

    def connected(self, role: str) -> int:
        """Peers of this role that are welcome and were heard of lately."""
        return sum(peer.role == role for peer in self._routes.values())

    @property
    def window(self) -> int:
        """Credits of each actor that is here."""
        return self.terms.window(self.connected("actor"))

    @property
    def draining(self) -> bool:
        """Whether the run ends: nothing more is admitted."""
        return self._drain is not None

    @property
    def queue_capacity(self) -> int:
        """Most messages that the actors which are here, or expected back, have credits for; never less than the queue holds."""
        expected = max(1, sum(not peer.gone for peer in self._roster.holders("actor")))
        return max(expected * self.terms.window(expected), self.waiting)

    @property
    def waiting(self) -> int:
        """Admitted messages whose credits have not returned."""
        return sum(len(peer.waiting) for peer in self._roster)

    @property
    def version(self) -> Version:
        """Newest published policy; -1 before the first."""
        return self.snapshot.version if self.snapshot else -1

    def check_ledger(self) -> None:
        """Raise `InternalError` unless produced = trained + queued + in flight + dropped, for the run and its actors alike."""
        self.ledger.check(sum(peer.account.in_flight for peer in self._roster))

    # --- resuming ---

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed learner needs: the ledger of completed messages, the actors' progress, lockstep states.

        JSON values and arrays.
        """
        return {**self.accounts(), "actor_states": self._actor_states.state_dict()}

    def accounts(self) -> dict[str, Any]:
        """Return the ledger and the progress of each actor, in JSON values: the argument of `load_accounts`."""
        return {"ledger": self.ledger.as_dict(), "roster": self._roster.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint: its peers count as away until they greet; open messages of closed accounts are rolled back.

        Raises `ValueError` where `state` is no state of a session; then nothing has changed.
        """
        check_saved(state)
        self._roster.load_state_dict(state["roster"])
        self._actor_states.load_state_dict(state.get("actor_states", {}))
        self.ledger = Ledger.restored(state["ledger"], sum(peer.account.in_flight for peer in self._roster))

    def load_accounts(self, state: Mapping[str, Any]) -> None:
        """Take over the progress that a killed learner had made after the checkpoint that this learner continues from.

        Messages trained on since are rolled back, as each worker's Hello would do: such a Hello then changes nothing.
        """
        check_saved(state)
        later = Roster(self.terms)
        later.load_state_dict(state["roster"])
        for peer in [*self._roster]:
            if all(peer.key != other.key for other in later):
                self._close(peer)
                self._roster.forget(peer)
        for reached in later:
            peer = self._roster.adopt(reached)
            settled = reached.account.received - sum(reached.ahead.values())
            self._skipped(peer, reached.expected, settled, DropReason.ROLLED_BACK)
            drops = reached.account.dropped_by_peer.items()
            dropped = tuple(Dropped(reason=reason, env_steps=env_steps) for reason, env_steps in drops)
            self.ledger.report(peer.account, reached.account.produced, dropped)
            if reached.gone and not peer.gone:
                self._close(peer)
        self._roster.raise_numbers(later)

    # --- events ---

    def handle(self, event: e.Event, now: Seconds) -> list[e.Instruction]:
        """Advance by one event at monotonic time `now` (seconds); returns what to do, in order."""
        match event:
            case e.Received(route=route, envelope=envelope, public_key=public_key):
                out = self._received(route, envelope, public_key, now)
            case e.Undecodable():
                out = self._undecodable(event, now)
            case e.Taken(items=items):
                out = self._taken(items)
            case e.Settled(items=items, reason=reason):
                out = self._settled(items, reason)
            case e.Published(snapshot=snapshot):
                out = self._published(snapshot)
            case e.Tick():
                out = self._tick(now)
            case e.Unsent(route=route, message=message):
                out = self._unsent(route, message)
            case e.DrainAsked(reason=reason, deadline_seconds=deadline_seconds):
                self._drain = reason, now + deadline_seconds
                out = [send for peer in self._routes.values() for send in self._drained(peer, now)]
            case e.Ended():
                out = self._ended()
            case _:
                raise InternalError("an event of a peer's side reached the learner's session", found=type(event).__name__)
        return out + self._credits(now)

    def _received(self, route: Route, envelope: Envelope, public_key: str, now: Seconds) -> list[e.Instruction]:
        message = envelope.message
        if isinstance(message, Hello):
            return self._hello(route, envelope.run, message, public_key, now)
        peer = self._routes.get(route)
        if peer is None:
            return self._stranger(route, message)
        peer.heard_at = now
        match message:
            case Experience():
                return self._experience(peer, message, now)
            case SnapshotWanted(after=after):
                peer.wanted_after = after
                return self._answer(peer)
            case Report(produced=produced, dropped=dropped):
                self.ledger.report(peer.account, produced, dropped)
                return []
            case Evaluation() if peer.role == "evaluator":
                return self._evaluation(peer, message, now)
            case Goodbye(reason=reason, produced=produced, dropped=dropped):
                self.ledger.report(peer.account, produced, dropped)
                self._close(peer)
                return [e.Note(event="peer_left", fields={"peer": peer.key.name, "reason": sentence(reason)})]
        self.messages_dropped[DropReason.DECODE] += 1
        return refusal(route, RefusalCode.ROLE, f"a learner takes no {message.tag} from an {peer.role}", retry=False)

    # --- greeting ---

    def _hello(self, route: Route, run: str, hello: Hello, public_key: str, now: Seconds) -> list[e.Instruction]:
        known = self._roster.find(hello)
        objection = check_terms(hello, run, self.terms)
        if objection is None and known is not None and self._holds(known, route, now):
            objection = self._challenged(known, route, hello, now)
            if objection is None:
                return []
        if objection := objection or check_evicted(hello, known, now) or self._objection(hello, public_key, known):
            self.messages_dropped[DropReason.STRANGER] += 1
            if known is not None and known.gone and known.key.incarnation == hello.incarnation:
                # It went on while it was silent, and will count from 0: those env steps are in no other account.
                self.ledger.report(known.account, hello.produced)
                self._close(known)
            incarnation = self._roster.name_incarnation(hello.peer) if objection.new_incarnation else -1
            return refusal(route, objection.code, objection.reason, retry=objection.retry, incarnation=incarnation)
        return self._greeted(route, hello, public_key, known, now)

    def _holds(self, peer: Peer, route: Route, now: Seconds) -> bool:
        """Return whether a worker is connected by its name on another connection than `route`, and was heard on it lately."""
        return peer.route not in (None, route) and peer.silent(now) <= self.terms.silence_seconds

    def _challenged(self, holder: Peer, route: Route, hello: Hello, now: Seconds) -> Objection | None:
        """Return why another connection does not get the holder's name; None: greet again while the holder's one is tested.

        The learner sends the holder a Credit: where it cannot be sent, the connection is closed, and the next Hello succeeds.
        """
        if holder.challenger == route:  # its last Hello had that Credit sent, and the connection stood
            holder.challenger = None
            return name_in_use(hello)
        if now - holder.challenged_at >= CHALLENGE_SECONDS:  # a flood of Hellos must not fill the holder's buffers
            holder.challenger, holder.challenged_at, holder.credit_due = route, now, True
        return None

    def _greeted(self, route: Route, hello: Hello, public_key: str, known: Peer | None, now: Seconds) -> list[e.Instruction]:
        notes: list[e.Instruction] = []
        if known is not None and known.key.incarnation == hello.incarnation:
            peer = known
        else:
            notes = self._make_place(hello, known, now)
            peer = self._roster.join(PeerKey(name=hello.peer, incarnation=hello.incarnation), hello.role)
        if self.terms.lockstep and peer.role == "actor" and hello.welcomed and not peer.greeted:
            return [*notes, *self._rolled_back(route, peer, hello)]
        again, peer.greeted = peer.greeted, True
        peer.public_key, peer.challenger = public_key, None
        self.reconnects += again
        if peer.route != route:  # on the same connection this is the Hello said twice, and what it wanted still holds
            peer.wanted_after = None
        self._away(peer)
        if route in self._routes:
            self._away(self._routes[route])  # the process behind this connection goes by another name now
        self._routes[route] = peer
        peer.route, peer.heard_at = route, now
        # What an earlier learner settled after its last checkpoint was trained into weights that are gone.
        out = self._skipped(peer, hello.resend_from, hello.settled, DropReason.GAP if again else DropReason.ROLLED_BACK)
        self.ledger.report(peer.account, hello.produced)
        self._owe_credit_to_all()
        fields = {"peer": peer.key.name, "role": peer.role, "index": peer.index, "again": again}
        note = e.Note(event="peer_welcome", fields=fields | {"software": sentence(hello.software)})
        place = self._actor_states.newest(peer.index) if self.terms.lockstep and peer.role == "actor" else None
        state = place.actor if place else None
        peer.continues = peer.continues if again else state is None or state.size > 0
        answer = welcome(peer, self.terms, window=self._window(peer), version=self.version, state=state)
        return [e.Send(route=route, message=answer), *notes, note, *out, *self._drained(peer, now)]

    def _rolled_back(self, route: Route, peer: Peer, hello: Hello) -> list[e.Instruction]:
        """Refuse, in lockstep, an incarnation of another learner process, whose experience this learner cannot use."""
        self.ledger.report(peer.account, hello.produced)
        self._close(peer, DropReason.ROLLED_BACK)
        sentence = "in lockstep an actor goes on from the state of a resumed learner; greet as a new incarnation"
        incarnation = self._roster.name_incarnation(hello.peer)
        return refusal(route, RefusalCode.FORGOTTEN, sentence, retry=True, incarnation=incarnation)

    def _objection(self, hello: Hello, public_key: str, known: Peer | None) -> Objection | None:
        others = sum(peer.role == hello.role and peer.key.name != hello.peer for peer in self._routes.values())
        roster = self._roster
        return check_identity(hello, public_key, known, forgotten=roster.forgotten, named=roster.named) or check_room(
            hello, known, others=others, terms=self.terms, draining=self.draining
        )

    def _make_place(self, hello: Hello, older: Peer | None, now: Seconds) -> list[e.Instruction]:
        """Close the account of the older incarnation; for a name that holds no place of this role, see that there is one."""
        if older is not None:
            self._close(older)
            if older.role == hello.role:
                return []
        out: list[e.Instruction] = []
        for peer in self._roster.crowded_out(hello.role, now):
            if not peer.gone:
                out.append(_silent_note("peer_forgotten", peer, peer.silent(now)))
                self._close(peer)
            self._roster.forget(peer)
        return out

    # --- experience ---

    def _experience(self, peer: Peer, message: Experience, now: Seconds) -> list[e.Instruction]:
        if message.seq < peer.expected or message.seq in peer.ahead:
            self.messages_dropped[DropReason.DUPLICATE] += 1
            peer.credit_due = True  # its acknowledgement may have been lost, and what was said of it
            if message.seq >= peer.acked and message.seq not in peer.waiting:
                peer.rejects.append(Reject(seq=message.seq, reason=DropReason.DUPLICATE, detail="met its end when it first came"))
            return []
        out = self._skipped(peer, message.seq, message.shipped - message.env_steps, DropReason.GAP)
        peer.expect(message.seq + 1)
        self.ledger.receive(peer.account, message.env_steps)
        try:
            message = self._admissible(peer, message)
        except PeerError as error:
            return out + self._refused(peer, message, error) + self._after_bad_message(peer, error.reason, now)
        peer.bad_messages = 0
        peer.waiting[message.seq] = message.env_steps
        self.ledger.queued += message.env_steps
        if ACTOR_STATE in message.arrays:
            out += self._state_admitted(peer, message)
        return [*out, e.Admit(peer=peer.key, index=peer.index, continues=peer.continues, experience=message)]

    def _state_admitted(self, peer: Peer, message: Experience) -> list[e.Instruction]:
        """Keep, in lockstep, the state from which the place continues. The first empty state is noted."""
        before, state = self._actor_states.newest(peer.index), message.arrays[ACTOR_STATE]
        running = peer.episodes if isinstance(peer.episodes, RunningEpisodes) else None
        place = PlaceState(state, running.state_dict() if running else {})
        self._actor_states.admitted(peer.index, peer.key, message.seq, place)
        if state.size:
            return []
        if before is None:
            fields = {"peer": peer.key.name, "consequence": "a restart of it or of the learner breaks lockstep; its log says why"}
            return [e.Note(event="actor_state_unreadable", fields=fields, warning=True)]
        peer.continues = peer.continues and not before.actor.size  # it could not go on from the state that it was given
        return []

    def _admissible(self, peer: Peer, message: Experience) -> Experience:
        """Return the message as it enters the queue; raise `PeerError` where it must not enter."""
        if self.draining:
            raise PeerError(DropReason.RUN_ENDED, "the run is ending")
        room = self.terms.window(actors=1) if peer.role == "actor" else 0  # the largest window there can be
        if len(peer.waiting) >= room:
            raise PeerError(DropReason.UNCREDITED, "messages in the queue", found=len(peer.waiting), wanted=f"less than {room}")
        check_experience(message, schema=self.terms.schema, newest=self.version)
        self._check(message)
        if peer.episodes is None:
            peer.episodes = self._new_episodes()
            self._go_on_with_episodes(peer, message)
        return peer.episodes(message)

    def _go_on_with_episodes(self, peer: Peer, message: Experience) -> None:
        """Continue, in lockstep, the episodes of the place at the first message of an incarnation."""
        place, state = self._actor_states.newest(peer.index), message.arrays.get(ACTOR_STATE)
        if place and place.actor.size and state is not None and state.size and isinstance(peer.episodes, RunningEpisodes):
            peer.episodes.go_on(place.episodes, message.seq)

    def _refused(self, peer: Peer, message: Experience, error: PeerError) -> list[e.Instruction]:
        self.ledger.drop(error.reason, message.env_steps)
        peer.settle(message.seq, message.env_steps)
        return self._rejected("experience_refused", peer, message.seq, error)

    def _after_bad_message(self, peer: Peer, reason: DropReason, now: Seconds) -> list[e.Instruction]:
        """Evict a worker that sends only bad messages: its account is closed, and it may come back after a while."""
        peer.bad_messages += reason in BAD
        if peer.bad_messages < BAD_MESSAGES or peer.route is None:
            return []
        route = peer.route
        self._close(peer)
        self.evictions += 1
        peer.evicted_until = now + EVICTED_SECONDS
        again = f"mend it, and come back in {EVICTED_SECONDS:.0f} s"
        fact = f"{peer.bad_messages} messages in a row were refused, the last as {reason}; {again}"
        note = e.Note(event="worker_evicted", fields={"peer": peer.key.name, "messages": peer.bad_messages}, warning=True)
        return [note, *refusal(route, RefusalCode.EVICTED, fact, retry=True)]

    def _evaluation(self, peer: Peer, message: Evaluation, now: Seconds) -> list[e.Instruction]:
        if now - peer.evaluations_since >= 1.0:
            peer.evaluations_since, peer.evaluations = now, 0
        peer.evaluations += 1
        try:
            check_evaluation(message, newest=self.version, number=peer.evaluations)
        except PeerError as error:
            return self._rejected("evaluation_refused", peer, 0, error)
        return [e.Evaluated(message=message)]

    def _rejected(self, event: str, peer: Peer, seq: Sequence, error: PeerError) -> list[e.Instruction]:
        reject = Reject(seq=seq, reason=error.reason, detail=sentence(str(error)))
        self.messages_dropped[error.reason] += 1
        peer.rejects.append(reject)
        peer.credit_due = True
        fields = {"peer": peer.key.name, "seq": seq, "reason": str(error.reason), "detail": reject.detail}
        return [e.Note(event=event, fields=fields, warning=True)]

    def _skipped(self, peer: Peer, seq: Sequence, shipped: EnvSteps, reason: DropReason) -> list[e.Instruction]:
        """Account for the messages before `seq` that never came; `shipped` counts the env steps of all before `seq`."""
        messages, env_steps = peer.missing(seq, shipped)
        if not messages and not env_steps:
            return []
        peer.skip(seq, env_steps)
        self.ledger.receive(peer.account, env_steps)
        self.ledger.drop(reason, env_steps)
        self.messages_dropped[reason] += messages
        self.sequence_gaps += messages if reason == DropReason.GAP else 0
        fields = {"peer": peer.key.name, "messages": messages, "env_steps": env_steps, "reason": str(reason)}
        return [e.Note(event="experience_lost", fields=fields, warning=True)]

    def _taken(self, items: tuple[tuple[PeerKey, Sequence], ...]) -> list[e.Instruction]:
        for key, seq in items:
            peer = self._roster[key]
            peer.taken[seq] = peer.waiting.pop(seq)
            peer.credit_due = True
            if peer.gone:
                self._owe_credit_to_all()  # in lockstep the incarnation that took its place has waited for this credit
        return []

    def _settled(self, items: tuple[tuple[PeerKey, Sequence], ...], reason: str | None) -> list[e.Instruction]:
        for key, seq in items:
            peer = self._roster[key]
            env_steps = peer.taken.pop(seq)
            peer.settle(seq, env_steps)
            self._actor_states.settled(key, seq, trained=reason is None)
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
        return refusal(route, RefusalCode.STRANGER, f"{message.tag} before a hello that this learner knows", retry=True)

    def _undecodable(self, event: e.Undecodable, now: Seconds) -> list[e.Instruction]:
        self.messages_dropped[DropReason.DECODE] += 1
        code = RefusalCode.PROTOCOL if event.protocol else RefusalCode.DECODE
        peer = self._routes.get(event.route)
        evicted = self._after_bad_message(peer, DropReason.DECODE, now) if peer else []
        return evicted or refusal(event.route, code, event.detail, retry=not event.protocol)

    # --- coming, going, credits ---

    def _tick(self, now: Seconds) -> list[e.Instruction]:
        out: list[e.Instruction] = []
        self._roster.sweep()
        for peer in self._roster:
            silent = peer.silent(now)
            if peer.gone:
                continue
            if peer.route is None and silent > self.terms.forget_seconds:
                self._close(peer)
                out.append(_silent_note("peer_forgotten", peer, silent))
            elif peer.route is not None and silent > self.terms.silence_seconds:
                self._away(peer)
                out.append(_silent_note("peer_silent", peer, silent))
            elif peer.route is not None:
                out += self._answer(peer)
                if now - peer.spoke_at >= self.terms.heartbeat_seconds:
                    out += self._drained(peer, now)  # the first word of it may not have got through
                    peer.credit_due = True
        return out

    def _drained(self, peer: Peer, now: Seconds) -> list[e.Instruction]:
        """Tell a peer that the run ends, if it does."""
        if self._drain is None or peer.route is None:
            return []
        reason, ends_at = self._drain
        return [e.Send(route=peer.route, message=Drain(reason=reason, deadline_seconds=max(0.0, ends_at - now)))]

    def _unsent(self, route: Route, message: Message) -> list[e.Instruction]:
        peer = self._routes.get(route)
        if peer is not None and isinstance(message, Snapshot):
            peer.wanted_after = message.version - 1  # the next Tick tries again, with the newest
        if peer is not None and isinstance(message, Credit):
            peer.rejects = [*message.rejects, *peer.rejects]  # told with the next Credit
            if peer.challenger is not None:
                self._away(peer)
        return []

    def _away(self, peer: Peer) -> None:
        if peer.route is not None:
            del self._routes[peer.route]
            peer.route = None
            self._owe_credit_to_all()

    def _close(self, peer: Peer, reason: DropReason = DropReason.PEER_LOST) -> None:
        """Close the account: what is still in flight will never be accepted."""
        self._away(peer)
        peer.gone = True
        lost = peer.account.in_flight
        self.ledger.receive(peer.account, lost)
        self.ledger.drop(reason, lost)

    def _ended(self) -> list[e.Instruction]:
        for peer in self._roster:
            self._close(peer)
        return []

    def _window(self, peer: Peer) -> int:
        """Return the credits of this peer. In lockstep waiting messages of earlier incarnations hold credits of their place."""
        if peer.role != "actor":
            return 0
        if not self.terms.lockstep:
            return self.window
        others = [other for other in self._roster if other is not peer and (other.role, other.index) == ("actor", peer.index)]
        return max(0, self.window - sum(len(other.waiting) for other in others))

    def _owe_credit_to_all(self) -> None:
        """The window depends on how many actors there are."""
        for peer in self._routes.values():
            peer.credit_due = True

    def _published(self, snapshot: Snapshot) -> list[e.Instruction]:
        self.snapshot = snapshot
        return [send for peer in self._routes.values() for send in self._answer(peer)]

    def _answer(self, peer: Peer) -> list[e.Instruction]:
        """Serve an open SnapshotWanted where there is another policy. After a learner's rollback that is an older number."""
        if self.snapshot is None or peer.route is None or peer.wanted_after is None or self.version == peer.wanted_after:
            return []
        peer.wanted_after = None
        return [e.Send(route=peer.route, message=self.snapshot)]

    def _credits(self, now: Seconds) -> list[e.Instruction]:
        out: list[e.Instruction] = []
        for route, peer in self._routes.items():  # who is away learns from the acknowledgement after its next greeting
            if peer.credit_due:
                rejects, peer.rejects = tuple(peer.rejects[-REJECTS:]), []
                peer.credit_due, peer.spoke_at = False, now
                credit = Credit(acked=peer.acked, credits=self._window(peer), version=self.version, rejects=rejects)
                out.append(e.Send(route=route, message=credit))
        return out


def _silent_note(event: str, peer: Peer, silent: Seconds) -> e.Note:
    return e.Note(event=event, fields={"peer": peer.key.name, "silent_seconds": round(silent, 1)}, warning=True)
