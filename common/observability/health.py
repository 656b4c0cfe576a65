"""Whether the loop of a service is alive and ready, as its HTTP port answers `/healthz` and `/readyz`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from common.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answer to a probe: HTTP 200 where `ok`, else 503, with `sentence` as its text."""

    ok: bool
    sentence: str


@dataclass(frozen=True, slots=True)
class _Tick:
    at: Seconds
    within: Seconds
    doing: str


class Health:
    """Ticks of the loop of one service, from which probes are answered. Every method may be called from any thread.

    A loop that waits for credit or for experience is healthy: it goes round at its timeout and ticks. Work that takes longer than
    the usual deadline must be announced (`within`). A further loop, in a thread of its own, ticks by its name. Liveness never
    depends on another process: Kubernetes must not restart actors because their learner does not answer. Readiness may.
    """

    def __init__(self, *, deadline: Seconds = 15.0, clock: Callable[[], Seconds] = time.monotonic) -> None:
        """The loop owes a tick at most `deadline` seconds after the last one, the first counted from here."""
        self._clock, self._deadline = clock, deadline
        # By the name of the loop. A tick is replaced as a whole, so that no reader needs a lock.
        self._ticks = {"loop": _Tick(clock(), deadline, "starts")}
        self._obstacle: Callable[[], str] = lambda: "starting"

    def tick(self, *, doing: str = "", within: Seconds | None = None, loop: str = "loop") -> None:
        """Report that a loop goes round. It is `doing` something (reported if it hangs) and ticks again `within` seconds."""
        self._ticks[loop] = _Tick(self._clock(), self._deadline if within is None else within, doing)

    def ready(self, unless: Callable[[], str] = lambda: "") -> None:
        """Report the service as ready from now on, except while `unless`, called at each probe, returns a reason; "" is none."""
        self._obstacle = unless

    @property
    def overdue(self) -> Seconds:
        """Return for how long a loop has owed a tick; 0 while none owes one."""
        return max(0.0, self._latest()[0])

    def _latest(self) -> tuple[Seconds, str, _Tick]:
        """Return the loop that owes its tick for longest: for how long, its name and its last tick."""
        now = self._clock()
        return max((now - tick.at - tick.within, name, tick) for name, tick in list(self._ticks.items()))

    def liveness(self) -> Answer:
        """Return not ok once a loop is overdue."""
        overdue, name, tick = self._latest()
        if overdue <= 0:
            return Answer(ok=True, sentence="ok")
        age, doing = overdue + tick.within, f" while it {tick.doing}" if tick.doing else ""
        return Answer(ok=False, sentence=f"{name} has not ticked for {age:.1f} s{doing}; wanted every {tick.within:g} s")

    def readiness(self) -> Answer:
        """Return not ok until the service has reported that it is ready, and while there is a reason against it."""
        obstacle = self._obstacle()
        return Answer(ok=not obstacle, sentence=obstacle or "ok")
