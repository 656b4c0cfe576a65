"""Metrics of the services: each is declared once and read from the service's state when Prometheus scrapes it.

A `Metric` gives the exported series, the row of `docs/metrics.md`, and the name in checks and dashboards. Services keep plain
counters in a dataclass of their own (`LearnerStats`, `ActorStats`, `EvaluatorStats`), so that counting costs an addition.
An actor's name is never a label: the scraped target has it already.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version as installed_version
from threading import Lock, get_ident
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client import Metric as Family
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.registry import Collector

from common.observability.health import Health
from common.protocol.messages import PROTOCOL_VERSION, Message
from common.units import Seconds

Clock: TypeAlias = Callable[[], Seconds]

UNKNOWN = math.nan
"""Value of a gauge that has no meaning before its first reading: a return of 0 would be a claim."""

S = TypeVar("S")


class CountAndSum:
    """Number and sum of observations, from which the mean over any time follows. One thread observes, any may read."""

    read: tuple[int, float] = (0, 0.0)  # replaced as a whole, so that number and sum belong together

    def observe(self, value: float) -> None:
        """Count one observation."""
        count, total = self.read
        self.read = count + 1, total + value


Reading: TypeAlias = float | Mapping[Any, float] | CountAndSum
"""A number, numbers by label value (or tuple of label values), or observations."""


@dataclass(frozen=True, slots=True)
class Metric(Generic[S]):
    """One exported metric. `read` takes the service's state and returns the value, values by label value, or a `summary`.

    `labels` maps a label to its closed list of values, all of which are exported from the start with `absent` where the reading
    has none; an empty list stands for values that are not known in advance.
    """

    name: str
    help: str
    read: Callable[[S], Reading]
    labels: Mapping[str, Iterable[str]] = field(default_factory=dict)
    absent: float = 0.0
    summary: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def type(self) -> Literal["counter", "gauge", "summary"]:
        """Return the type: as Prometheus names them, a counter and nothing else ends in `_total`."""
        return "summary" if self.summary else "counter" if self.name.endswith("_total") else "gauge"

    @property
    def short(self) -> str:
        """Return the name without `rookery_<service>_`: metrics that several services have share it."""
        return self.name.split("_", 2)[2]

    def family(self, state: S) -> Family:
        """Return all series of this metric, as of now."""
        reading, names = self.read(state), list(self.labels)
        if isinstance(reading, CountAndSum):
            count, total = reading.read
            return SummaryMetricFamily(self.name, self.help, count_value=count, sum_value=total)
        family: CounterMetricFamily | GaugeMetricFamily
        if self.type == "counter":
            family = CounterMetricFamily(self.name.removesuffix("_total"), self.help, labels=names)
        else:
            family = GaugeMetricFamily(self.name, self.help, labels=names)
        for values, value in self._by_label(reading):
            family.add_metric(values, value)
        return family

    def _by_label(self, reading: float | Mapping[Any, float]) -> Iterator[tuple[list[str], float]]:
        if not isinstance(reading, Mapping):
            yield [], reading
            return
        closed = [str(value) for values in self.labels.values() for value in values]
        for key in closed or tuple(reading):
            yield ([key] if isinstance(key, str) else list(key)), reading.get(key, self.absent)


def build_info(service: str) -> Metric[Any]:
    """Return the metric whose labels identify the software of a process."""
    about = {"version": installed_version("rookery"), "protocol": str(PROTOCOL_VERSION), "service": service}
    return Metric(
        "rookery_build_info",
        "Always 1. The labels hold the version of the software, the version of the wire protocol, and the service.",
        read=lambda _: {tuple(about.values()): 1.0},
        labels=dict.fromkeys(about, ()),
    )


def declared(module: Mapping[str, object], service: str) -> tuple[Metric[Any], ...]:
    """Return the metrics of a service, `rookery_<service>_...`, among the globals of a module, in the order of the module."""
    metrics = (value for value in module.values() if isinstance(value, Metric))
    return tuple(metric for metric in metrics if metric.name.startswith(f"rookery_{service}_"))


RUN_LABELS = ("run_id", "env", "algorithm", "seed", "version")
LABEL_CHARACTERS = 200  # of a label of the run, whose text a worker has from its learner


def run_labels(*, run_id: str, env: str, algorithm: str, seed: int) -> tuple[str, ...]:
    """Return the values of `RUN_LABELS` for a process of that run."""
    values = (run_id, env, algorithm, str(seed), installed_version("rookery"))
    return tuple(value[:LABEL_CHARACTERS] for value in values)


def run_info() -> Metric[Any]:
    """Return the metric whose labels identify the run of a process: `run` of its state, empty while it does not know its run."""
    return Metric(
        "rookery_run_info",
        "Always 1, once the process knows its run. The labels hold the id of the run, its environment, algorithm and seed, and "
        "the version of the software; a join by instance selects the series of one run.",
        read=lambda state: {state.run: 1.0} if state.run else {},
        labels=dict.fromkeys(RUN_LABELS, ()),
    )


LOOP_OVERDUE: Metric[Health] = Metric(
    "rookery_loop_overdue_seconds",
    "Seconds for which the loop of the process has owed a tick; 0 while it owes none. Above 0, /healthz answers 503.",
    read=lambda health: health.overdue,
)


class Exporter(Collector, Generic[S]):
    """Renders the metrics of one service for a scrape, with the standard `process_*` metrics. Safe from any thread."""

    def __init__(self, metrics: Iterable[Metric[S]], source: Callable[[], S], health: Health | None = None) -> None:
        """`source` returns the state that one scrape reads; it may be replaced once there is more to read."""
        self.source = source
        self._metrics, self._health = tuple(metrics), health
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(self)

    def render(self) -> bytes:
        """Return everything in the Prometheus text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Family]:
        """Yield every metric, all read from one state."""
        state = self.source()
        for metric in self._metrics:
            yield metric.family(state)
        if self._health:
            yield LOOP_OVERDUE.family(self._health)


def thread_cpu_clock() -> Clock:
    """Return a clock of the CPU time of the calling thread, which any thread may read while the calling thread lives."""
    if not hasattr(time, "pthread_getcpuclockid"):  # macOS
        return time.process_time
    return partial(time.clock_gettime, time.pthread_getcpuclockid(get_ident()))


class Phases:
    """Attributes each second of a loop, and the CPU time of its thread, to exactly one phase, from the first `enter` to `stop`.

    One thread enters phases; any thread may read. A reading includes the phase that is running, so simultaneous readings
    sum to the wall time since the first `enter`, and a loop that hangs shows where it hangs.
    """

    def __init__(
        self, names: Iterable[str], *, clock: Clock = time.monotonic, cpu_clock: Callable[[], Clock] = thread_cpu_clock
    ) -> None:
        """Account for the closed set `names`. The thread of the loop calls `cpu_clock` once, for the clock of its CPU time."""
        self._clock, self._make_cpu_clock = clock, cpu_clock
        self._seconds, self._cpu_seconds = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
        self._cpu_clock: Clock = float
        self._current, self._since, self._cpu_since = "", 0.0, 0.0
        self._lock = Lock()

    def enter(self, phase: str) -> None:
        """Switch to `phase`. KeyError where it is none of the names."""
        if phase not in self._seconds:
            raise KeyError(phase)
        self._switch(phase)

    def stop(self) -> None:
        """End the accounting: from here on no second belongs to the loop."""
        self._switch("")

    def _switch(self, phase: str) -> None:
        with self._lock:
            # The clocks are read inside the lock, or a reader could see a phase end before it began.
            if self._current:
                now, cpu = self._clock(), self._cpu_clock()
                self._seconds[self._current] += now - self._since
                self._cpu_seconds[self._current] += cpu - self._cpu_since
            else:
                self._cpu_clock = self._make_cpu_clock()
                now, cpu = self._clock(), self._cpu_clock()
            self._current, self._since, self._cpu_since = phase, now, cpu

    def seconds(self) -> dict[str, Seconds]:
        """Return the seconds spent in each phase so far, the running one included."""
        with self._lock:
            read = dict(self._seconds)
            if self._current:
                read[self._current] += self._clock() - self._since
        return read

    def cpu_seconds(self, names: Iterable[str]) -> Seconds:
        """Return the CPU seconds that the thread of the loop used in these phases so far, the running one included."""
        with self._lock:
            read = dict(self._cpu_seconds)
            if self._current:
                read[self._current] += self._cpu_clock() - self._cpu_since
        return sum(read[name] for name in names)


def kinds(*types: type[Message]) -> tuple[str, ...]:
    """Return the values of the `kind` label: the tags of these messages."""
    return tuple(message.tag for message in types)


def mean(values: Iterable[float]) -> float:
    """Return the mean; NaN of nothing."""
    kept = tuple(values)
    return sum(kept) / len(kept) if kept else UNKNOWN
