"""Limit of the log lines that other processes of a run, or strangers, can cause."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field

from common.units import Seconds

INTERVAL_SECONDS: Seconds = 10.0  # one line for each event, sender and reason
BURST = 32  # lines of one event at once, over all senders
LINES_PER_SECOND = 0.5  # of one event in the long run, over all senders


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """The number of lines of an event that were not written."""

    event: str
    lines: int
    seconds: Seconds  # since the first line of the event in this interval


@dataclass(slots=True)
class _Event:
    tokens: float = BURST
    refilled_at: Seconds = -math.inf
    began_at: Seconds = 0.0
    seen: set[Hashable] = field(default_factory=set)  # senders with a line in this interval: at most as many as tokens
    left_out: int = 0


class LogLimit:
    """Decides which events become lines: one for each sender and interval, and a token bucket for each event over all senders.

    Every line that is left out is in one `LeftOut`. Memory is bounded by the number of event names, fixed in the code: a sender
    is remembered only if it got a line. Not thread-safe. `now` is the time on any monotonic clock.
    """

    def __init__(self) -> None:
        self._events: dict[str, _Event] = {}

    def admit(self, event: str, sender: Hashable, now: Seconds) -> bool:
        """Return whether this event is to be written; an event that is not is counted."""
        state = self._events.setdefault(event, _Event(began_at=now))
        state.tokens = min(BURST, state.tokens + (now - state.refilled_at) * LINES_PER_SECOND)
        state.refilled_at = now
        if sender in state.seen or state.tokens < 1.0:
            state.left_out += 1
            return False
        state.tokens -= 1.0
        state.seen.add(sender)
        return True

    def ended(self, now: Seconds, *, every: bool = False) -> list[LeftOut]:
        """Return the left-out lines of the intervals that have ended by `now` (`every`: of all intervals), each once."""
        out = []
        for event, state in self._events.items():
            if every or now - state.began_at >= INTERVAL_SECONDS:
                if state.left_out:
                    out.append(LeftOut(event=event, lines=state.left_out, seconds=now - state.began_at))
                state.began_at, state.left_out = now, 0
                state.seen.clear()
        return out
