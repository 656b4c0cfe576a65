"""How many actors a run should have, found by trying: the decisions of `rookery train --actors auto`.

More actors are of use until the learner, or the machine they share with it, has enough to do. Both depend on environment,
network and machine in ways that no formula knows, so the run itself is the measurement: it goes on training meanwhile, with
one actor, two, three, four, six ... Those that were nearly as fast as the fastest are tried once more, since a machine's speed
drifts by more than what is sought. It stays with the fewest that are as fast as the fastest. Pure: statuses in, numbers out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import linear_regression

from common.units import EnvSteps, Seconds
from services.cli.status import RunStatus

SETTLE: Seconds = 3.0  # from the last actor's arrival: its first messages, and what waited meanwhile
WINDOW: Seconds = 12.0
LONGEST_WINDOW: Seconds = 60.0  # where updates are rare: a rate wants several of them
READINGS = 10  # different ones, at least
ARRIVAL: Seconds = 60.0  # a process that takes longer to start is not waited for
WORTH = 0.03  # a gain below this is noise
PATIENCE = 2  # numbers in a row without a gain that are tried
NEAR = 0.85  # of the fastest: what a second look may find to be the fastest


@dataclass(slots=True, kw_only=True)
class ActorSearch:
    """Call `look` with every new status and give the run `actors` actors, until `done`."""

    most: int  # actors that may be tried
    after: EnvSteps = 0  # trained on before anything is measured: a warm-up says nothing about the rest of the run
    actors: int = 1
    done: bool = False
    rates: dict[int, float] = field(default_factory=dict)  # env steps trained per second, by number; the mean of two looks
    _again: list[int] | None = None  # numbers to look at once more; None before all were tried once
    _asked_at: Seconds | None = None
    _arrived_at: Seconds | None = None
    _last: EnvSteps | None = None  # reading; a new one is worth keeping only at the moment it changes
    _readings: list[tuple[Seconds, EnvSteps]] = field(default_factory=list)

    def look(self, status: RunStatus, now: Seconds) -> None:
        """Take one more status into account; `now` is on any monotonic clock."""
        if self.done:
            return
        if self._asked_at is None or status.env_steps <= self.after:
            self._asked_at = now
            return
        if self._arrived_at is None:
            if status.peers.get("actor", 0) == self.actors:
                self._arrived_at = now
            elif now - self._asked_at > ARRIVAL:
                self._finish()
            return
        if self._interrupted(status):
            self._begin_anew(now)
        elif now - self._arrived_at >= SETTLE:
            self._measure(status, now, since=self._arrived_at + SETTLE)

    def _interrupted(self, status: RunStatus) -> bool:
        """Somebody died meanwhile, or the learner went back to its checkpoint: this window measures nothing."""
        back = self._last is not None and status.env_steps < self._last
        return back or status.peers.get("actor", 0) != self.actors

    def _begin_anew(self, now: Seconds) -> None:
        self._asked_at, self._arrived_at, self._last, self._readings = now, None, None, []

    def _measure(self, status: RunStatus, now: Seconds, *, since: Seconds) -> None:
        changed, self._last = self._last not in {None, status.env_steps}, status.env_steps
        if changed:
            self._readings.append((now, status.env_steps))
        if now - since < WINDOW or (len(self._readings) < READINGS and now - since < LONGEST_WINDOW):
            return
        # Env steps arrive a batch at a time: a line through all readings errs less than the difference of the outermost two.
        rate = linear_regression(*zip(*self._readings, strict=True)).slope if len(self._readings) > 1 else 0.0
        self.rates[self.actors] = rate if self._again is None else (self.rates[self.actors] + rate) / 2
        self._go_on(now)

    def _go_on(self, now: Seconds) -> None:
        """To the next number: up, until that brings nothing; then once more through those in question, the highest first."""
        following = self.actors + max(1, self.actors // 2)
        if self._again is None:
            if following <= self.most and self._without_gain() < PATIENCE:
                self.actors = following
                return self._begin_anew(now)
            near = NEAR * max(self.rates.values())
            in_question = [number for number, rate in self.rates.items() if rate >= near]
            self._again = in_question if len(in_question) > 1 else []
        if not self._again:
            return self._finish()
        self.actors = self._again.pop()
        return self._begin_anew(now)

    def _without_gain(self) -> int:
        """How many of the last numbers brought nothing."""
        best, since = 0.0, 0
        for rate in self.rates.values():
            best, since = (rate, 0) if rate > best * (1.0 + WORTH) else (best, since + 1)
        return since

    def _finish(self) -> None:
        """The fewest actors that are as fast as the fastest."""
        self.done = True
        enough = max(self.rates.values(), default=0.0) * (1.0 - WORTH)
        self.actors = min((number for number, rate in self.rates.items() if rate >= enough), default=self.actors)

    @property
    def sentence(self) -> str:
        """What was found, with the figures behind it."""
        tried = ", ".join(f"{number}: {rate:,.0f}" for number, rate in self.rates.items())
        found = f"{self.actors} actor{'s' if self.actors > 1 else ''}"
        if not tried:
            return f"--actors auto: nothing could be measured (no {found} within {ARRIVAL:.0f} s); the run goes on with {found}"
        return f"--actors auto: {found} from now on (env steps/s trained, by actors tried: {tried})"
