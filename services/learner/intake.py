"""The learner's I/O thread: receives, decodes, lets the session decide, and keeps the bounded queue.

The train loop meets it in a few calls: `take` (in lockstep `take_round`), `settle`, `publish`, and at the end `drain` and
`finish`. Everything the session owns is touched by the I/O thread alone; the train loop posts events, and reads `figures`, a
value made anew each tick.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from common.errors import DropReason, InternalError, PeerError, ProtocolVersionError, ResourceError
from common.runtime.memory import MemoryGuard
from common.session import events as e
from common.session.events import PeerKey
from common.session.learner_side import LearnerSide
from common.transport.api import Frame, LearnerTransport, Route
from common.units import MIB, EnvSteps, Seconds
from common.wire import codec
from common.wire.messages import Envelope, Evaluation, Experience, Snapshot
from services.learner.connection_limit import IGNORED_SECONDS, MESSAGES, ConnectionLimit

TICK_SECONDS: Seconds = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One admitted experience message in the queue."""

    peer: PeerKey
    index: int = 0  # the sender's place among the actors
    continues: bool = True  # in lockstep: whether the sender began bit for bit where its place had stopped
    experience: Experience
    arrived_at: Seconds = 0.0  # on the clock of the intake

    @property
    def number(self) -> tuple[PeerKey, int]:
        """What the session knows it by."""
        return self.peer, self.experience.seq


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What the I/O thread knows, at one moment: for metrics, status and summary."""

    ledger: dict[str, Any]
    queue_depth: int = 0
    queue_env_steps: EnvSteps = 0
    queue_capacity: int = 0
    queue_seconds: Seconds = 0.0
    actors: int = 0
    evaluators: int = 0
    messages_dropped: Counter[str] = field(default_factory=Counter)
    sequence_gaps: int = 0
    reconnects: int = 0
    evictions: int = 0
    handshakes_failed: Counter[str] = field(default_factory=Counter)
    sockets_reopened: int = 0
    messages_ignored: int = 0
    received: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    bytes_received: int = 0
    bytes_sent: int = 0


class Intake:
    """Owner of the transport, the session and the queue. `start` before use, `close` at the end."""

    def __init__(
        self,
        *,
        transport: LearnerTransport,
        session: LearnerSide,
        clock: Callable[[], Seconds],
        note: Callable[[e.Note], None],
        memory: MemoryGuard | None = None,
    ) -> None:
        """`memory`: the guard of the process's memory; None creates one."""
        self._transport = transport
        self._memory = memory or MemoryGuard()
        self._sockets_reopened = 0
        self._limit = ConnectionLimit()
        self._admitted = self._messages_ignored = 0
        self._session = session
        self._run = session.terms.run
        self._lockstep = session.terms.lockstep
        self._clock = clock
        self._note = note
        self._queue: deque[Item] = deque()
        self._evaluations: deque[Evaluation] = deque()
        self._changed = threading.Condition()
        self._posts: deque[e.Event | tuple[Callable[[], Any], Future[Any]]] = deque()
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._received: Counter[str] = Counter()
        self._sent: Counter[str] = Counter()
        self._bytes = [0, 0]
        self._queue_seconds: Seconds = 0.0
        self._unbalanced = False
        self.figures = Figures(ledger=session.ledger.as_dict())
        self._thread = threading.Thread(target=self._run_thread, name="intake", daemon=True)

    # --- for the train loop, from its own thread ---

    def start(self) -> None:
        """Begin to receive."""
        self._thread.start()

    def take(self, count: int, timeout: Seconds, *, patience: Seconds = math.inf) -> list[Item]:
        """Exactly `count` messages in order of arrival, whose credits return now; none if they do not come in time.

        Fewer, as many as there are, once the first of them has waited for `patience` seconds.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._enough(count, patience) or self._failure, timeout)
            self._raise_failure()
            if not self._enough(count, patience):
                return []
            items = [self._queue.popleft() for _ in range(min(count, len(self._queue)))]
        self._post(e.Taken(items=tuple(item.number for item in items)))
        return items

    def take_round(self, choose: Callable[[Iterable[Item]], list[Item]], timeout: Seconds) -> list[Item]:
        """In lockstep: what `choose` makes of the queue, none if that is nothing in time. Credits return when it is settled."""
        with self._changed:
            self._changed.wait_for(lambda: choose(self._queue) or self._failure, timeout)
            self._raise_failure()
            items = choose(self._queue)
            taken = {item.number for item in items}
            self._queue = deque(item for item in self._queue if item.number not in taken)
        return items

    def _enough(self, count: int, patience: Seconds) -> bool:
        queue = self._queue
        return len(queue) >= count or (len(queue) > 0 and self._clock() - queue[0].arrived_at >= patience)

    def settle(self, items: Sequence[Item], reason: str | None = None) -> None:
        """Tell what became of taken messages: trained on, or dropped for `reason`."""
        numbers = tuple(item.number for item in items)
        if numbers and self._lockstep:
            self._post(e.Taken(items=numbers))  # only now: whoever gets a credit before the next policy acts by the last one
        if numbers:
            self._post(e.Settled(items=numbers, reason=reason))

    def publish(self, snapshot: Snapshot) -> None:
        """Serve this policy from now on to whoever wants a newer one."""
        self._post(e.Published(snapshot=snapshot))

    def drain(self, reason: str, deadline_seconds: Seconds) -> None:
        """Tell all peers that the run ends; what still arrives is counted as dropped."""
        self._post(e.DrainAsked(reason=reason, deadline_seconds=deadline_seconds))

    def wait_for_goodbyes(self, timeout: Seconds, *, alive: Callable[[], None], hurry: Callable[[], bool]) -> bool:
        """Wait until every peer has left; False when `timeout` seconds were not enough, or there was reason to `hurry`."""
        deadline = self._clock() + timeout
        while self.figures.actors + self.figures.evaluators and self._clock() < deadline and not hurry():
            alive()
            with self._changed:
                self._changed.wait(TICK_SECONDS)
                self._raise_failure()
        return not self.figures.actors + self.figures.evaluators

    def take_evaluations(self) -> list[Evaluation]:
        """The evaluations that came since the last call."""
        with self._changed:
            evaluations = list(self._evaluations)
            self._evaluations.clear()
        return evaluations

    def session_state(self, timeout: Seconds = 10.0) -> dict[str, Any]:
        """State of the session for a checkpoint, after all that was posted before."""
        state: dict[str, Any] = self._ask(self._session.state_dict, timeout)
        return state

    def accounts(self, timeout: Seconds = 10.0) -> dict[str, Any]:
        """Return the progress of each actor, in JSON values, after all work that was posted before."""
        accounts: dict[str, Any] = self._ask(self._session.accounts, timeout)
        return accounts

    def finish(self, timeout: Seconds = 10.0) -> None:
        """Drop and count what is queued, close every account; `figures` are final afterwards."""
        with self._changed:
            numbers = tuple(self._queue.popleft().number for _ in range(len(self._queue)))
        for event in (e.Taken(items=numbers), e.Settled(items=numbers, reason=DropReason.RUN_ENDED), e.Ended()):
            self._post(event)
        self.measure(timeout)

    def measure(self, timeout: Seconds = 10.0) -> None:
        """Bring `figures` up to all that was posted before."""
        self._ask(self._measure, timeout)

    def check(self) -> None:
        """Raise what killed the I/O thread, if anything did."""
        with self._changed:
            self._raise_failure()

    def close(self) -> None:
        """End the thread and close the transport."""
        self._stopping.set()
        self._transport.wake()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        self._transport.close()

    def _post(self, post: e.Event | tuple[Callable[[], Any], Future[Any]]) -> None:
        self._posts.append(post)
        self._transport.wake()

    def _ask(self, question: Callable[[], Any], timeout: Seconds) -> Any:
        """The answer of the I/O thread, which stands behind all that was posted before. ResourceError if it does not come."""
        answer: Future[Any] = Future()
        self._post((question, answer))
        with self._changed:
            self._changed.wait_for(lambda: answer.done() or self._failure, timeout)
            self._raise_failure()
        if not answer.done():
            fix = "look what holds up this machine or its disk"
            raise ResourceError("the intake thread does not answer", found=f"none in {timeout:g} s", wanted="an answer", fix=fix)
        return answer.result()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise InternalError("the intake thread died", found=repr(self._failure)) from self._failure

    # --- the I/O thread ---

    def _run_thread(self) -> None:
        try:
            ticked_at = self._clock() - TICK_SECONDS
            while not self._stopping.is_set():
                arrived = self._transport.receive(TICK_SECONDS)
                if arrived is not None:
                    self._arrived(*arrived)
                while self._posts:
                    self._answer_post(self._posts.popleft())
                if (elapsed := self._clock() - ticked_at) >= TICK_SECONDS:
                    ticked_at += elapsed
                    self._queue_seconds += self._session.waiting * elapsed
                    self._tick()
        except BaseException as failure:  # noqa: BLE001 - handed to the train loop, which raises it
            with self._changed:
                self._failure = failure
                self._changed.notify_all()

    def _arrived(self, route: Route, frames: list[Frame]) -> None:
        now = self._clock()
        if self._limit.ignores(route, now):
            self._messages_ignored += 1
            return
        admitted = self._admitted
        self._handle(self._event(route, frames))
        if admitted == self._admitted and self._limit.count(route, now):
            fields = {"route": route.hex(), "limit": MESSAGES, "seconds": IGNORED_SECONDS}
            self._note(e.Note(event="connection_ignored", fields=fields, warning=True))

    def _event(self, route: Route, frames: list[Frame]) -> e.Event:
        self._bytes[0] += sum(memoryview(frame).nbytes for frame in frames)
        try:
            envelope = codec.decode(frames)
        except PeerError as error:
            return e.Undecodable(route=route, detail=str(error), protocol=isinstance(error, ProtocolVersionError))
        self._received[envelope.message.tag] += 1
        return e.Received(route=route, envelope=envelope, public_key=self._transport.received_key)

    def _answer_post(self, post: e.Event | tuple[Callable[[], Any], Future[Any]]) -> None:
        if isinstance(post, tuple):
            question, answer = post
            answer.set_result(question())
            with self._changed:
                self._changed.notify_all()
        else:
            self._handle(post)

    def _handle(self, event: e.Event) -> None:
        for instruction in self._session.handle(event, self._clock()):
            self._perform(instruction)

    def _perform(self, instruction: e.Instruction) -> None:
        match instruction:
            case e.Send(route=route, message=message):
                frames = codec.encode(Envelope(run=self._run, message=message))
                if self._transport.send(route, frames):
                    self._sent[message.tag] += 1
                    self._bytes[1] += sum(memoryview(frame).nbytes for frame in frames)
                else:
                    self._handle(e.Unsent(route=route, message=message))
            case e.Admit(peer=peer, index=index, continues=continues, experience=experience):
                item = Item(peer=peer, index=index, continues=continues, experience=experience, arrived_at=self._clock())
                with self._changed:
                    self._queue.append(item)
                    self._changed.notify_all()
                self._admitted += 1
            case e.Evaluated(message=evaluation):
                with self._changed:
                    self._evaluations.append(evaluation)
                    self._changed.notify_all()
            case e.Note():
                self._note(instruction)

    def _tick(self) -> None:
        self._handle(e.Tick())
        if news := self._transport.handshakes.news(self._clock()):
            self._note(news)
        if self._memory.short():
            self._free_memory()
        try:
            self._session.check_ledger()
        except InternalError as error:  # our own bug, but no reason to lose a run: say it once, loudly
            if not self._unbalanced:
                self._note(e.Note(event="ledger_unbalanced", fields={"detail": str(error)}, warning=True))
            self._unbalanced = True
        self._measure()
        with self._changed:
            self._changed.notify_all()

    def _free_memory(self) -> None:
        """Drop all connections with the data that ZeroMQ stored for them; welcomed peers greet again and re-send."""
        self._transport.reopen()
        self._sockets_reopened += 1
        freed, reserve = self._memory.freed() / MIB, self._memory.reserve / MIB
        fields = {"why": f"less than {reserve:.0f} MiB of memory were free", "freed_mib": round(freed)}
        self._note(e.Note(event="socket_reopened", fields=fields, warning=True))

    def _measure(self) -> Figures:
        session = self._session
        self.figures = Figures(
            ledger=session.ledger.as_dict(),
            queue_depth=len(self._queue),
            queue_env_steps=session.ledger.queued,
            queue_capacity=session.queue_capacity,
            queue_seconds=self._queue_seconds,
            actors=session.connected("actor"),
            evaluators=session.connected("evaluator"),
            messages_dropped=Counter(session.messages_dropped),
            sequence_gaps=session.sequence_gaps,
            reconnects=session.reconnects,
            evictions=session.evictions,
            handshakes_failed=Counter(self._transport.handshakes.failed),
            sockets_reopened=self._sockets_reopened,
            messages_ignored=self._messages_ignored,
            received=Counter(self._received),
            sent=Counter(self._sent),
            bytes_received=self._bytes[0],
            bytes_sent=self._bytes[1],
        )
        return self.figures
