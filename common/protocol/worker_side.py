"""The protocol as a worker sees it: an actor, an evaluator, which sends no experience, or an env worker of a policy server.

Greet until welcomed; number and keep every experience message until it is acknowledged; after any loss of the
learner greet again and re-send the messages that were kept, in order; have one SnapshotWanted open at most; end with a Goodbye.
All decisions of the worker's side are in this file. It has no socket and no clock: see `events`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from common.errors import ConfigError, InternalError
from common.protocol import events as e
from common.protocol.events import RefusalCode
from common.protocol.limits import MESSAGE_BYTES, SLOWEST_LINK, UNKNOWN_BYTES
from common.protocol.messages import (
    ENV_WORKER,
    WORKER_NAME,
    WORKER_NAME_WANTED,
    Act,
    Credit,
    Drain,
    Dropped,
    Envelope,
    ExperienceMessage,
    Goodbye,
    Hello,
    Message,
    Refusal,
    Report,
    Snapshot,
    SnapshotWanted,
    Welcome,
    server_of,
)
from common.units import EnvSteps, Seconds, Sequence, Version


class ConnectionState(StrEnum):
    """State of a worker towards its learner."""

    GREETING = "greeting"  # no answer to the Hello yet
    WELCOME = "welcome"
    ENDED = "ended"  # a Goodbye was sent, or it was refused for good


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Identity of the worker. `incarnation` should grow with each start of its process (a wall-clock reading mostly does)."""

    role: str
    name: str
    incarnation: int
    software: str

    def __post_init__(self) -> None:
        if not WORKER_NAME.fullmatch(self.name):
            fix = f"set {self.role}.name"
            raise ConfigError(f"name of this {self.role}", found=repr(self.name), wanted=WORKER_NAME_WANTED, fix=fix)

    @property
    def server(self) -> str:
        """Return the process that this worker connects to, for messages."""
        return server_of(self.role)


class WorkerSide:
    """State machine of one worker. Feed it events and the application's requests, perform its instructions."""

    GREET_SECONDS: Seconds = 0.5  # between two Hellos without an answer
    FULL_SECONDS: Seconds = 3.0  # between two Hellos that are refused for a while: it may be for hours, and each costs two lines
    SILENCE_HEARTBEATS = 5  # heartbeats missed before the learner counts as lost

    def __init__(self, identity: Identity, *, run: str = "", env_signature: str = "") -> None:
        self.identity = identity
        self.run = run
        self.env_signature = env_signature  # set by the application once its environment is built
        self.state = ConnectionState.GREETING
        self.window = 0
        self._largest_window = 0
        self.version: Version = -1  # newest policy the learner is known to have
        self.reconnects = 0
        self._kept: deque[ExperienceMessage] = deque()  # sent or to be sent, not acknowledged
        self._resend_from: Sequence = 0  # messages kept below this number hold their credits and are not sent again
        self._next_seq = 0
        self._env_steps_sent: EnvSteps = 0
        self._produced: EnvSteps = 0
        self._dropped: tuple[Dropped, ...] = ()
        self._wanted: Version | None = None  # the application waits for another policy than this one
        self._request_open = False  # whether this learner knows
        self._snapshot_bytes = UNKNOWN_BYTES  # all policies of a run have one size
        self._heartbeat: Seconds = 1.0
        self._greet_at: Seconds = float("-inf")
        self._heard_at: Seconds = 0.0
        self._sent_at: Seconds = 0.0
        self._was_welcome = False
        self._final = ""  # code of the last refusal, if it was one for good
        self._welcomed_as = -1  # incarnation that the last Welcome reached

    @property
    def unacknowledged(self) -> int:
        """Experience messages under way: the worker's queue depth."""
        return len(self._kept)

    @property
    def has_credit(self) -> bool:
        """Return whether a credit is free."""
        return self.state is not ConnectionState.ENDED and self.window > len(self._kept)

    def handle(self, event: e.Event, now: Seconds) -> list[e.Instruction]:
        """Advance by one event at monotonic time `now` (seconds); returns what to do, in order."""
        match event:
            case e.Tick():
                return self._tick(now)
            case e.Received(envelope=envelope):
                return self._received(envelope, now)
            case e.Unsent():
                return self.lost("the connection does not take messages", now)
        raise InternalError("an event of the learner's side reached an actor's session", found=type(event).__name__)

    # --- time ---

    def _tick(self, now: Seconds) -> list[e.Instruction]:
        if self.state is ConnectionState.GREETING:
            return self._greet(now) if now >= self._greet_at else []
        if self.state is ConnectionState.WELCOME:
            if now - self._heard_at > self.SILENCE_HEARTBEATS * self._heartbeat + self._crossing:
                return self.lost(f"no message from the {self.identity.server} for {now - self._heard_at:.1f} s", now)
            if now - self._sent_at >= self._heartbeat:
                return self._send(Report(produced=self._produced, dropped=self._dropped), now)
        return []

    @property
    def _crossing(self) -> Seconds:
        """Return how long a policy that was requested may cross: meanwhile no other message arrives."""
        return self._snapshot_bytes / SLOWEST_LINK if self._request_open else 0.0

    def _greet(self, now: Seconds) -> list[e.Instruction]:
        self._greet_at = now + self.GREET_SECONDS
        first = next(self._resent(), None)
        hello = Hello(
            role=self.identity.role,
            worker=self.identity.name,
            incarnation=self.identity.incarnation,
            software=self.identity.software,
            env_signature=self.env_signature,
            resend_from=first.seq if first else self._next_seq,
            completed=first.env_steps_sent - first.env_steps if first else self._env_steps_sent,
            produced=self._produced,
            welcomed=self._welcomed_as == self.identity.incarnation,
        )
        return self._send(hello, now)

    # --- messages of the learner ---

    def _received(self, envelope: Envelope, now: Seconds) -> list[e.Instruction]:
        if self.state is ConnectionState.ENDED:
            return []
        message = envelope.message
        self._heard_at = now
        match message:
            case Welcome():
                return self._welcomed(message, envelope.run, now)
            case Refusal():
                return self._refused(message, now)
            case _ if self.state is ConnectionState.GREETING:
                return []  # left over from before the loss: the Welcome states it anew
            case Credit():
                return self._credited(message)
            case Snapshot():
                return self._arrived(message)
            case Drain():
                return [message]
            case Act() if self.identity.role == ENV_WORKER:
                return [message]
        return [e.LogEvent(event="unexpected_message", fields={"tag": message.tag}, warning=True)]

    def _welcomed(self, welcome: Welcome, run: str, now: Seconds) -> list[e.Instruction]:
        if self.state is ConnectionState.WELCOME:
            return []  # a second answer to a Hello that we had repeated
        if welcome.incarnation not in (-1, self.identity.incarnation):
            return []  # it answers the Hello of an earlier incarnation: two refusals as `forgotten` named two numbers
        self.state, self.run, self._final = ConnectionState.WELCOME, run, ""
        self._set_window(welcome.credits)
        self.version, self._heartbeat = welcome.version, welcome.heartbeat_seconds
        self._snapshot_bytes = min(welcome.snapshot_bytes, MESSAGE_BYTES) or self._snapshot_bytes
        self.reconnects += self._was_welcome
        if self._was_welcome and self.identity.role == "actor":  # the learner may have another policy under the same number
            self._wanted = -1
        self._was_welcome, self._welcomed_as = True, self.identity.incarnation
        out: list[e.Instruction] = [welcome]
        for kept in self._resent():
            out += self._send(kept, now)
        if self._wanted is not None:
            out += self.request_snapshot(self._wanted, now)
        return out

    def _refused(self, refusal: Refusal, now: Seconds) -> list[e.Instruction]:
        warning = refusal.code != RefusalCode.DRAINING  # the end of a run is no fault
        note = e.LogEvent(event="refused", fields={"code": refusal.code, "reason": refusal.reason}, warning=warning)
        if refusal.retry and refusal.code in (RefusalCode.FORGOTTEN, RefusalCode.SUPERSEDED):
            return [note, *self._start_incarnation(refusal.incarnation, now)]
        # Before the first Welcome only a Hello was sent: one that cannot be read twice can never be read.
        unreadable = refusal.code == RefusalCode.DECODE and not self._was_welcome
        if unreadable or not refusal.retry:
            # Bytes may change on a network without keys: a Hello that arrives as it was sent brings the same refusal again.
            if refusal.code in (self._final, RefusalCode.DRAINING):
                self.state = ConnectionState.ENDED
                return [note, e.Refused(code=refusal.code, reason=refusal.reason)]
            self._final, self.state, self._request_open = refusal.code, ConnectionState.GREETING, False
            self._greet_at = now + self.GREET_SECONDS
            return [note]
        if refusal.code == RefusalCode.DECODE:
            # The learner cannot decode it a second time either: the Hello states the first number that may still be sent.
            # Some of it may have been read, and wait: all keep their credits until they are acknowledged.
            self._resend_from = self._next_seq
        was_welcome = self.state is ConnectionState.WELCOME
        self.state, self._request_open = ConnectionState.GREETING, False
        if refusal.code in (RefusalCode.FULL, RefusalCode.IN_USE, RefusalCode.EVICTED):
            self._greet_at = now + self.FULL_SECONDS
            return [note]
        return [note, *self._greet(now)] if was_welcome else [note]

    def _start_incarnation(self, incarnation: int, now: Seconds) -> list[e.Instruction]:
        """Continue as a new incarnation: the one that the learner names, because no clock is sure to give a larger number."""
        if incarnation == self.identity.incarnation:
            return []  # a second answer to a repeated Hello
        following = self.identity.incarnation + 1 if incarnation < 0 else incarnation
        self.identity = replace(self.identity, incarnation=following)
        self.state, self._request_open = ConnectionState.GREETING, False
        self._kept.clear()
        self._next_seq = self._resend_from = self._env_steps_sent = self._produced = 0
        self._dropped = ()
        self.window = 0  # until its Welcome: messages of its predecessor may hold credits
        return [e.NewIncarnation(incarnation=self.identity.incarnation), *self._greet(now)]

    def _credited(self, credit: Credit) -> list[e.Instruction]:
        self._set_window(credit.credits)
        self.version = credit.version
        refused = {reject.seq for reject in credit.rejects}
        self._kept = deque(kept for kept in self._kept if kept.seq >= credit.acked and kept.seq not in refused)
        return list(credit.rejects)

    def _set_window(self, size: int) -> None:
        self.window, self._largest_window = size, max(size, self._largest_window)

    def _arrived(self, snapshot: Snapshot) -> list[e.Instruction]:
        self._wanted, self._request_open = None, False
        self._snapshot_bytes = snapshot.nbytes
        self.version = snapshot.version
        return [snapshot]

    # --- requests of the application ---

    def offer(self, experience: ExperienceMessage, now: Seconds) -> list[e.Instruction]:
        """Send experience, now or with the next Welcome; `seq` and `env_steps_sent` are filled in here.

        Raises `InternalError` where no credit is free.
        """
        if len(self._kept) >= self._largest_window:  # the window of now may be smaller than when the application asked
            raise InternalError("experience offered without a credit", found=len(self._kept), wanted=f"< {self._largest_window}")
        self._env_steps_sent += experience.env_steps
        numbered = replace(experience, seq=self._next_seq, env_steps_sent=self._env_steps_sent)
        self._next_seq += 1
        self._kept.append(numbered)
        return self.send(numbered, now)

    def send(self, message: Message, now: Seconds) -> list[e.Instruction]:
        """Send a message if there is a Welcome: one that is neither numbered nor kept (an Evaluation) else gets lost."""
        return self._send(message, now) if self.state is ConnectionState.WELCOME else []

    def count(self, *, produced: EnvSteps, dropped: tuple[Dropped, ...] = ()) -> None:
        """Keep the application's counters, cumulative over the incarnation, for the next Report or Goodbye."""
        self._produced, self._dropped = produced, dropped

    def request_snapshot(self, after: Version, now: Seconds) -> list[e.Instruction]:
        """Request the newest policy, as soon as there is another than `after`. Once one came, the next needs a request."""
        again = self._wanted is not None and after < self._wanted  # a snapshot that came before cannot be used
        self._wanted = after
        if (self._request_open and not again) or self.state is not ConnectionState.WELCOME:
            return []
        self._request_open = True
        return self._send(SnapshotWanted(after=after), now)

    def request_again(self, now: Seconds) -> list[e.Instruction]:
        """Repeat an open request: a message that could not be decoded may have been its answer."""
        open_, self._request_open = self._request_open, False
        return self.request_snapshot(self._wanted, now) if open_ and self._wanted is not None else []

    def lost(self, why: str, now: Seconds) -> list[e.Instruction]:
        """Greet again: the learner may have this worker in its session no more."""
        if self.state is not ConnectionState.WELCOME:
            self._greet_at = now  # at the next Tick: a Hello that was not sent needs no pause after it
            return []
        self.state, self._request_open = ConnectionState.GREETING, False
        self._greet_at = now + self.GREET_SECONDS  # the first Hello after the usual pause: the connection is just being rebuilt
        event = f"{self.identity.server.replace(' ', '_')}_lost"
        return [e.LogEvent(event=event, fields={"why": why, "unacknowledged": len(self._kept)}, warning=True)]

    def close(self, reason: str, now: Seconds) -> list[e.Instruction]:
        """End: send a Goodbye if there is a Welcome, and nothing more."""
        connected = self.state is ConnectionState.WELCOME
        self.state = ConnectionState.ENDED
        return self._send(Goodbye(reason=reason, produced=self._produced, dropped=self._dropped), now) if connected else []

    def _resent(self) -> Iterator[ExperienceMessage]:
        return (kept for kept in self._kept if kept.seq >= self._resend_from)

    def _send(self, message: Message, now: Seconds) -> list[e.Instruction]:
        self._sent_at = now
        return [e.Send(message=message)]
