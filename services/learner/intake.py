"""The learner's I/O thread: receive, decode, pass each message to the session, and keep the bounded queue.

The train loop calls `take` (in lockstep `take_round`), `complete`, `publish`, and at the end `drain` and `finish`. The I/O thread
alone uses the transport and the session; the train loop posts events to it, and reads `stats`, which are replaced at each tick.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from common.errors import DropReason, InternalError, ProtocolError, ProtocolVersionError, ResourceError
from common.observability.health import Health
from common.protocol import codec
from common.protocol import events as e
from common.protocol.events import Experience, WorkerKey
from common.protocol.learner_side import LearnerSide
from common.protocol.messages import Envelope, Message, Snapshot
from common.runtime.machine import MemoryGuard
from common.transport.api import Frame, Frames, ServerTransport
from common.units import Seconds
from services.learner.accounts import AccountsFile
from services.learner.intake_monitor import IntakeMonitor

TICK_SECONDS: Seconds = 0.1
HUNG_SECONDS: Seconds = 60.0  # between two ticks: the accounts are on a disk that may be slow
MESSAGES_AT_ONCE = 64  # received before posts are performed: a flood must not delay them
MAX_EVALUATIONS = 256  # that wait for the train loop, which may save for minutes; of more the newest, since memory is finite

_Call: TypeAlias = tuple[Callable[[], Any], Future[Any]]  # a function for the I/O thread, and what it will return


@dataclass(kw_only=True)
class Intake:
    """Owner of the transport, the session and the queue. `start` before use, `close` at the end."""

    transport: ServerTransport
    session: LearnerSide
    clock: Callable[[], Seconds]
    log_event: Callable[[e.LogEvent], None]
    accounts: AccountsFile | None = None  # has the account of each worker before it gets credits; None: it is written nowhere
    memory: MemoryGuard = field(default_factory=MemoryGuard)  # of the process
    health: Health = field(default_factory=Health)
    _queue: deque[Experience] = field(default_factory=deque)
    _evaluations: deque[e.Evaluated] = field(default_factory=lambda: deque(maxlen=MAX_EVALUATIONS))
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _posts: deque[e.Event | _Call] = field(default_factory=deque)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _failure: BaseException | None = None
    _admitted: int = 0
    _snapshot: tuple[Snapshot, Frames] | None = None  # the newest that was encoded

    def __post_init__(self) -> None:
        self._monitor = IntakeMonitor(
            transport=self.transport, session=self.session, log_event=self.log_event, memory=self.memory
        )
        self.stats = self._monitor.stats(queue_depth=0)
        self._thread = threading.Thread(target=self._run_thread, name="intake", daemon=True)

    # --- for the train loop, from its own thread ---

    def start(self) -> None:
        """Begin to receive."""
        self._thread.start()

    def take(self, count: int, timeout: Seconds, *, patience: Seconds = math.inf) -> list[Experience]:
        """Return `count` messages in order of arrival, none if they do not come within `timeout`.

        Their credits return now. Fewer, as many as there are, once the first of them has waited for `patience` seconds.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._enough(count, patience) or self._failure, timeout)
            self.check()
            if not self._enough(count, patience):
                return []
            items = [self._queue.popleft() for _ in range(min(count, len(self._queue)))]
        self._post(e.Taken(items=tuple(item.number for item in items)))
        return items

    def take_round(self, choose: Callable[[Iterable[Experience]], list[Experience]], timeout: Seconds) -> list[Experience]:
        """Return, in lockstep, the messages that `choose` takes of the queue, none if there are none within `timeout`.

        Their credits return when they are completed.
        """
        with self._changed:
            self._changed.wait_for(lambda: choose(self._queue) or self._failure, timeout)
            self.check()
            items = choose(self._queue)
            taken = {item.number for item in items}
            self._queue = deque(item for item in self._queue if item.number not in taken)
        return items

    def _enough(self, count: int, patience: Seconds) -> bool:
        queue = self._queue
        return len(queue) >= count or (len(queue) > 0 and self.clock() - queue[0].arrived_at >= patience)

    def complete(self, items: Sequence[Experience], reason: str | None = None) -> None:
        """Account for taken messages: trained on, or dropped for `reason`."""
        numbers = tuple(item.number for item in items)
        if numbers and self.session.config.lockstep:
            self._post(e.Taken(items=numbers))  # not before: a credit lets an actor act by the old policy
        if numbers:
            self._posts.append(e.Completed(items=numbers, reason=reason))  # changes the books alone: no reason to wake the thread

    def publish(self, snapshot: Snapshot) -> None:
        """Serve this policy from now on to each worker that requests a newer one."""
        self._post(e.Published(snapshot=snapshot))

    def drain(self, reason: str, deadline_seconds: Seconds) -> None:
        """Send all workers the end of the run; experience that still arrives is counted as dropped."""
        self._post(e.DrainAsked(reason=reason, deadline_seconds=deadline_seconds))

    def wait_for_goodbyes(self, timeout: Seconds, *, alive: Callable[[], None], abort: Callable[[], bool]) -> bool:
        """Wait until every worker has left; return False when `timeout` seconds were not enough, or `abort` returned True."""
        deadline = self.clock() + timeout
        while self.stats.actors + self.stats.evaluators and self.clock() < deadline and not abort():
            alive()
            with self._changed:
                self._changed.wait(TICK_SECONDS)
                self.check()
        return not self.stats.actors + self.stats.evaluators

    def take_evaluations(self) -> list[e.Evaluated]:
        """Return the evaluations that came since the last call."""
        with self._changed:
            evaluations = list(self._evaluations)
            self._evaluations.clear()
        return evaluations

    def session_state(self, timeout: Seconds = HUNG_SECONDS) -> dict[str, Any]:
        """Return the session's state for a checkpoint, after all posts before it. The accounts file starts again with it."""
        state: dict[str, Any] = self._call(self._session_state, timeout)
        return state

    def finish(self, timeout: Seconds = HUNG_SECONDS) -> None:
        """Drop and count the queue, close every account; `stats` are final afterwards."""
        with self._changed:
            numbers = tuple(self._queue.popleft().number for _ in range(len(self._queue)))
        for event in (e.Taken(items=numbers), e.Completed(items=numbers, reason=DropReason.RUN_ENDED), e.Ended()):
            self._post(event)
        self.update_stats(timeout)

    def update_stats(self, timeout: Seconds = HUNG_SECONDS) -> None:
        """Bring `stats` up to all that was posted before."""
        self._call(self._collect_stats, timeout)

    def check(self) -> None:
        """Raise `InternalError` where the I/O thread has died."""
        if self._failure is not None:
            raise InternalError("the intake thread died", found=repr(self._failure)) from self._failure

    def close(self) -> None:
        """End the thread and close the transport."""
        self._stopping.set()
        self.transport.wake()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        self.transport.close()
        if self.accounts is not None:
            self.accounts.close()

    def _post(self, post: e.Event | _Call) -> None:
        self._posts.append(post)
        self.transport.wake()

    def _call(self, function: Callable[[], Any], timeout: Seconds) -> Any:
        """Return what `function` returns in the I/O thread, after all posts before it. Raises `ResourceError` after `timeout`."""
        result: Future[Any] = Future()
        self._post((function, result))
        with self._changed:
            self._changed.wait_for(lambda: result.done() or self._failure, timeout)
            self.check()
        if not result.done():
            fix = "look what holds up this machine or its disk"
            raise ResourceError("the intake thread does not answer", found=f"none in {timeout:g} s", wanted="an answer", fix=fix)
        return result.result()

    # --- the I/O thread ---

    def _run_thread(self) -> None:
        try:
            ticked_at = self.clock() - TICK_SECONDS
            while not self._stopping.is_set():
                # Until the tick is due, not longer: one that the next message woke would always count it as waiting.
                self._receive(max(0.0, ticked_at + TICK_SECONDS - self.clock()))
                self._perform_posts()
                if (elapsed := self.clock() - ticked_at) >= TICK_SECONDS:
                    ticked_at += elapsed
                    self._tick(elapsed)
        except BaseException as failure:  # noqa: BLE001 - handed to the train loop, which raises it
            with self._changed:
                self._failure = failure
                self._changed.notify_all()

    def _receive(self, timeout: Seconds) -> None:
        """Handle the messages that are there, at most `MESSAGES_AT_ONCE`, waiting `timeout` for the first of them."""
        admitted = self._admitted
        number, arrived = 1, self.transport.receive(timeout)
        while arrived is not None:
            self._arrived(*arrived)
            number, arrived = number + 1, self.transport.receive(0.0) if number < MESSAGES_AT_ONCE else None
        if self._admitted != admitted:  # once for all: the train loop competes with this thread for the interpreter
            with self._changed:
                self._changed.notify_all()

    def _arrived(self, route: e.Route, frames: list[Frame]) -> None:
        now, admitted = self.clock(), self._admitted
        if self._monitor.ignores(route, now):
            return
        self._handle(self._event(route, frames))
        self._monitor.handled(route, now, admitted=self._admitted > admitted)

    def _event(self, route: e.Route, frames: list[Frame]) -> e.Event:
        self._monitor.arrived(frames)
        try:
            envelope = codec.decode(frames)
        except ProtocolError as error:
            return e.Undecodable(route=route, detail=str(error), protocol=isinstance(error, ProtocolVersionError))
        self._monitor.decoded(envelope.message)
        return e.Received(route=route, envelope=envelope, public_key=self.transport.received_key)

    def _perform_posts(self) -> None:
        """Perform all posts in order; messages that left the queue one after the other leave it together."""
        taken: list[tuple[WorkerKey, int]] = []
        while self._posts:
            post = self._posts.popleft()
            if isinstance(post, e.Taken):
                taken += post.items
                continue
            if taken:
                self._handle(e.Taken(items=tuple(taken)))
                taken = []
            self._perform_post(post)
        if taken:
            self._handle(e.Taken(items=tuple(taken)))

    def _perform_post(self, post: e.Event | _Call) -> None:
        if not isinstance(post, tuple):
            self._handle(post)
            return
        function, result = post
        result.set_result(function())
        with self._changed:
            self._changed.notify_all()

    def _session_state(self) -> dict[str, Any]:
        if self.accounts is not None:
            self.accounts.restart(self.session.saved.accounts())
        return self.session.saved.state_dict()

    def _handle(self, event: e.Event) -> None:
        instructions = self.session.handle(event, self.clock())
        if self.accounts is not None:
            self.accounts.write(self.session, instructions, closed=isinstance(event, e.Tick))
        for instruction in instructions:
            self._perform(instruction)

    def _perform(self, instruction: e.Instruction) -> None:
        match instruction:
            case e.Send(route=route, message=message):
                frames = self._encoded(message)
                if self.transport.send(route, frames):
                    self._monitor.sent(message, frames)
                else:
                    self._handle(e.Unsent(route=route, message=message))
            case Experience():
                with self._changed:
                    self._queue.append(instruction)
                self._admitted += 1
            case e.Evaluated():
                with self._changed:
                    self._evaluations.append(instruction)
            case e.LogEvent():
                self.log_event(instruction)

    def _encoded(self, message: Message) -> Frames:
        """Return the parts of a message; those of a snapshot are made once for all workers."""
        if not isinstance(message, Snapshot):
            return codec.encode(Envelope(run=self.session.config.run, message=message))
        if self._snapshot is None or self._snapshot[0] is not message:
            self._snapshot = message, codec.encode(Envelope(run=self.session.config.run, message=message))
        return self._snapshot[1]

    def _tick(self, elapsed: Seconds) -> None:
        self.health.tick(loop="I/O thread", within=HUNG_SECONDS)
        self._handle(e.Tick())
        self._monitor.tick(self.clock(), elapsed)
        self._collect_stats()
        with self._changed:
            self._changed.notify_all()

    def _collect_stats(self) -> None:
        self.stats = self._monitor.stats(queue_depth=len(self._queue))
