"""A worker's connection to its learner: the session of `common.protocol.worker_side`, driven over a transport by one thread.

The caller calls `service` often (an actor: once per env step) and reads arrived messages from the attributes. No method
waits longer than its timeout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from common.envs.spec import EnvSpec
from common.errors import ConfigError, DropReason, ProtocolError, ProtocolVersionError, RunChangedError
from common.observability.worker_metrics import LinkStats
from common.protocol import codec
from common.protocol import events as e
from common.protocol.events import RefusalCode
from common.protocol.limits import MESSAGE_BYTES
from common.protocol.messages import Act, Drain, Dropped, Envelope, ExperienceMessage, Message, Reject, Snapshot, Welcome
from common.protocol.worker_side import ConnectionState, WorkerSide
from common.transport.api import Frames, WorkerTransport
from common.units import EnvSteps, Seconds, Version

TICK_SECONDS: Seconds = 0.1
MESSAGES_AT_ONCE = 64  # before the caller looks at its time and at requests to stop


class Link:
    """One worker's connection. Not thread-safe."""

    def __init__(
        self,
        *,
        transport: WorkerTransport,
        session: WorkerSide,
        clock: Callable[[], Seconds],
        log_event: Callable[[e.LogEvent], None],
    ) -> None:
        self.session = session
        self.welcome: Welcome | None = None
        self.layout = ""  # of the parameters the policy takes; set once there is one, then every snapshot must have it
        self.new_incarnation = False  # begun since the first Welcome; the owner resets this once it has begun
        self.drain: Drain | None = None
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.unacknowledged_seconds: Seconds = 0.0  # that experience was under way, added up over messages
        self._server = session.identity.server
        self._transport = transport
        self._clock = clock
        self._log_event = log_event
        self._foreign = 0  # messages of another protocol version, in a row
        self._unfit = 0  # snapshots of another layout, in a row
        self._largest = 0  # bytes of a message; 0 until that of a snapshot is known, which may be larger than all before it
        self._snapshot: Snapshot | None = None
        self._act: Act | None = None
        self._ticked_at: Seconds = float("-inf")
        self._joined_at: Seconds = float("-inf")  # when this worker was last seen in the learner's session
        self._counted_at = clock()
        self._count_from: EnvSteps = 0  # counters of earlier incarnations of this process
        self._dropped_from: Counter[str] = Counter()
        self._produced: EnvSteps = 0
        self._dropped: Counter[str] = Counter()

    def service(self, timeout: Seconds = 0.0) -> None:
        """Handle what has arrived, `MESSAGES_AT_ONCE` at most, waiting up to `timeout` seconds for the first of it.

        Raises `ConfigError` when refused for good, or where the learner sends another protocol version.
        """
        frames, left = self._transport.receive(timeout), MESSAGES_AT_ONCE
        self._count_under_way()
        while frames is not None:
            left -= 1
            try:
                envelope = codec.decode(frames)
            except ProtocolError as error:
                self._check_protocol(error)
                self.refuse(error)
                self._advance(self.session.request_again)
            else:
                self._foreign = 0
                self.received[envelope.message.tag] += 1
                if self._largest or isinstance(envelope.message, Snapshot):
                    self._expect(frames)
                self._handle(e.Received(envelope=envelope))
            frames = self._transport.receive(0.0) if left else None
        now = self._clock()
        if now - self._ticked_at >= TICK_SECONDS:
            self._ticked_at = now
            self._handle(e.Tick())
            if failures := self._transport.handshakes.handshake_failures(now):
                self._log_event(failures)

    def greet_after_silence(self) -> None:
        """Greet again where `service` was not called for so long that the learner may have forgotten this worker."""
        silent = self._clock() - self._ticked_at
        if self.welcome is not None and silent > self._silence_limit(self.welcome):
            self._advance(lambda now: self.session.lost(f"this worker was silent for {silent:.0f} s", now))

    def refuse(self, error: ProtocolError) -> None:
        """Log why a message of the learner cannot be used."""
        self._log_event(e.LogEvent(event="undecodable", fields={"detail": str(error)}, warning=True))

    def refuse_snapshot(self, error: ProtocolError) -> None:
        """Refuse a snapshot, and request the newest again: the learner may have no newer one."""
        self.refuse(error)
        self.request_snapshot(after=-1)

    def _check_protocol(self, error: ProtocolError) -> None:
        """Raise `ConfigError` at the second foreign version in a row: one alone may be a message that the network changed."""
        if isinstance(error, ProtocolVersionError):  # not even a Refusal of that learner could be read here
            self._foreign += 1
            if self._foreign > 1:
                fix = "run the same rookery version on both sides"
                fact = f"protocol version of the {self._server}"
                raise ConfigError(fact, found=error.found, wanted=error.wanted, fix=fix) from error

    def check_environment(self, env: EnvSpec) -> None:
        """State which environment was built here. Raises `ConfigError` where it is not the one that the learner trains on."""
        assert self.welcome is not None
        if env.signature != self.welcome.env_signature:
            raise ConfigError(
                f"the environment here is not the {self._server}'s",
                found=f"signature {env.signature} ({env})",
                wanted=f"signature {self.welcome.env_signature}",
                fix="install the same versions of the environment's packages on both sides",
            )
        self.session.env_signature = env.signature

    @property
    def joined(self) -> bool:
        """Return whether the learner has this worker in its session, or had it within the silence limit.

        Safe from any thread.
        """
        if self.welcome is None:
            return False
        silent = self._clock() - self._joined_at
        return self.session.state is ConnectionState.WELCOME or silent <= self._silence_limit(self.welcome)

    def _silence_limit(self, welcome: Welcome) -> Seconds:
        return self.session.SILENCE_HEARTBEATS * welcome.heartbeat_seconds

    @property
    def welcomed(self) -> bool:
        """Return whether `welcome` answers this very incarnation, and the learner was not lost since."""
        return self.session.state is ConnectionState.WELCOME

    @property
    def has_credit(self) -> bool:
        """Return whether a credit is free: a credit is the permission to collect one more experience message."""
        return self.session.has_credit

    def offer(self, experience: ExperienceMessage) -> None:
        """Send experience; it is kept, and sent again after a loss of the learner, until it is acknowledged."""
        self._count_under_way()
        self._advance(lambda now: self.session.offer(experience, now))

    def request_snapshot(self, after: Version) -> None:
        """Let the newest policy come, once, as soon as there is another than `after`, or than one that waits to be taken.

        May be repeated while none has come.
        """
        if self._snapshot is not None:
            after = self._snapshot.version
        self._advance(lambda now: self.session.request_snapshot(after, now))

    def take_snapshot(self) -> Snapshot | None:
        """The newest policy that arrived since the last call, if any."""
        snapshot, self._snapshot = self._snapshot, None
        return snapshot

    def take_act(self) -> Act | None:
        """Return the newest Act that arrived since the last call, if any."""
        act, self._act = self._act, None
        return act

    def count_from(self, produced: EnvSteps, dropped: Counter[str]) -> None:
        """Begin with these counters of the process: what they count was stated on an earlier link."""
        self._produced, self._dropped = produced, Counter(dropped)
        self._count_from, self._dropped_from = produced, Counter(dropped)

    def count(self, produced: EnvSteps, dropped: Counter[str]) -> None:
        """State the process's counters, cumulative; they go out with the next heartbeat or Goodbye."""
        self._produced, self._dropped = produced, Counter(dropped)
        drops = ((reason, steps - self._dropped_from[reason]) for reason, steps in dropped.items())
        self.session.count(
            produced=produced - self._count_from,
            dropped=tuple(Dropped(reason=reason, env_steps=steps) for reason, steps in drops if steps > 0),
        )

    def say(self, message: Message) -> bool:
        """Send a message that is neither numbered nor kept (an Evaluation); False, and not sent, while there is no learner."""
        before = self.sent[message.tag]
        self._advance(lambda now: self.session.send(message, now))
        return self.sent[message.tag] > before

    def close(self, reason: str) -> None:
        """Say Goodbye and release the connection; the transport still sends for its linger."""
        self._advance(lambda now: self.session.close(reason, now))
        self._transport.close()

    def stats(self) -> LinkStats:
        """Return the counters of this connection as of now. Safe from any thread."""
        session = self.session
        return LinkStats(
            sent=self.sent,
            received=self.received,
            reconnects=session.reconnects,
            connected=self.welcomed,
            unacknowledged=session.unacknowledged,
            window=session.window,
            unacknowledged_seconds=self.unacknowledged_seconds,
        )

    def _count_under_way(self) -> None:
        now = self._clock()
        self.unacknowledged_seconds += self.session.unacknowledged * (now - self._counted_at)
        self._counted_at = now

    def _handle(self, event: e.Event) -> None:
        self._advance(lambda now: self.session.handle(event, now))

    def _advance(self, call: Callable[[Seconds], list[e.Instruction]]) -> None:
        unsent: e.Unsent | None = None
        now = self._clock()
        if self.session.state is ConnectionState.WELCOME:
            self._joined_at = now
        for instruction in call(now):
            if not isinstance(instruction, e.Send):
                self._perform(instruction)
            elif unsent is None and not self._send(instruction.message):
                unsent = e.Unsent(message=instruction.message)  # the messages after it would leave a hole before them
        if unsent is not None:
            self._handle(unsent)

    def _send(self, message: Message) -> bool:
        frames = codec.encode(Envelope(run=self.session.run, message=message))
        if self._largest:
            self._expect(frames)
        sent = self._transport.send(frames)
        self.sent[message.tag] += sent
        return sent

    def _expect(self, frames: Frames) -> None:
        self._expect_bytes(sum(memoryview(frame).nbytes for frame in frames))

    def _expect_bytes(self, size: int) -> None:
        if size > self._largest:
            self._largest = size
            self._transport.expect(size)

    def _perform(self, instruction: e.Instruction) -> None:
        match instruction:
            case Welcome():
                self._welcomed(instruction)
            case Snapshot():
                if self._fits(instruction):
                    self._snapshot = instruction
            case Drain():
                self.drain = instruction
            case Act():
                self._act = instruction
            case e.Refused():
                self._refused(instruction)
            case e.NewIncarnation():
                self.new_incarnation = self.welcome is not None
                self._count_from, self._dropped_from = self._produced, Counter(self._dropped)
            case Reject(seq=seq, reason=reason, detail=detail):
                fields = {"seq": seq, "reason": reason, "detail": detail}
                self._log_event(e.LogEvent(event="message_rejected", fields=fields, warning=True))
            case e.LogEvent():
                self._log_event(instruction)

    def _welcomed(self, welcome: Welcome) -> None:
        """Keep the newest Welcome. Raises `RunChangedError` where this worker would not be built from it as it was."""
        if self.welcome is not None and welcome.described != self.welcome.described:
            fact, wanted = f"the {self._server} goes on with other settings", "that from which this worker was built"
            raise RunChangedError(fact, found="another Welcome", wanted=wanted)
        self.welcome, self._act = welcome, None
        self._expect_bytes(min(welcome.snapshot_bytes, MESSAGE_BYTES))

    def _refused(self, refused: e.Refused) -> None:
        if refused.code != RefusalCode.DRAINING:
            raise ConfigError(f"the {self._server} refuses this worker ({refused.code}): {refused.reason}")
        self.drain = Drain(reason=refused.reason, deadline_seconds=0.0)  # no error: the run was over before this worker connected

    def _fits(self, snapshot: Snapshot) -> bool:
        """Return whether the policy here takes this snapshot. Raises `ConfigError` at the second in a row that it does not."""
        if not self.layout or snapshot.layout == self.layout:
            self._unfit = 0
            return True
        self._unfit += 1
        fact, found = "the learner's network is not the one built here", f"layout {snapshot.layout}"
        if self._unfit > 1:
            raise ConfigError(fact, found=found, wanted=f"layout {self.layout}", fix="run the same rookery version on both sides")
        self.refuse_snapshot(ProtocolError(DropReason.SCHEMA, fact, found=found, wanted=f"layout {self.layout}"))
        return False
