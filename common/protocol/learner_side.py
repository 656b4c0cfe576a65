"""The protocol on the learner's side: greeting, connections, credits, snapshots and the end of a run.

`Admission` decides which experience enters the queue, `Accounting` owns the ledger, `Greeting` checks a Hello, `WorkerRegistry`
has the workers by name, `SavedSession` saves and restores them. A worker's free credits shrink when it sends a message and grow
when one leaves the queue. Experience beyond the window is refused, so that the queue stays bounded whatever the actors send.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import assert_never

from common.errors import DropReason
from common.protocol import events as e
from common.protocol.accounting import Accounting
from common.protocol.admission import Admission
from common.protocol.events import RefusalCode, Route, WorkerKey, sentence
from common.protocol.greeting import Greeting, away_event, refusal
from common.protocol.incarnation import EpisodeCheck, Worker, WorkerState
from common.protocol.ledger import Ledger
from common.protocol.lockstep_states import LockstepStates
from common.protocol.messages import (
    Credit,
    Drain,
    Envelope,
    Evaluation,
    ExperienceMessage,
    Goodbye,
    Hello,
    Message,
    Report,
    Snapshot,
    SnapshotWanted,
)
from common.protocol.saved_session import SavedSession
from common.protocol.session_config import SessionConfig
from common.protocol.worker_registry import WorkerRegistry
from common.units import Seconds, Sequence, Version

BAD_MESSAGES = 16  # of one worker in a row: then it is evicted, because the check of each one costs the learner's time
EVICTED_SECONDS: Seconds = 60.0
REJECTS = 64  # in one Credit; more only from a worker that sends without credits
HEARD_HEARTBEATS = 3  # missed by a worker before the learner sends it none


class LearnerSide:
    """State machine of the learner. Feed it events, perform its instructions; read `ledger` and the counts."""

    def __init__(
        self,
        config: SessionConfig,
        *,
        check: Callable[[ExperienceMessage], None] = lambda _: None,
        episodes: Callable[[], EpisodeCheck] = lambda: lambda message: message,
        resumed: bool = False,
    ) -> None:
        """`check` raises `ProtocolError` for experience that fits the schema and still cannot be trained on.

        `episodes` makes the check of one worker's episodes. `resumed`: workers may have met an earlier learner of the run,
        so that the counters of the first Hello of each incarnation have no limit.
        """
        self.config = config
        self.snapshot: Snapshot | None = None
        self._began_at: Version = -1  # the first version of this process: those before are in its checkpoint
        self._for_evaluators: deque[Version] = deque(maxlen=1024)  # sent to them by this process
        self.evictions = 0
        self._registry = WorkerRegistry(config)
        self._accounting = Accounting(self._registry, config, resumed=resumed)
        states = LockstepStates()
        self.saved = SavedSession(self._registry, self._accounting, states, config)
        self._admission = Admission(self._registry, self._accounting, states, config, check=check, episodes=episodes)
        self._greeting = Greeting(self._registry, self._accounting, states, config)
        self._drain: tuple[str, Seconds] | None = None  # why the run ends, and by when
        self._unanswered: dict[Route, Worker] = {}  # workers that a snapshot could not be sent to

    # --- reading ---

    @property
    def ledger(self) -> Ledger:
        """Return the books of the run."""
        return self._accounting.ledger

    @property
    def messages_dropped(self) -> Counter[str]:
        """Return the number of messages that were dropped, by reason."""
        return self._accounting.messages_dropped

    @property
    def reconnects(self) -> int:
        """Return the number of connections after the first of an incarnation; repeated Hellos do not count."""
        return self._greeting.reconnects

    def connected(self, role: str) -> int:
        """Return the number of connected workers of this role."""
        return self._registry.connected(role)

    @property
    def open_actors(self) -> frozenset[str]:
        """Return the names of the actors with an open account: those that are connected, or expected to return."""
        actors = (worker for worker in self._registry if worker.role == "actor")
        return frozenset(actor.key.name for actor in actors if actor.state is not WorkerState.CLOSED)

    @property
    def queue_capacity(self) -> int:
        """Return the most messages that all actors with open accounts have credits for; never less than the queue holds."""
        expected = max(1, len(self.open_actors))
        return max(expected * self.config.window(expected), self.waiting)

    @property
    def waiting(self) -> int:
        """Return the number of admitted messages whose credits have not returned."""
        return self._admission.waiting

    @property
    def version(self) -> Version:
        """Return the version of the newest published policy; -1 before the first."""
        return self.snapshot.version if self.snapshot else -1

    def check_ledger(self) -> None:
        """Raise `InternalError` unless produced = trained + queued + in flight + dropped, for the run and its actors alike."""
        self.ledger.check(self._accounting.in_flight)

    # --- events ---

    def handle(self, event: e.Event, now: Seconds) -> list[e.Instruction]:
        """Advance by one event at monotonic time `now` (seconds); returns what to do, in order."""
        out: list[e.Instruction] = []
        match event:
            case e.Received(route=route, envelope=envelope, public_key=public_key):
                out = self._received(route, envelope, public_key, now)
            case e.Undecodable():
                out = self._undecodable(event, now)
            case e.Taken(items=items):
                self._taken(items)
            case e.Completed(items=items, reason=reason):
                self._completed(items, reason)
            case e.Published(snapshot=snapshot):
                self._began_at = snapshot.version if self.snapshot is None else self._began_at
                self.snapshot = snapshot
                out = [send for worker in self._registry.routes.values() for send in self._answer(worker)]
            case e.Tick():
                out = self._tick(now)
            case e.Unsent(route=route, message=message):
                self._unsent(route, message)
            case e.DrainAsked(reason=reason, deadline_seconds=deadline_seconds):
                self._drain, self._admission.draining = (reason, now + deadline_seconds), True
                out = [send for worker in self._registry.routes.values() for send in self._drained(worker, now)]
            case e.Ended():
                self._close_all()
            case _:
                assert_never(event)
        return out + self._credits(now)

    def _received(self, route: Route, envelope: Envelope, public_key: str, now: Seconds) -> list[e.Instruction]:
        message = envelope.message
        if isinstance(message, Hello):
            draining = self._drain is not None
            out = self._greeting.hello(route, envelope, public_key, newest=self.snapshot, draining=draining, now=now)
            worker = self._registry.routes.get(route)
            return out + self._drained(worker, now) if worker else out
        worker = self._registry.routes.get(route)
        if worker is None:
            return self._unknown_sender(route, message)
        worker.heard_at = now
        match message:
            case ExperienceMessage():
                return self._checked(worker, self._admission.experience(worker, message, self.version, now), now)
            case SnapshotWanted(after=after):
                worker.wanted_after = after
                return self._answer(worker)
            case Report():
                return self._checked(worker, self._accounting.report(worker, message), now)
            case Evaluation() if worker.role == "evaluator":
                # A killed learner may have sent newer policies than the checkpoint has: this one makes others of those numbers.
                known = message.version <= self._began_at or message.version in self._for_evaluators
                return self._admission.evaluation(worker, message, known, now)
            case Goodbye(reason=reason):
                out = self._accounting.report(worker, message)
                self._accounting.close(worker)
                return [*out, e.LogEvent(event="worker_left", fields={"worker": worker.key.name, "reason": sentence(reason)})]
        self.messages_dropped[DropReason.DECODE] += 1
        return refusal(route, RefusalCode.ROLE, f"a learner takes no {message.tag} from an {worker.role}", retry=False)

    # --- experience ---

    def _checked(self, worker: Worker, out: list[e.Instruction], now: Seconds) -> list[e.Instruction]:
        """Return `out`, the result of a message; evict a worker that sends only bad ones: it may return after a while."""
        if worker.bad_messages < BAD_MESSAGES or worker.route is None:
            return out
        route = worker.route
        self._accounting.close(worker)
        self.evictions += 1
        worker.evicted_until = now + EVICTED_SECONDS
        fix = f"correct them, and greet again after {EVICTED_SECONDS:.0f} s"
        fact = f"{worker.bad_messages} messages were refused, and no experience between them was accepted; {fix}"
        fields = {"worker": worker.key.name, "messages": worker.bad_messages}
        worker.bad_messages = 0  # its next incarnation begins with them
        note = e.LogEvent(event="worker_evicted", fields=fields, warning=True)
        return [*out, note, *refusal(route, RefusalCode.EVICTED, fact, retry=True)]

    def _taken(self, items: tuple[tuple[WorkerKey, Sequence], ...]) -> None:
        for key, seq in items:
            worker = self._registry[key]
            self._admission.taken(worker, seq)
            if worker.state is WorkerState.CLOSED:
                self._registry.owe_credits()  # the next incarnation of its slot waits for this credit

    def _completed(self, items: tuple[tuple[WorkerKey, Sequence], ...], reason: str | None) -> None:
        for key, seq in items:
            self._admission.completed(self._registry[key], seq, reason)

    # --- senders of other messages ---

    def _unknown_sender(self, route: Route, message: Message) -> list[e.Instruction]:
        self.messages_dropped[DropReason.UNKNOWN_SENDER] += 1
        if isinstance(message, Goodbye):
            return []
        return refusal(route, RefusalCode.UNKNOWN_SENDER, f"{message.tag} before a Hello that this learner accepted", retry=True)

    def _undecodable(self, event: e.Undecodable, now: Seconds) -> list[e.Instruction]:
        self.messages_dropped[DropReason.DECODE] += 1
        code = RefusalCode.PROTOCOL if event.protocol else RefusalCode.DECODE
        answer = refusal(event.route, code, event.detail, retry=not event.protocol)
        worker = self._registry.routes.get(event.route)
        if worker is None:
            return answer
        worker.bad_messages += 1
        return self._checked(worker, [], now) or answer

    # --- time, drain, snapshots, credits ---

    def _tick(self, now: Seconds) -> list[e.Instruction]:
        self._registry.sweep()
        unanswered, self._unanswered = self._unanswered, {}
        out = [send for worker in unanswered.values() for send in self._answer(worker)]
        for worker in self._registry.take_due(now):
            out += self._turn(worker, now)
            if worker.state is not WorkerState.CLOSED:
                self._registry.next_turn(worker, self._next_turn_at(worker, now))
        return out

    def _turn(self, worker: Worker, now: Seconds) -> list[e.Instruction]:
        """Send a heartbeat, or record that a worker is silent or absent too long."""
        if worker.heard_at is None:
            worker.heard_at = now
        silent = worker.silent(now)
        if worker.state is not WorkerState.CONNECTED:
            if silent <= self.config.forget_seconds + worker.crossing:
                return []
            self._accounting.close(worker)
            return [away_event("worker_forgotten", worker, silent)]
        if silent > self.config.silence_seconds + worker.crossing:
            self._registry.disconnect(worker)
            return [away_event("worker_silent", worker, silent)]
        if now - worker.sent_at < self.config.heartbeat_seconds or not self._heard(worker, now):
            return []
        worker.sent_at = now
        self._registry.owe_credit(worker)
        return self._drained(worker, now)  # the first one may have been lost

    def _heard(self, worker: Worker, now: Seconds) -> bool:
        """Return whether a worker gets heartbeats: the learner's silence makes it reconnect from a half-dead connection."""
        limit = HEARD_HEARTBEATS * self.config.heartbeat_seconds + worker.crossing
        return worker.episodes is None or worker.silent(now) <= limit  # before its first experience it may build environments

    def _next_turn_at(self, worker: Worker, now: Seconds) -> Seconds:
        """Return when `_turn` may next have something to do: what a worker sends or gets until then only delays it."""
        heard_at = now - worker.silent(now)
        if worker.state is not WorkerState.CONNECTED:
            return heard_at + self.config.forget_seconds + worker.crossing
        return min(heard_at + self.config.silence_seconds + worker.crossing, worker.sent_at + self.config.heartbeat_seconds)

    def _drained(self, worker: Worker, now: Seconds) -> list[e.Instruction]:
        if self._drain is None or worker.route is None:
            return []
        reason, ends_at = self._drain
        return [e.Send(route=worker.route, message=Drain(reason=reason, deadline_seconds=max(0.0, ends_at - now)))]

    def _unsent(self, route: Route, message: Message) -> None:
        worker = self._registry.routes.get(route)
        if worker is not None and isinstance(message, Snapshot):
            worker.wanted_after = message.version - 1  # the next Tick tries again, with the newest
            self._unanswered[route] = worker
        if worker is not None and isinstance(message, Credit):
            worker.rejects = [*message.rejects, *worker.rejects]  # sent with the next Credit
            if worker.challenger is not None:
                self._registry.disconnect(worker)

    def _close_all(self) -> None:
        for worker in self._registry:
            self._accounting.close(worker)

    def _answer(self, worker: Worker) -> list[e.Instruction]:
        """Answer an open SnapshotWanted where there is another policy: after a learner's rollback it has an older version."""
        if self.snapshot is None or worker.route is None or worker.wanted_after is None or self.version == worker.wanted_after:
            return []
        worker.wanted_after = None
        if worker.role == "evaluator":
            worker.snapshot = self.snapshot
            self._for_evaluators.append(self.version)
        return [e.Send(route=worker.route, message=self.snapshot)]

    def _credits(self, now: Seconds) -> list[e.Instruction]:
        out: list[e.Instruction] = []
        for worker in self._registry.take_owed():
            assert worker.route is not None
            rejects, worker.rejects = tuple(worker.rejects[-REJECTS:]), []
            worker.sent_at = now
            credit = Credit(acked=worker.acked, credits=self._registry.window(worker), version=self.version, rejects=rejects)
            out.append(e.Send(route=worker.route, message=credit))
        return out
