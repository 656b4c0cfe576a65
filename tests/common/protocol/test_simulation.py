"""The session in a simulated world: seeded, in virtual time, with everything that goes wrong between processes.

Actors and an evaluator talk to a learner over connections that break (what is under way is lost, or arrives late and
beside the next connection), deliver twice, and block. Workers are killed, start again under their name or another, and
stall for minutes, with clocks that step back; a hostile process greets under their names, with larger incarnations
and smaller; the learner is killed and resumes from a checkpoint of any moment, or from none. After every event of
the learner its ledger must agree with books kept here, from the state of all processes. One seed, or a range of
them, alone:

    python tests/common/protocol/test_simulation.py FIRST [LAST]

Longer than 400 lines: the world is one thing, and tests import nothing from one another.
"""

from __future__ import annotations

import heapq
import json
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from common.errors import DropReason
from common.protocol import events as e
from common.protocol.events import RefusalCode, WorkerKey
from common.protocol.incarnation import WorkerState
from common.protocol.learner_side import LearnerSide
from common.protocol.messages import (
    ArraySpec,
    Drain,
    Dropped,
    Envelope,
    Evaluation,
    ExperienceMessage,
    Goodbye,
    Hello,
    Message,
    Report,
    Snapshot,
    Trajectory,
    Welcome,
)
from common.protocol.session_config import SessionConfig
from common.protocol.worker_side import Identity, WorkerSide

pytestmark = pytest.mark.pure

SCHEMA = (ArraySpec(name="reward", dtype="float32", shape=(8,)), ArraySpec(name="valid", dtype="bool", shape=(8,)))
SOUND, SICK = np.zeros(8, np.float32), np.full(8, np.nan, np.float32)
EVALUATION = {"episode_return": np.zeros(1, np.float32), "episode_length": np.ones(1, np.int32)}
VALID = [np.arange(8) < steps for steps in range(9)]
CHAOS_SECONDS, CALM_SECONDS, DRAIN_SECONDS = 60.0, 40.0, 10.0
SILENCE, FORGET = 4.0, 15.0


@dataclass
class Books:
    """The experience that a learner, resumed or not, has to account for, counted outside of it."""

    reported: Counter[WorkerKey] = field(default_factory=Counter)  # env steps of each incarnation, as reported to the learner
    dropped: Counter[WorkerKey] = field(default_factory=Counter)  # of these, dropped by the actor itself
    trained: dict[tuple[WorkerKey, int], int] = field(default_factory=dict)
    finished: set[WorkerKey] = field(default_factory=set)  # said Goodbye: nothing more is to come
    streams: dict[tuple[str, int, int], WorkerKey] = field(default_factory=dict)  # (role, index, generation) -> its holder

    def copy(self) -> Books:
        """As a checkpoint holds it."""
        return Books(Counter(self.reported), Counter(self.dropped), dict(self.trained), set(self.finished), dict(self.streams))


@dataclass(eq=False)
class Line:
    """One connection, in order both ways. A broken one still delivers to the learner, until `cut`, what had crossed."""

    route: bytes
    life: int  # of the learner
    worker: Process
    cut: float = float("inf")
    up_at: float = 0.0
    down_at: float = 0.0


@dataclass(eq=False)
class Process:
    """An actor or the evaluator: a session, and the application on top of it."""

    name: str
    role: str
    side: WorkerSide
    sick: bool
    pace: float
    alive: bool = True
    line: Line | None = None
    stalled_until: float = 0.0
    reconnect_at: float = 0.0
    version: int | None = None
    produced: int = 0
    dropped: int = 0
    rollout: int = 0  # env steps in hand
    draining: bool = False
    said_goodbye: bool = False

    @property
    def key(self) -> WorkerKey:
        """Return the key of this worker at the learner."""
        return WorkerKey(name=self.name, incarnation=self.side.identity.incarnation)


class World:
    """Everything but the session: time, connections, processes, faults, and the observer."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lossy = seed % 5 == 4  # single messages vanish or are refused too, which TCP inside a living connection never does
        self.learner_faults = seed % 3 != 0
        self.process_faults = seed % 4 != 3
        self.names_change = seed % 2 == 0
        self.clocks_step = seed % 2 == 1
        self.hostile = seed % 3 != 1
        self.now, self.order, self.agenda = 0.0, 0, list[tuple[float, int, Callable[[], None]]]()
        self.chaos = True
        actors = self.random.randint(1, 4)
        self.config = SessionConfig(
            run="run",
            run_config="{}",
            env_signature="env",
            schema=SCHEMA,
            credits=self.random.randint(1, 3),
            rollout_env_steps=8,
            batch=self.random.randint(1, 6),
            max_actors=actors,
            max_evaluators=1,
            silence_seconds=SILENCE,
            forget_seconds=FORGET,
        )
        self.room = max(self.config.credits, self.config.batch)
        self.lines: dict[bytes, Line] = {}
        self.true: dict[WorkerKey, int] = {}  # env steps really stepped
        self.life, self.crashes, self.version = 0, 0, 0
        self.learner: LearnerSide | None = None
        self.checkpoint: tuple[str, Books, int] | None = None
        self.accounts: tuple[str, Books] | None = None  # as they were after the checkpoint
        self.starts = 0
        self.processes: list[Process] = []
        self.started: list[Process] = []  # with those that were killed
        for role in ["actor"] * actors + ["evaluator"]:
            self.processes.append(self._start(self._new_name(role), role))
        self._learner_starts()
        self._at(self._soon(3.0), self._fault)
        if self.hostile:
            self._at(self._soon(3.0), self._greet_by_a_foreign_name)

    # --- time ---

    def _at(self, delay: float, do: Callable[[], None]) -> None:
        self.order += 1
        heapq.heappush(self.agenda, (self.now + delay, self.order, do))

    def _soon(self, scale: float) -> float:
        return self.random.random() * scale

    def run(self, seconds: float) -> None:
        """Let `seconds` of virtual time pass."""
        end = self.now + seconds
        while self.agenda and self.agenda[0][0] <= end:
            self.now, _, do = heapq.heappop(self.agenda)
            do()
        self.now = end

    # --- faults ---

    def _fault(self) -> None:
        if not self.chaos:
            return
        self._at(self._soon(3.0), self._fault)
        process = self.random.choice(self.processes)
        dice = self.random.random()
        if dice < 0.45:
            self._break(process.line)
        elif dice < 0.65 and self.process_faults:
            self._kill(process)
        elif dice < 0.8 and self.process_faults:
            stall = self.random.choice((1.0, 2 * SILENCE, 1.5 * FORGET))
            process.stalled_until = max(process.stalled_until, self.now + stall)  # a shorter one would reorder what waits
        elif self.learner_faults:
            self._learner_dies()

    def _break(self, line: Line | None) -> None:
        if line is not None and line.cut > self.now:
            line.cut = self.now + self._soon(0.3) * self.random.randint(0, 1)
            line.worker.line, line.worker.reconnect_at = None, self.now + self._soon(2.0) * self.random.randint(0, 1)

    def _kill(self, process: Process) -> None:
        if process.alive:
            self._break(process.line)
            process.alive = False
            name = self._new_name(process.role) if self.names_change and self.random.random() < 0.5 else process.name
            self.processes[self.processes.index(process)] = self._start(name, process.role)

    def _greet_by_a_foreign_name(self) -> None:
        """Send up to four Hellos of an unknown sender, with counters of env steps that no process made, then experience."""
        if not self.chaos:
            return
        self._at(self._soon(3.0), self._greet_by_a_foreign_name)
        victim = self.random.choice(self.processes)
        if self.learner is None:
            return
        # Never the very incarnation: a process that uses it, and greets while its worker is away, is that worker to the learner.
        incarnation = victim.key.incarnation + self.random.choice((-1, 1)) * self.random.randrange(300, 600)
        incarnation += self.random.choice((0, 2**60, 2**62))
        role = self.random.choice(("actor", "evaluator"))
        side = WorkerSide(Identity(role=role, name=victim.name, incarnation=incarnation, software=""))
        foreign = Process(name=victim.name, role=role, side=side, sick=False, pace=1.0)
        self.order += 1
        foreign.line = Line(b"%d" % self.order, self.life, foreign)
        self.lines[foreign.line.route] = foreign.line
        produced = self.random.randint(0, 9)
        hello = Hello(
            role=role, worker=victim.name, incarnation=incarnation, software="",
            env_signature="", resend_from=self.random.choice((0, 2**40)), completed=produced, produced=produced,
        )  # fmt: skip
        self.true[foreign.key] = max(self.true.get(foreign.key, 0), produced)
        for _ in range(self.random.randint(1, 4)):
            self._up(foreign, hello)
            foreign.line.up_at += self._soon(0.6)
        for seq in range(hello.resend_from, hello.resend_from + 2 * self.room):
            arrays = {"reward": SOUND, "valid": VALID[0]}
            self._up(foreign, Trajectory(seq=seq, version=0, env_steps=0, env_steps_sent=produced, arrays=arrays))

    # --- workers ---

    def _new_name(self, role: str) -> str:
        """One that nobody goes by now; it may have been somebody's."""
        used = {process.name for process in self.processes}
        return self.random.choice([name for name in (f"{role}-{number}" for number in range(8)) if name not in used])

    def _start(self, name: str, role: str) -> Process:
        # As from a clock: larger at each start, and the clocks of some hosts are ahead of the others'.
        self.starts += 1
        clock = self.starts + 1000 * (name[-1] in "357") - self.clocks_step * self.random.choice((0, 0, 500))
        incarnation = 1000 * (2000 + clock)
        side = WorkerSide(Identity(role=role, name=name, incarnation=incarnation, software="0"), env_signature="env")
        sick, pace = self.random.random() < 0.15, self.random.choice((0.1, 0.3, 1.0))
        process = Process(name=name, role=role, side=side, sick=sick, pace=pace)
        self.started.append(process)
        self.true[process.key] = 0
        process.reconnect_at = self.now + self._soon(2.0)
        self._perform(process, process.side.request_snapshot(-1, self.now))
        self._at(0.0, lambda: self._tick(process))
        self._at(0.0, lambda: self._work(process))
        return process

    def _awake(self, process: Process, do: Callable[[], None]) -> bool:
        """Return whether the process runs; schedule `do` for the end of a stall."""
        if process.alive and self.now < process.stalled_until:
            self._at(process.stalled_until - self.now, do)
            return False
        return process.alive

    def _tick(self, process: Process) -> None:
        if not self._awake(process, lambda: self._tick(process)):
            return
        if process.line is None and self.learner is not None and self.now >= process.reconnect_at:
            self.order += 1
            process.line = Line(b"%d" % self.order, self.life, process)
            self.lines[process.line.route] = process.line
        self._tell(process, e.Tick())
        self._at(0.25, lambda: self._tick(process))

    def _work(self, process: Process) -> None:
        """Half a rollout of an actor, or a game of the evaluator."""
        if not self._awake(process, lambda: self._work(process)):
            return
        self._at(process.pace * (0.2 + self._soon(1.0)), lambda: self._work(process))
        if process.draining:
            process.dropped, process.rollout = process.dropped + process.rollout, 0
            self._count(process)
            self._perform(process, process.side.close("drained", self.now))
            process.alive = False
        elif process.role == "evaluator":
            evaluation = Evaluation(version=process.version or 0, mode="greedy", arrays=EVALUATION)
            self._perform(process, process.side.send(evaluation, self.now))
            self._perform(process, process.side.request_snapshot(evaluation.version, self.now))
        elif process.version is None or not (process.rollout or process.side.has_credit):
            self._perform(process, process.side.request_snapshot(-1 if process.version is None else process.version, self.now))
        elif process.rollout:
            self._perform(process, process.side.request_snapshot(process.version, self.now))
            self._step(process, self.random.randint(0, 4))
            steps, process.rollout = process.rollout, 0
            arrays = {"reward": SICK if process.sick and self.random.random() < 0.3 else SOUND, "valid": VALID[steps]}
            experience = Trajectory(seq=0, env_steps_sent=0, version=process.version, env_steps=steps, arrays=arrays)
            self._perform(process, process.side.offer(experience, self.now))
        else:
            self._step(process, self.random.randint(1, 4))

    def _step(self, process: Process, steps: int) -> None:
        process.rollout += steps
        process.produced += steps
        self.true[process.key] += steps
        self._count(process)

    def _count(self, process: Process) -> None:
        dropped = (Dropped(reason="unfinished", env_steps=process.dropped),) if process.dropped else ()
        process.side.count(produced=process.produced, dropped=dropped)

    def _tell(self, process: Process, event: e.Event) -> None:
        self._perform(process, process.side.handle(event, self.now))

    def _perform(self, process: Process, instructions: list[e.Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case e.Send(message=message):
                    self._up(process, message)
                case Snapshot(version=version):
                    process.version = version
                case Drain():
                    process.draining = True
                case e.Refused(code=code):
                    assert code == RefusalCode.DRAINING
                    process.alive = False
                case e.NewIncarnation():
                    process.produced = process.dropped = process.rollout = 0
                    self.true[process.key] = 0

    # --- the network ---

    def _up(self, process: Process, message: Message) -> None:
        line, key = process.line, process.key
        if line is None or (self.lossy and self.chaos and self.random.random() < 0.02):
            self._tell(process, e.Unsent(message=message))
            return
        envelope = Envelope(run=process.side.run, message=message)
        for _ in range(self._copies()):
            line.up_at = max(line.up_at, self.now + self._soon(0.3))
            self._at(line.up_at - self.now, lambda: self._learner_hears(line, envelope, key))

    def _down(self, route: bytes, message: Message) -> None:
        line = self.lines[route]
        if line.cut < self.now:
            if self.random.random() < 0.5:  # else the break was not noticed yet
                self._learner_handles(e.Unsent(route=route, message=message))
            return
        for _ in range(self._copies()):
            line.down_at = max(line.down_at, self.now + self._soon(0.3))
            self._at(line.down_at - self.now, lambda: self._worker_hears(line, message))

    def _copies(self) -> int:
        dice = self.random.random() if self.chaos else 0.5
        return 0 if self.lossy and dice < 0.02 else 2 if dice > 0.97 else 1

    def _worker_hears(self, line: Line, message: Message) -> None:
        if line.worker.line is line and self._awake(line.worker, lambda: self._worker_hears(line, message)):
            self._tell(line.worker, e.Received(envelope=Envelope(run="run", message=message)))

    # --- the learner ---

    def _learner_starts(self) -> None:
        self.life += 1
        self.learner = LearnerSide(self.config, resumed=self.crashes > 0)
        self.books, self.queue, self.taken = (
            Books(),
            deque[tuple[WorkerKey, e.Experience]](),
            list[tuple[WorkerKey, e.Experience]](),
        )
        self.version = 0
        if self.checkpoint is not None and self.random.random() < 0.8:
            state, books, self.version = self.checkpoint
            self.learner.saved.load_state_dict(json.loads(state))
            self.books = books.copy()
            if self.accounts is not None and self.random.random() < 0.8:
                self._take_over(*self.accounts)
        else:
            self.checkpoint = None
        self.accounts = None
        life = self.life
        self._at(self._soon(1.0), lambda: self._publish(life))
        self._at(0.0, lambda: self._learner_ticks(life))
        self._at(0.0, lambda: self._train(life))

    def _take_over(self, accounts: str, then: Books) -> None:
        """Load the accounts that the killed learner left beside its checkpoint, and correct the books by them."""
        self.learner.saved.load_accounts(json.loads(accounts))
        self.books.reported, self.books.dropped = Counter(then.reported), Counter(then.dropped)
        self._check()

    def _learner_dies(self) -> None:
        if self.learner is not None:
            self.learner, self.life, self.crashes = None, self.life + 1, self.crashes + 1
            for process in self.processes:
                self._break(process.line)
            self._at(self._soon(2 * SILENCE), self._learner_starts)

    def _publish(self, life: int) -> None:
        if life == self.life:
            self._learner_handles(e.Published(snapshot=Snapshot(version=self.version, env_steps=0, precision="fp32", layout="x")))

    def _learner_ticks(self, life: int) -> None:
        if life == self.life:
            self._learner_handles(e.Tick())
            pending = {key for key, _ in (*self.queue, *self.taken)}
            assert len([*self.learner._registry]) <= self.config.max_actors + 1 + len(pending), "workers kept for ever"
            self._at(0.25, lambda: self._learner_ticks(life))

    def _train(self, life: int) -> None:
        """Take a batch when it is there, train for a while, complete, publish; save a checkpoint at any time."""
        if life != self.life or self.learner is None:
            return
        self._at(0.05 + self._soon(0.3), lambda: self._train(life))
        if self.random.random() < 0.1:
            self.checkpoint, self.accounts = (json.dumps(self.learner.saved.state_dict()), self.books.copy(), self.version), None
        elif self.random.random() < 0.3:
            self.accounts = json.dumps(self.learner.saved.accounts()), self.books.copy()
        if self.taken:
            stale = self.random.random() < 0.1
            for numbers in self._partly([(key, message.seq) for key, message in self.taken]):
                if not stale:
                    for key, message in self.taken:
                        if (key, message.seq) in numbers:
                            assert (key, message.seq) not in self.books.trained, "trained twice"
                            self.books.trained[key, message.seq] = message.env_steps
                self.taken = [item for item in self.taken if (item[0], item[1].seq) not in numbers]
                self._learner_handles(e.Completed(items=tuple(numbers), reason="stale" if stale else None))
            self.version += 1
            self._publish(life)
        elif len(self.queue) >= self.config.batch:
            self.taken = [self.queue.popleft() for _ in range(self.config.batch)]
            self._learner_handles(e.Taken(items=tuple((key, message.seq) for key, message in self.taken)))

    def _partly(self, items: list[tuple[WorkerKey, int]]) -> Iterator[list[tuple[WorkerKey, int]]]:
        cut = self.random.randint(0, len(items))
        first = self.random.choice((items[:cut], items[cut:]))  # the later half may meet its end first
        yield from (part for part in (first, [item for item in items if item not in first]) if part)

    def _learner_hears(self, line: Line, envelope: Envelope, key: WorkerKey) -> None:
        learner, message = self.learner, envelope.message
        if learner is None or line.life != self.life or self.now > line.cut:
            return
        before = learner.messages_dropped[DropReason.UNKNOWN_SENDER]
        uncredited = learner.messages_dropped[DropReason.UNCREDITED]
        known = learner._registry.find(message) if isinstance(message, Hello) else None
        closed = (
            known is not None and known.state is WorkerState.CLOSED and known.key == key
        )  # the learner counts reports on a closed account
        instructions = learner.handle(e.Received(route=line.route, envelope=envelope), self.now)
        welcomed = any(isinstance(i, e.Send) and isinstance(i.message, Welcome) for i in instructions)
        if welcomed or closed if isinstance(message, Hello) else learner.messages_dropped[DropReason.UNKNOWN_SENDER] == before:
            self._observe(key, message)
        hostile = line.worker not in self.started or isinstance(message, Evaluation)  # an evaluator may send too many
        assert hostile or learner.messages_dropped[DropReason.UNCREDITED] == uncredited, "an honest worker was refused"
        self._check_streams(line, key, instructions)
        self._learner_performs(instructions)

    def _observe(self, key: WorkerKey, message: Message) -> None:
        books = self.books
        if isinstance(message, Report | Goodbye):
            books.dropped[key] = max(books.dropped[key], sum(drop.env_steps for drop in message.dropped))
        if isinstance(message, Report | Goodbye | Hello):
            books.reported[key] = max(books.reported[key], message.produced)
        if isinstance(message, ExperienceMessage):
            books.reported[key] = max(books.reported[key], message.env_steps_sent + books.dropped[key])
        if isinstance(message, Goodbye):
            books.finished.add(key)

    def _learner_handles(self, event: e.Event) -> None:
        if self.learner is not None:
            self._learner_performs(self.learner.handle(event, self.now))

    def _learner_performs(self, instructions: list[e.Instruction]) -> None:
        self.queue.extend((admit.worker, admit) for admit in instructions if isinstance(admit, e.Experience))
        self._check()
        for send in instructions:
            if isinstance(send, e.Send):
                self._down(send.route, send.message)

    # --- the laws ---

    def _check_streams(self, line: Line, key: WorkerKey, instructions: list[e.Instruction]) -> None:
        for welcome in (i.message for i in instructions if isinstance(i, e.Send) and isinstance(i.message, Welcome)):
            role = line.worker.role
            assert welcome.index < self.config.slots(role), "a place that is not there"
            stream = role, welcome.index, welcome.generation
            assert self.books.streams.setdefault(stream, key) == key, "random numbers given to two workers"

    def _check(self) -> None:
        learner, books = self.learner, self.books
        learner.check_ledger()
        assert learner.ledger.produced == books.reported.total(), "produced"
        assert learner.ledger.trained == sum(books.trained.values()), "trained"
        assert learner.ledger.queued == sum(message.env_steps for _, message in (*self.queue, *self.taken)), "queued"
        assert all(steps <= self.true[key] for key, steps in books.reported.items()), "more than was ever stepped"
        waiting = Counter(message.index for _, message in self.queue)
        assert all(number <= self.room for number in waiting.values()), "a queue beyond the credits of a slot"
        assert all(learner.connected(role) <= self.config.slots(role) for role in ("actor", "evaluator"))

    def calm_down(self) -> None:
        """End all faults; where single messages were lost, only a new connection shows the gap."""
        self.chaos = False
        for process in self.processes:
            process.sick = False
            if self.lossy:
                self._break(process.line)

    def check_alive(self) -> None:
        """Assert that every actor's experience is trained on again, and that all workers have a recent policy."""
        done, lives = dict(self.books.trained), self.life
        self.run(CALM_SECONDS)
        assert self.life == lives
        for process in self.processes:
            assert process.alive
            assert process.version >= self.version - 20, f"{process.name} got no policy"
            new = [number for number in self.books.trained if number[0] == process.key and number not in done]
            assert process.role == "evaluator" or len(new) >= 3, f"{process.name} makes no progress"

    def drain(self) -> None:
        """End the run, and close the books."""
        self._learner_handles(e.DrainAsked(reason="done", deadline_seconds=DRAIN_SECONDS))
        self.run(DRAIN_SECONDS)
        if self.learner is None:
            return  # killed while draining: a resumed learner goes on
        self.life += 1  # ticks and training end
        self._learner_handles(e.Taken(items=tuple((key, message.seq) for key, message in self.queue)))
        items = tuple((key, message.seq) for key, message in (*self.taken, *self.queue))
        self.taken, self.queue = [], deque()
        self._learner_handles(e.Completed(items=items, reason=DropReason.RUN_ENDED))
        self._learner_handles(e.Ended())
        ledger = self.learner.ledger
        assert (ledger.in_flight, ledger.queued) == (0, 0)
        assert ledger.produced == ledger.trained + ledger.dropped.total()
        assert all(self.books.reported[key] == self.true[key] for key in self.books.finished), "a goodbye lied"

    def check_reasons(self) -> None:
        """Reasons that need a fault of their own do not appear without it."""
        dropped = self.learner.ledger.dropped
        assert dropped[DropReason.UNCREDITED] == 0
        # What a killed learner had refused after its checkpoint is a hole to the next, and rightly not sent again.
        assert self.lossy or self.crashes or dropped[DropReason.GAP] == 0, "a gap without a lost message"
        assert self.crashes or self.hostile or dropped[DropReason.ROLLED_BACK] == 0


def simulate(seed: int) -> World:
    """One world, from chaos over calm to the end of its run. Any broken law raises."""
    world = World(seed)
    world.run(CHAOS_SECONDS)
    world.calm_down()
    world.run(2 * SILENCE + 1.5 * FORGET)  # the last stall ends, what was lost is noticed
    world.check_alive()
    world.chaos = world.random.random() < 0.5  # the last breath may be drawn in chaos, too
    if world.chaos:
        world.learner_faults = world.learner_faults and world.random.random() < 0.3
        world._fault()
    world.drain()
    if world.learner is not None:
        world.check_reasons()
    return world


@pytest.mark.parametrize("first", range(0, 75, 25))
def test_the_books_balance_whatever_happens(first: int) -> None:
    """A night on a bad network with dying machines: nothing is lost in silence, trained twice, or stuck for ever."""
    for seed in range(first, first + 25):
        try:
            simulate(seed)
        except Exception as error:
            error.add_note(f"seed {seed}; reproduce: python {__file__} {seed}")
            raise


if __name__ == "__main__":
    start, end = int(sys.argv[1]), int(sys.argv[-1])
    for number in range(start, end + 1):
        try:
            simulate(number)
        except Exception as error:
            error.add_note(f"seed {number}")
            raise
