"""Search for the number of actors with which a run trains fastest: the decisions of `rookery train --actors auto`.

More actors increase the training rate until the learner or the machine is saturated, which depends on environment, network and
machine. The search measures the run itself, which goes on training, with 1, 2, 3, 4, 6 ... actors. It measures the numbers that
were nearly as fast as the fastest a second time, because the speed of a machine drifts by more than the gains that are sought,
and chooses the lowest number that is as fast as the fastest. Pure: statuses in, numbers of actors out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import linear_regression

from common.units import EnvSteps, Seconds
from services.cli.train.status import RunStatus

SETTLE: Seconds = 3.0  # not measured after the last actor connected
WINDOW: Seconds = 12.0
LONGEST_WINDOW: Seconds = 60.0  # where updates are rare, and two of them were seen
READINGS = 10  # distinct values of env steps, one for each update, that a shorter measurement needs
UPDATES_TIMEOUT: Seconds = 600.0  # for two updates, without which there is no rate
CONNECT_TIMEOUT: Seconds = 60.0  # for all actors to connect
MIN_GAIN = 0.03  # smaller gains are noise
MAX_WITHOUT_GAIN = 2  # numbers in a row without a gain before the search stops
SECOND_LOOK = 0.85  # numbers above this share of the fastest rate are measured twice


@dataclass(slots=True, kw_only=True)
class ActorSearch:
    """Call `observe` with every new status and give the run `actors` actors, until `done`."""

    max_actors: int
    actors: int = 1
    done: bool = False
    rates: dict[int, float] = field(default_factory=dict)  # env steps trained per second by actors; mean of both measurements
    _second: list[int] | None = None  # numbers that await a second measurement; None during the first pass
    _requested_at: Seconds | None = None
    _connected_at: Seconds | None = None
    _last: EnvSteps | None = None  # of the newest status; a reading is kept when it changes
    _readings: list[tuple[Seconds, EnvSteps]] = field(default_factory=list)

    def observe(self, status: RunStatus, now: Seconds) -> None:
        """Take a status at the time `now` of a monotonic clock into account."""
        if self.done:
            return
        # 0 in a warm-up, which is no measure of training: it comes again where a resumed run has an empty replay memory.
        warming_up = status.training.get("samples_per_insert") == 0
        if self._requested_at is None or status.env_steps == 0 or warming_up:
            self._restart_measurement(now)
        elif self._connected_at is None:
            if status.workers.get("actor", 0) == self.actors:
                self._connected_at = now
            elif now - self._requested_at > CONNECT_TIMEOUT:
                self.finish()
        elif self._interrupted(status):
            self._restart_measurement(now)
        elif now - self._connected_at >= SETTLE:
            self._measure(status, now, since=self._connected_at + SETTLE)

    def _interrupted(self, status: RunStatus) -> bool:
        """Return True where an actor disconnected or the learner resumed from a checkpoint, which voids the measurement."""
        rolled_back = self._last is not None and status.env_steps < self._last
        return rolled_back or status.workers.get("actor", 0) != self.actors

    def _restart_measurement(self, now: Seconds) -> None:
        self._requested_at, self._connected_at, self._last, self._readings = now, None, None, []

    def _measure(self, status: RunStatus, now: Seconds, *, since: Seconds) -> None:
        changed, self._last = self._last not in {None, status.env_steps}, status.env_steps
        if changed:
            self._readings.append((now, status.env_steps))
        if now - since < WINDOW or (len(self._readings) < READINGS and now - since < LONGEST_WINDOW):
            return
        if len(self._readings) > 1:
            # Env steps increase by a batch at a time: a regression over all readings is more exact than the first and last alone.
            rate = linear_regression(*zip(*self._readings, strict=True)).slope
            self.rates[self.actors] = rate if self._second is None else (self.rates[self.actors] + rate) / 2
            self._next_number(now)
        elif now - since >= UPDATES_TIMEOUT:
            self.finish()

    def _next_number(self, now: Seconds) -> None:
        """Choose the next number: upwards while it is a gain, then the candidates for the second measurement, highest first."""
        larger = self.actors + max(1, self.actors // 2)
        if self._second is None:
            if larger <= self.max_actors and self._without_gain() < MAX_WITHOUT_GAIN:
                self.actors = larger
                return self._restart_measurement(now)
            threshold = SECOND_LOOK * max(self.rates.values())
            candidates = [number for number, rate in self.rates.items() if rate >= threshold]
            self._second = candidates if len(candidates) > 1 else []
        if not self._second:
            return self.finish()
        self.actors = self._second.pop()
        return self._restart_measurement(now)

    def _without_gain(self) -> int:
        """Return how many numbers since the fastest were no gain."""
        best, since = 0.0, 0
        for rate in self.rates.values():
            best, since = (rate, 0) if rate > best * (1.0 + MIN_GAIN) else (best, since + 1)
        return since

    def finish(self) -> None:
        """Choose the lowest number that is as fast as the fastest."""
        self.done = True
        enough = max(self.rates.values(), default=0.0) * (1.0 - MIN_GAIN)
        self.actors = min((number for number, rate in self.rates.items() if rate >= enough), default=self.actors)

    @property
    def result(self) -> str:
        """The result for the user, with the measured rates."""
        number = f"{self.actors} actor{'s' if self.actors > 1 else ''}"
        if not self.rates:
            missing = f"{number} did not connect within {CONNECT_TIMEOUT:.0f} s"
            reason = f"fewer than two updates in {UPDATES_TIMEOUT:.0f} s" if self._connected_at is not None else missing
            return f"--actors auto: nothing could be measured ({reason}); the run goes on with {number}"
        tried = ", ".join(f"{tried}: {rate:,.0f}" for tried, rate in self.rates.items())
        return f"--actors auto: {number} from now on (env steps/s trained, by actors tried: {tried})"
