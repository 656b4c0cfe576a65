"""Is this service alive, and is it ready? Loops say that they go round; a probe asks how long ago.

Waiting on purpose is healthy: a loop that waits for credit or for experience goes round at its timeout and ticks. Work
that takes longer than the usual deadline must be announced (`within`). Liveness never depends on a peer: a learner that is away
must not make Kubernetes restart its actors. Readiness may.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from common.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answer to a probe: whether all is well, and one sentence; `age` is the time since the tick that says so."""

    ok: bool
    sentence: str
    age: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class _Tick:
    at: Seconds
    within: Seconds
    doing: str


class Health:
    """Ticks of the loops of one service. `tick` may be called from any thread; so may the questions."""

    def __init__(
        self, *, deadline: Seconds = 15.0, loops: Iterable[str] = ("loop",), clock: Callable[[], Seconds] = time.monotonic
    ) -> None:
        """Every loop owes a tick at most `deadline` seconds after the last one, the first counted from here."""
        self._clock, self._deadline = clock, deadline
        # A tick replaces one value of a dict whose keys never change, so neither side needs a lock.
        self._ticks = dict.fromkeys(loops, _Tick(clock(), deadline, "starts"))
        self._obstacle: Callable[[], str] = lambda: "starting"

    def tick(self, loop: str = "loop", *, doing: str = "", within: Seconds | None = None) -> None:
        """The loop went round. It is `doing` something (said if it hangs) and ticks again `within` seconds."""
        if loop not in self._ticks:
            raise KeyError(loop)
        self._ticks[loop] = _Tick(self._clock(), self._deadline if within is None else within, doing)

    def ready(self, unless: Callable[[], str] = lambda: "") -> None:
        """Report the service as ready from now on, except while `unless`, called at each probe, returns a reason; "" is none."""
        self._obstacle = unless

    def liveness(self) -> Answer:
        """Not ok once a loop is overdue; the sentence names the one that is most."""
        now = self._clock()
        loop, tick = max(self._ticks.items(), key=lambda item: now - item[1].at - item[1].within)
        age = now - tick.at
        if age <= tick.within:
            return Answer(ok=True, sentence="ok", age=age)
        doing = f" while it {tick.doing}" if tick.doing else ""
        return Answer(ok=False, sentence=f"{loop} has not ticked for {age:.1f} s{doing}; wanted every {tick.within:g} s", age=age)

    def readiness(self) -> Answer:
        """Return not ok until the service has reported that it is ready, and while there is a reason against it."""
        obstacle = self._obstacle()
        return Answer(ok=not obstacle, sentence=obstacle or "ok")
