"""Storms: one kind of disturbance each, the scene in which it runs, and the measurement of a deployment across storms."""

from __future__ import annotations

import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from benchmarks.chaos.books import Books, close_books
from benchmarks.chaos.deployment import Deployment, Exit, Setup, deployed
from benchmarks.chaos.measure import Sampler, Usage, honest_rate, usage
from common.units import Seconds

PLAIN, NO_BOOKS = Setup(), Books()
LIMIT: Seconds = 180.0  # for flow to come back
FLOW_GOAL: Seconds = 3.0
MEMORY_GOAL = 32.0  # MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Storm:
    """One kind of disturbance, and the goals that it must meet."""

    name: str
    what: str  # one line, for the table
    disturb: Callable[[Scene], None]
    setup: Setup = PLAIN
    needs: Callable[[], str] = str  # why it cannot be done here; "" where it can
    rate_goal: float | None = None  # least honest rate during / before
    flow_goal: Seconds = FLOW_GOAL  # most for the median of the times until experience flows again
    memory_goal: float = MEMORY_GOAL  # most MiB by which the learner's RSS grows
    short: bool = True  # part of the short form


@dataclass
class Scene:
    """The deployment that a storm disturbs, and the record of its observations. Equal seeds give equal random numbers."""

    deployment: Deployment
    chance: random.Random
    short: bool
    flow_back: list[Seconds] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)  # violations beyond the goals of every storm
    before: float = 0.0  # honest env steps per second
    during: float | None = None  # None: not taken yet
    claims: bool = False  # the storm sends env steps that no environment made

    def scaled(self, whole: float, part: float) -> float:
        """Return `whole`, or `part` in the short form."""
        return part if self.short else whole

    @contextmanager
    def rated(self) -> Iterator[None]:
        """Take the honest rate of the block as the rate during the storm."""
        before, at = sum(self.deployment.steps().values()), time.monotonic()
        yield
        self.during = (sum(self.deployment.steps().values()) - before) / (time.monotonic() - at)

    def await_flow(self, since: Seconds | None = None, *, timed: bool = True) -> None:
        """Wait until actors step as only a learner that trains lets them; record the seconds from `since`, or from now."""
        start = time.monotonic() if since is None else since
        mark = self.deployment.mark()
        done = self.deployment.flowing(mark, LIMIT)
        self.flow_back += [at - start for at in done.values()] if timed else []
        if missing := sorted(mark.keys() - done.keys()):
            self.flow_back += [math.inf] * len(missing)
            self.notes.append(f"no flow after {LIMIT:g} s: {', '.join(missing)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The result of one storm."""

    storm: Storm
    seed: int
    skipped: str = ""  # why the storm was skipped
    seconds: Seconds = 0.0
    learner_exits: int = 0  # not caused by the storm
    worker_exits: int = 0
    flow_back: tuple[Seconds, ...] = ()
    rate_before: float = 0.0  # honest env steps per second
    rate_during: float = 0.0
    before: Usage | None = None  # of the learner
    after: Usage | None = None
    peak_rss_mib: float = 0.0
    log_bytes_per_minute: float = 0.0
    notes: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    books: Books = NO_BOOKS


def perform(storms: Sequence[Storm], setup: Setup, *, seed: int, short: bool) -> list[Row]:
    """Start one deployment, run the storms one after the other, end it, and return a row for each.

    The ledger is exact only once the run has ended, so that storms that share a deployment share their books.
    """
    rows: list[Row] = []
    claims = False
    with deployed(setup, short=short) as deployment:
        for storm in storms:
            scene = Scene(deployment=deployment, chance=random.Random(f"{seed}:{storm.name}"), short=short)  # noqa: S311  seeded
            print(f"{storm.name} ...", file=sys.stderr, flush=True)
            rows.append(_pass(storm, scene, seed=seed))
            claims = claims or scene.claims
        exits = len(deployment.exits)
        deployment.finish()
        rows[-1] = _with_exits(rows[-1], deployment.exits[exits:])
        books = close_books(deployment, claims=claims)
    return [replace(row, books=books) for row in rows]


def _pass(storm: Storm, scene: Scene, *, seed: int) -> Row:
    deployment = scene.deployment
    exits, logged, before = len(deployment.exits), deployment.log_bytes(), usage(deployment.pid("learner"))
    scene.before = honest_rate(deployment, scene.scaled(5.0, 1.0))
    began = time.monotonic()
    with Sampler(deployment) as sampler:
        try:
            steps, at = sum(deployment.steps().values()), time.monotonic()
            storm.disturb(scene)
            if scene.during is None:
                scene.during = (sum(deployment.steps().values()) - steps) / (time.monotonic() - at)
            if not scene.flow_back:
                scene.await_flow()
        except TimeoutError as error:
            scene.flow_back.append(math.inf)
            scene.notes.append(str(error))
        seconds = time.monotonic() - began
        time.sleep(scene.scaled(2.0, 0.5))  # the learner frees the memory that the storm made it use
    row = Row(
        storm=storm,
        seed=seed,
        seconds=seconds,
        flow_back=tuple(scene.flow_back),
        rate_before=scene.before,
        rate_during=scene.during or 0.0,
        before=before,
        after=usage(deployment.pid("learner")),
        peak_rss_mib=sampler.peak_rss_mib,
        log_bytes_per_minute=(deployment.log_bytes() - logged) / max(1.0, seconds / 60),
        notes=tuple(scene.notes),
        broken=tuple(scene.broken),
    )
    return _with_exits(row, deployment.exits[exits:])


def _with_exits(row: Row, exits: Sequence[Exit]) -> Row:
    own = [exit_ for exit_ in exits if not exit_.caused]
    learner = sum(exit_.name.startswith("learner") for exit_ in own)
    codes = Counter(f"{exit_.name} ended with {exit_.code}: {exit_.words[-300:]}" for exit_ in own)
    notes = (*row.notes, *(f"{what} ({times} times)" if times > 1 else what for what, times in codes.items()))
    return replace(
        row, learner_exits=row.learner_exits + learner, worker_exits=row.worker_exits + len(own) - learner, notes=notes
    )
