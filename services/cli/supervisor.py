"""Who is started, restarted, ended or given up, and when: the decisions of `rookery train`, and nothing else.

Events come in with the time, instructions come out. This module knows no process, clock, signal or file;
`processes.py` performs what it decides. The rules, in the order in which a run meets them:

    a dead actor or evaluator comes back with a delay that doubles; a dead learner too, but only so many times
    exit code 2 of anybody is a setting that no restart can mend: the run gives up and shows the message
    the learner's exit code 0 is the end of the run: the others leave by themselves, or are made to
    a stop asked for ends the learner first, because it has something to save; asked for twice, it kills
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from common.units import Seconds

LEARNER = "learner"
EVALUATOR = "evaluator"
ACTOR = "actor"
CONFIG_EXIT_CODE = 2


@dataclass(frozen=True, slots=True)
class Begin:
    """The run starts."""


@dataclass(frozen=True, slots=True)
class Exited:
    """A child is gone: `code` as `subprocess` gives it, negative for a signal."""

    child: str
    code: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Ctrl-C or SIGTERM reached the supervisor; the second one means now."""


@dataclass(frozen=True, slots=True)
class Scale:
    """From now on the run has this many actors."""

    actors: int


@dataclass(frozen=True, slots=True)
class Start:
    """Start the child; `resume` tells the learner to continue from its newest checkpoint."""

    child: str
    resume: bool = False


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ask the child to end (SIGTERM)."""

    child: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End the child, with all that it has started (SIGKILL)."""

    child: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Tell the user why the run ends, and show the child's last words."""

    child: str
    reason: str
    exit_code: int


Event: TypeAlias = Begin | Exited | Tick | StopRequested | Scale
Instruction: TypeAlias = Start | Terminate | Kill | GiveUp


class Outcome(StrEnum):
    """How the run went, as far as processes can tell; the target is the learner's to judge."""

    RUNNING = "running"
    FINISHED = "finished"  # the learner ended by itself
    STOPPED = "stopped"  # asked for, and the learner saved its work
    REFUSED = "refused"  # a child found a setting it cannot run with
    FAILED = "failed"
    KILLED = "killed"  # asked for twice


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """The waits, in seconds. Each service promises an end: 5 s for an actor, 15 s for the learner; we wait a little longer."""

    first_delay: Seconds = 0.5
    longest_delay: Seconds = 30.0
    healthy_after: Seconds = 60.0  # a child up for this long starts its delays afresh
    drained: Seconds = 60.0  # an actor that left politely may have been drained by a learner still writing: look again then
    learner_window: Seconds = 300.0
    learner_restarts: int = 5  # within the window
    learner_stop: Seconds = 20.0
    leave: Seconds = 5.0
    terminate: Seconds = 6.0


@dataclass(slots=True)
class _Child:
    wanted: bool = True
    alive: bool = False
    started_at: Seconds = 0.0
    failures: int = 0  # in a row
    restart_at: Seconds | None = None


@dataclass(slots=True, kw_only=True)
class Supervisor:
    """One run's children. Call `handle` with every event, perform what it returns, until `done`."""

    actors: int
    evaluator: bool
    resume: bool = False
    patience: Patience = field(default_factory=Patience)
    outcome: Outcome = Outcome.RUNNING
    restarts: dict[str, int] = field(default_factory=dict)  # by child, for the view
    _children: dict[str, _Child] = field(default_factory=dict)
    _learner_deaths: list[Seconds] = field(default_factory=list)
    _due: list[tuple[Seconds, Instruction]] = field(default_factory=list)  # for who has not left by then
    _stopping: bool = False

    def __post_init__(self) -> None:
        """Name the children in the order in which they start: the learner first, since all others look for it."""
        names = [LEARNER, *([EVALUATOR] if self.evaluator else []), *actor_names(self.actors)]
        self._children = {name: _Child() for name in names}
        self.restarts = dict.fromkeys(names, 0)

    @property
    def children(self) -> tuple[str, ...]:
        """Names of all children, alive or not."""
        return tuple(self._children)

    @property
    def done(self) -> bool:
        """Whether the run is over and nobody is left."""
        return self._stopping and not self._alive()

    def handle(self, event: Event, now: Seconds) -> list[Instruction]:
        """Decide what follows from `event` at time `now` (any monotonic clock)."""
        match event:
            case Begin():
                return [self._start(name, now, resume=self.resume) for name in self._children]
            case Exited(child, code):
                return self._exited(child, code, now)
            case Tick():
                return self._tick(now)
            case StopRequested():
                return self._stop_requested(now)
            case Scale(actors):
                return self._scale(actors, now)

    def _start(self, name: str, now: Seconds, *, resume: bool) -> Start:
        child = self._children[name]
        child.alive, child.started_at, child.restart_at = True, now, None
        return Start(name, resume=resume and name == LEARNER)

    def _alive(self) -> list[str]:
        return [name for name, child in self._children.items() if child.alive]

    def _exited(self, name: str, code: int, now: Seconds) -> list[Instruction]:
        child = self._children[name]
        child.alive = False
        if self._stopping:
            return self._learner_stopped(code, now) if name == LEARNER else []
        if name == LEARNER and code == 0:
            self.outcome = Outcome.FINISHED
            return self._dismiss(now, leave_by=now + self.patience.leave)
        if not child.wanted:
            return []
        if code == CONFIG_EXIT_CODE:
            return self._give_up(name, "its settings cannot work", Outcome.REFUSED, code, now)
        if name == LEARNER and self._died_too_often(now):
            reason = f"it died {len(self._learner_deaths)} times in {self.patience.learner_window:.0f} seconds"
            return self._give_up(name, f"{reason} ({describe_exit(code)})", Outcome.FAILED, code, now)
        child.restart_at = now + self._delay(child, code, now)
        return []

    def _delay(self, child: _Child, code: int, now: Seconds) -> Seconds:
        if code == 0:
            return self.patience.drained
        if now - child.started_at >= self.patience.healthy_after:
            child.failures = 0
        child.failures += 1
        doubled: float = self.patience.first_delay * 2.0 ** min(child.failures - 1, 32)
        return min(doubled, self.patience.longest_delay)

    def _died_too_often(self, now: Seconds) -> bool:
        recent = [at for at in self._learner_deaths if now - at < self.patience.learner_window]
        self._learner_deaths = [*recent, now]
        return len(self._learner_deaths) > self.patience.learner_restarts

    def _scale(self, actors: int, now: Seconds) -> list[Instruction]:
        """Start who is missing; those with the highest numbers leave, as politely as at the end of the run."""
        if self._stopping:
            return []
        self.actors, names = actors, actor_names(actors)
        for name in names:
            self._children.setdefault(name, _Child()).wanted = True
            self.restarts.setdefault(name, 0)
        self._due = [(at, instruction) for at, instruction in self._due if instruction.child not in names]
        leaving = [name for name in self._alive() if name.startswith(ACTOR) and name not in names and self._children[name].wanted]
        for name in self._children.keys() - {LEARNER, EVALUATOR, *names}:
            self._children[name].wanted, self._children[name].restart_at = False, None
        self._due += [(now + self.patience.terminate, Kill(name)) for name in leaving]
        absent = [name for name in names if not self._children[name].alive and self._children[name].restart_at is None]
        return [*(self._start(name, now, resume=False) for name in absent), *map(Terminate, leaving)]

    def _tick(self, now: Seconds) -> list[Instruction]:
        ripe = [instruction for at, instruction in self._due if at <= now and self._children[instruction.child].alive]
        self._due = [entry for entry in self._due if entry[0] > now]
        if self._stopping:
            return ripe
        ready = [name for name, child in self._children.items() if child.restart_at is not None and child.restart_at <= now]
        for name in ready:
            self.restarts[name] += 1
        return [*ripe, *(self._start(name, now, resume=True) for name in ready)]

    def _stop_requested(self, now: Seconds) -> list[Instruction]:
        if not self._stopping:
            self.outcome = Outcome.STOPPED
            return self._stop(now)
        self.outcome = Outcome.KILLED
        return [Kill(name) for name in self._alive()]

    def _give_up(self, name: str, reason: str, outcome: Outcome, code: int, now: Seconds) -> list[Instruction]:
        self.outcome = outcome
        return [GiveUp(name, reason, code), *self._stop(now)]

    def _stop(self, now: Seconds) -> list[Instruction]:
        """End the learner first: it drains the actors, then writes its last checkpoint and summary."""
        if not self._children[LEARNER].alive:
            return self._dismiss(now, leave_by=now)
        self._stopping = True
        self._due = [(now + self.patience.learner_stop, Kill(LEARNER))]
        return [Terminate(LEARNER)]

    def _learner_stopped(self, code: int, now: Seconds) -> list[Instruction]:
        # Ended by the signal itself: it was still starting, so there was nothing to save.
        if code not in (0, -signal.SIGTERM, 128 + signal.SIGTERM) and self.outcome is Outcome.STOPPED:
            self.outcome = Outcome.FAILED  # asked to save and end, it did not
        return [] if self.outcome is Outcome.KILLED else self._dismiss(now, leave_by=now)

    def _dismiss(self, now: Seconds, *, leave_by: Seconds) -> list[Instruction]:
        """The learner is gone: whoever is still here at `leave_by` is asked to end, and killed a little later."""
        self._stopping = True
        alive = self._alive()
        kills: list[tuple[Seconds, Instruction]] = [(leave_by + self.patience.terminate, Kill(name)) for name in alive]
        self._due = [*((leave_by, Terminate(name)) for name in alive), *kills]
        return self._tick(now)


def actor_names(actors: int) -> list[str]:
    """Of that many, in the order in which they start."""
    return [f"{ACTOR}-{number}" for number in range(actors)]


def describe_exit(code: int) -> str:
    """An exit code in words: `exit code 1`, or `signal 9` for a negative one."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"
