"""Keeps a process to a share of the machine, so that judging the policy does not slow its training."""

from __future__ import annotations

from collections.abc import Callable

from common.units import Seconds

LONGEST_REST: Seconds = 0.2


class Throttle:
    """Call it after each piece of work: it sleeps until CPU time used <= share x cores x time passed.

    Long evaluations so take `1 / (share x cores)` times their CPU time; no rest is longer than `LONGEST_REST`, so that
    the caller's loop goes on turning.
    """

    def __init__(
        self,
        *,
        share: float,
        cores: int,
        cpu: Callable[[], Seconds],
        clock: Callable[[], Seconds],
        sleep: Callable[[Seconds], object],
    ) -> None:
        self._rate = share * cores
        self._cpu, self._clock, self._sleep = cpu, clock, sleep
        self._cpu_from, self._from = cpu(), clock()

    def __call__(self) -> None:
        """Rest if more has been used than the share allows."""
        due = self._from + (self._cpu() - self._cpu_from) / self._rate
        rest = due - self._clock()
        if rest > 0:
            self._sleep(min(rest, LONGEST_REST))
