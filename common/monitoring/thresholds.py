"""Where a figure of a run begins to be bad: one table for the alerts, the colours of the panels, and `rookery doctor`."""

from __future__ import annotations

from dataclasses import dataclass

from common.runtime import bottleneck


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """One limit. A figure above it is bad, or below it where `below` says so."""

    name: str
    value: float
    unit: str
    why: str
    below: bool = False

    @property
    def comparison(self) -> str:
        """What a bad figure is, in PromQL: `> 0.5`."""
        return f"{'<' if self.below else '>'} {self.value:.15g}"

    def passed(self, figure: float) -> bool:
        """Whether `figure` is on the bad side; an unknown one, NaN, is not."""
        return figure < self.value if self.below else figure > self.value


WAITING = Threshold(
    name="waiting",
    value=bottleneck.WAITING,
    unit="share of time",
    why="a side that waits more is held up by the other; jitter alone makes a few per cent",
)
WIRE = Threshold(
    name="on the wire",
    value=bottleneck.ON_THE_WIRE,
    unit="share of the time that messages are under way",
    why="where both sides wait and messages are mostly between them, the network holds them up",
)
STARVED = Threshold(
    name="starved",
    value=0.5,
    unit="share of time",
    why="a learner that waits more could train twice as much: the better half of its machine is idle",
)
SATURATED = Threshold(
    name="saturated",
    value=0.9,
    unit="share of the queue's capacity",
    why="nearly every credit is used up: more actors would only wait",
)
STALLED = Threshold(
    name="stalled",
    value=300,
    unit="seconds without an update",
    why="as long as a gradient step may take before the learner itself counts it as hung",
)
LAG = Threshold(
    name="lag",
    value=0.5,
    unit="share of the largest policy lag accepted",
    why="half way to where experience is dropped as stale; the ordinary lag is far below",
)
DROPPED = Threshold(
    name="dropped",
    value=0.01,
    unit="share of the env steps",
    why="playing is what costs; one per cent is more than a replaced actor now and then",
)
BAD_MESSAGES = Threshold(
    name="bad messages",
    value=0,
    unit="messages",
    why="peers of the same release send none: one means another version, a damaged link or a stranger",
)
REFUSED = Threshold(
    name="refused",
    value=0.1,
    unit="connections per second that come to nothing",
    why="a peer that is refused asks again every second; a restart or a look at the port makes one or two",
)
REOPENED = Threshold(
    name="reopened",
    value=0,
    unit="times that the learner dropped all connections",
    why="peers that keep to their credits never fill its memory: one means a hostile sender, or a memory limit that is too low",
)
NON_FINITE = Threshold(
    name="non-finite",
    value=0,
    unit="gradient steps left out of an update",
    why="a loss that is NaN or infinite seldom comes alone",
)
ACTORS = Threshold(
    name="actors",
    value=0.8,
    unit="share of the actors that run",
    why="one of a few may be on its way back; a fifth is no coincidence",
    below=True,
)
STRAGGLER = Threshold(
    name="straggler",
    value=0.5,
    unit="share of the median actor's env steps per second",
    why="equal actors on equal cores differ by a few per cent; half the speed is a throttled or shared core",
    below=True,
)
SNAPSHOTS = Threshold(
    name="snapshots",
    value=300,
    unit="seconds without a new policy",
    why="an actor takes the newest policy before each rollout, and a rollout takes seconds",
)
CHECKPOINT = Threshold(
    name="checkpoint",
    value=2.5,
    unit="checkpoint intervals",
    why="one may be missed behind a long update; two are a fault",
)
GROWTH = Threshold(
    name="memory growth",
    value=64 * 2**20,
    unit="bytes per hour",
    why="queue, replay and peers are bounded: a process that has settled does not grow",
)
SETTLED = Threshold(
    name="settled",
    value=7200,
    unit="seconds since a process began",
    why="imports, buffers and a replay memory that fills are no leak",
)
THROUGHPUT = Threshold(
    name="throughput",
    value=0.5,
    unit="share of the median of the last hour",
    why="evaluations and checkpoints cost a few per cent; half is a lost machine or a throttled one",
    below=True,
)

STRAGGLER_ACTORS = 3
"""Of fewer actors neither is the odd one out."""

TABLE = (
    WAITING, WIRE, STARVED, SATURATED, STALLED, LAG, DROPPED, BAD_MESSAGES, REFUSED,
    REOPENED, NON_FINITE, ACTORS, STRAGGLER, SNAPSHOTS, CHECKPOINT, GROWTH, SETTLED, THROUGHPUT,
)  # fmt: skip
