"""The decisions of `rookery train`: which child process starts, restarts or stops, and when.

Pure: a method for each event gets the time and returns instructions, which `processes.py` executes. The rules are in
services/cli/README.md ("Rules of the supervisor").
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.observability.deployment import ACTOR, ENV_WORKER, EVALUATOR, LEARNER
from common.units import EnvSteps, Seconds
from services.cli.train.instructions import (
    CONFIG_EXIT_CODE,
    ENDED_BY_SIGTERM,
    Instruction,
    Kill,
    Outcome,
    ReportCrash,
    ReportFailure,
    ReportRefusal,
    Start,
    Terminate,
    actor_names,
    child_names,
    describe_exit,
    rank_names,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Delays and limits of the supervisor.

    A worker exits within 5 s of SIGTERM. A learner waits at most 4 s for its workers, 8 s for trackers and store, and 2 s for
    its last messages, and saves a checkpoint. The timeouts are longer.
    """

    evaluator_start: Seconds = 3.0  # after the others, which import meanwhile: training does not wait for a score
    min_restart_delay: Seconds = 0.5
    max_restart_delay: Seconds = 30.0
    healthy_after: Seconds = 60.0  # time without a crash after which the back-off starts again from its minimum
    restart_after_drain: Seconds = 60.0  # of a worker that exited with 0: the learner drained it and may be about to end the run
    learner_window: Seconds = 300.0
    learner_restarts: int = 5  # of one rank, within the window
    lost_rank: Seconds = 345.0  # for the other ranks to end by themselves: they wait 330 s for one that saves, at most
    first_crashes: int = 2  # of every actor, before any experience was accepted
    first_refusals: int = 3  # messages, before any experience was accepted
    crashes: int = 8  # of every actor since experience was last accepted: with the back-off two minutes
    refusals: int = 16  # messages since experience was last accepted, so many that the learner evicts their sender ...
    refused_for: Seconds = 20.0  # ... and since this time
    report_refusals_every: Seconds = 60.0
    learner_stop: Seconds = 20.0
    exit: Seconds = 5.0  # for workers to exit by themselves at the end of the run
    terminate: Seconds = 6.0  # from SIGTERM to SIGKILL


@dataclass(slots=True)
class _Child:
    wanted: bool = True  # False after the number of actors was lowered
    running: bool = False
    started_at: Seconds | None = None  # the last time
    died: bool = False  # at its last end; False where it was drained
    crashes: int = 0  # in a row, for the back-off
    crashes_in_vain: int = 0  # since any experience was last accepted
    restart_at: Seconds | None = None
    crashed_at: list[Seconds] = field(default_factory=list)  # within `learner_window`; of a rank of the learner


@dataclass(slots=True, kw_only=True)
class Supervisor:
    """Restarts and stops the children of one run, until it is `done`.

    Call the method of each event, with the time `now` of a monotonic clock, and execute the instructions that it returns.
    """

    actors: int
    evaluator: bool
    env_workers: int = 0  # of each actor, which is a policy server where it has any
    ranks: int = 1  # of the learner
    resume: bool = False
    timeouts: Timeouts = field(default_factory=Timeouts)
    outcome: Outcome = Outcome.RUNNING
    restarts: int = 0  # of all children that died
    works: bool = False  # True once the learner has accepted experience since the start
    _children: dict[str, _Child] = field(default_factory=dict)
    _accepted: EnvSteps | None = None  # env steps in the newest count; None: unknown yet
    _accepted_at: Seconds = 0.0  # time of the newest growth
    _refused: int = 0  # messages in the newest count
    _refused_before: int = 0  # when experience was last accepted
    _refusals_reported: int = 0
    _report_refusals_at: Seconds = 0.0
    _due: list[tuple[Seconds, Terminate | Kill]] = field(default_factory=list)  # executed at that time if the child still runs
    _stopping: bool = False
    _stop_requested: bool = False
    _saved: bool = False  # the learner has ended, and has saved its state

    def __post_init__(self) -> None:
        names = child_names(ranks=self.ranks, evaluator=self.evaluator, actors=self.actors, env_workers=self.env_workers)
        self._children = {name: _Child() for name in names}

    @property
    def done(self) -> bool:
        """True once the run is over and no child runs."""
        return self._stopping and not self._running()

    def begin(self, now: Seconds) -> list[Instruction]:
        """Start all children, the evaluator a little later."""
        if self.evaluator:
            self._children[EVALUATOR].restart_at = now + self.timeouts.evaluator_start
        return [self._start(name, now, resume=self.resume) for name in self._children if name != EVALUATOR]

    def exited(self, name: str, code: int, now: Seconds) -> list[Instruction]:
        """Restart a child that ended with `code`, negative for a signal, or fail or end the run."""
        child = self._children[name]
        child.running = False
        awaited = any(instruction.child == name for _, instruction in self._due)
        self._due = [(at, instruction) for at, instruction in self._due if instruction.child != name]  # none is for its successor
        if self._stopping:
            return self._learner_stopped(code, now) if name == LEARNER else []
        if name == LEARNER and code == 0:
            self.outcome, self._saved = Outcome.FINISHED, True
            return self._stop_workers(now, terminate_at=now + self.timeouts.exit)
        if not child.wanted:
            return []
        if code == CONFIG_EXIT_CODE:
            return self._fail(name, "a setting is invalid", Outcome.REFUSED, code, now)
        if code != 0 and name in rank_names(self.ranks) and self._crashed_too_often(child, now):
            reason = f"{len(child.crashed_at)} crashes in {self.timeouts.learner_window:.0f} seconds"
            return self._fail(name, f"{reason} ({describe_exit(code)})", Outcome.FAILED, code, now)
        if code != 0 and not awaited:
            self._kill_hung_ranks(name, now)
        child.restart_at, child.died = now + self._restart_delay(child, code, now), code != 0
        return self._crashed(name, code, now) if code != 0 else []

    def tick(self, now: Seconds) -> list[Instruction]:
        """Return the instructions that are due by now: restarts, signals after a time limit, a failure."""
        running = set(self._running())
        due: list[Instruction] = [instruction for at, instruction in self._due if at <= now and instruction.child in running]
        self._due = [entry for entry in self._due if entry[0] > now]
        if self._stopping:
            return due
        if refused := self._check_refusals(now):
            return [*due, *refused]
        restarts = [name for name, child in self._children.items() if child.restart_at is not None and child.restart_at <= now]
        self.restarts += sum(self._children[name].died for name in restarts)
        return [*due, *(self._start(name, now, resume=True) for name in restarts)]

    def request_stop(self, now: Seconds) -> list[Instruction]:
        """Stop the run, unless it already ends; at the second request kill all children."""
        if self._stop_requested:
            if self.outcome is Outcome.STOPPED and not self._saved:
                self.outcome = Outcome.KILLED
            return [Kill(name) for name in self._running()]
        self._stop_requested = True
        if self._stopping:
            return []
        self.outcome = Outcome.STOPPED
        return self._stop(now)

    def set_actors(self, actors: int, now: Seconds) -> list[Instruction]:
        """Start the actors that are missing of this number, or terminate those with the highest numbers."""
        if self._stopping:
            return []
        self.actors, names = actors, actor_names(actors)
        for name in names:
            self._children.setdefault(name, _Child()).wanted = True
        self._due = [(at, instruction) for at, instruction in self._due if instruction.child not in names]
        surplus = [
            name for name in self._running() if name.startswith(ACTOR) and name not in names and self._children[name].wanted
        ]
        for name in {name for name in self._children if name.startswith(ACTOR)} - set(names):
            self._children[name].wanted, self._children[name].restart_at = False, None
        self._due += [(now + self.timeouts.terminate, Kill(name)) for name in surplus]
        absent = [name for name in names if not self._children[name].running and self._children[name].restart_at is None]
        return [*(self._start(name, now, resume=False) for name in absent), *map(Terminate, surplus)]

    def count_experience(self, accepted: EnvSteps, refused: int, now: Seconds) -> list[Instruction]:
        """Report refusals, and fail the run where all experience is refused.

        The learner has admitted `accepted` env steps and refused `refused` messages of actors, as of now.
        """
        before = self._accepted if self._accepted is not None else accepted if self.resume else 0
        self._accepted = accepted
        if refused < self._refused:  # the learner was restarted, and counts from 0
            self._refused_before = self._refusals_reported = 0
        self._refused = refused
        if accepted > before:
            self.works, self._accepted_at = True, now
            self._refused_before = refused
            for child in self._children.values():
                child.crashes_in_vain = 0
        return self._check_refusals(now)

    def _start(self, name: str, now: Seconds, *, resume: bool) -> Start:
        child = self._children[name]
        child.running, child.started_at, child.restart_at = True, now, None
        return Start(name, resume=resume and name in rank_names(self.ranks))

    def _running(self) -> list[str]:
        return [name for name, child in self._children.items() if child.running]

    def _crashed(self, name: str, code: int, now: Seconds) -> list[Instruction]:
        """Report a crash; fail the run where no actor, or no env worker, works any more."""
        self._children[name].crashes_in_vain += 1
        alike = [child for child in self._children if child.startswith(ENV_WORKER)]
        if name.startswith(ACTOR):
            alike = actor_names(self.actors)
        limit = self.timeouts.crashes if self.works else self.timeouts.first_crashes
        if name in alike and all(self._children[child].crashes_in_vain >= limit for child in alike):
            when = "since experience was last accepted" if self.works else "before any of its experience was accepted"
            reason = f"{limit} crashes {when} ({describe_exit(code)})"
            return self._fail(name, reason, Outcome.FAILED, code, now)
        return [ReportCrash(name, code)]

    def _check_refusals(self, now: Seconds) -> list[Instruction]:
        """Fail the run where all experience is refused; report the first refusal of a run that works, and later ones at times."""
        if self._stopping or self.actors == 0:
            return []
        refused, limits = self._refused - self._refused_before, self.timeouts
        hopeless = refused >= limits.refusals and now - self._accepted_at >= limits.refused_for
        if hopeless if self.works else refused >= limits.first_refusals:
            reason = f"all its experience is refused ({refused} messages)"
            return self._fail(actor_names(1)[0], reason, Outcome.FAILED, 1, now)
        unreported = self._refused - self._refusals_reported
        if not self.works or unreported == 0 or now < self._report_refusals_at:
            return []
        self._refusals_reported, self._report_refusals_at = self._refused, now + limits.report_refusals_every
        return [ReportRefusal(unreported)]

    def _restart_delay(self, child: _Child, code: int, now: Seconds) -> Seconds:
        if code == 0:
            return self.timeouts.restart_after_drain
        if self.works and child.started_at is not None and now - child.started_at >= self.timeouts.healthy_after:
            child.crashes = 0
        child.crashes += 1
        doubled: float = self.timeouts.min_restart_delay * 2.0 ** min(child.crashes - 1, 32)
        return min(doubled, self.timeouts.max_restart_delay)

    def _crashed_too_often(self, rank: _Child, now: Seconds) -> bool:
        rank.crashed_at = [*(at for at in rank.crashed_at if now - at < self.timeouts.learner_window), now]
        return len(rank.crashed_at) > self.timeouts.learner_restarts

    def _kill_hung_ranks(self, lost: str, now: Seconds) -> None:
        """After a rank is `lost`, have the others killed that do not end by themselves: no rank trains before all are replaced.

        Experience was accepted since the last of them started, or they still wait to join and take the successor of `lost`.
        """
        ranks = rank_names(self.ranks)
        if lost in ranks and self._accepted_at > max(self._children[rank].started_at or 0.0 for rank in ranks):
            self._due += [(now + self.timeouts.lost_rank, Kill(rank)) for rank in ranks if rank != lost]

    def _fail(self, name: str, reason: str, outcome: Outcome, code: int, now: Seconds) -> list[Instruction]:
        self.outcome = outcome
        return [ReportFailure(name, reason, code), *self._stop(now)]

    def _stop(self, now: Seconds) -> list[Instruction]:
        """Stop the learner first: it drains the workers, then writes its last checkpoint and summary."""
        if not self._children[LEARNER].running:
            return self._stop_workers(now, terminate_at=now)
        self._stopping = True
        self._due = [(now + self.timeouts.learner_stop, Kill(LEARNER))]
        return [Terminate(LEARNER)]

    def _learner_stopped(self, code: int, now: Seconds) -> list[Instruction]:
        # A learner that SIGTERM itself ended was still starting, so it had nothing to save.
        self._saved = self._saved or code in (0, *ENDED_BY_SIGTERM)
        if not self._saved and self.outcome is Outcome.STOPPED:
            self.outcome = Outcome.FAILED
        return [] if self.outcome is Outcome.KILLED else self._stop_workers(now, terminate_at=now)

    def _stop_workers(self, now: Seconds, *, terminate_at: Seconds) -> list[Instruction]:
        """Terminate the workers that still run at `terminate_at`, after the learner has ended, and kill them later."""
        self._stopping = True
        running = self._running()
        kills: list[tuple[Seconds, Terminate | Kill]] = [(terminate_at + self.timeouts.terminate, Kill(name)) for name in running]
        self._due = [*((terminate_at, Terminate(name)) for name in running), *kills]
        return self.tick(now)
