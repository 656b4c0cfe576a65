"""How a service declares its metrics, and how it accounts for its time.

A service's metrics are the attributes of one class, on a registry of its own: two services in one process (as in the
tests) do not meet, and nothing is registered by an import. Labels come from closed sets and exist from the start with
the value 0, so that a rate or an alert over them is right from the first scrape. An actor's name is never a label:
the scraped target says it already.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from threading import Lock
from typing import TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from common.units import Seconds
from common.wire.messages import PROTOCOL_VERSION, Message

Clock: TypeAlias = Callable[[], Seconds]

UNKNOWN = float("nan")
"""Initial value of a gauge that has no meaning before its first reading: a return of 0 would be a claim."""

POLICY_LAGS = (0, 1, 2, 4, 8, 16, 32, 64)
"""Upper bounds of the policy-lag histograms, in published versions."""

_ADVANCING = Lock()  # scrapes come side by side: to read a counter and to add what is missing must be one step


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """One metric as `docs/metrics.md` must list it. A label with no values takes names that the algorithm chooses."""

    name: str
    type: str  # counter, gauge or histogram
    help: str
    labels: Mapping[str, tuple[str, ...]]


class ServiceMetrics:
    """Base of a service's metrics: declares them as `rookery_<service>_<name>` and renders them for a scrape."""

    def __init__(self, service: str) -> None:
        """With what every service has: `rookery_build_info` and the standard `process_*` metrics."""
        self.registry = CollectorRegistry()
        self.on_scrape: Callable[[], None] = lambda: None  # brings over what is counted elsewhere; set once there is such a thing
        self._service, self._prefix, self._declared = service, f"rookery_{service}_", dict[str, Declared]()
        ProcessCollector(registry=self.registry)
        about = {"version": installed_version("rookery"), "protocol": str(PROTOCOL_VERSION), "service": service}
        what = "Always 1. The labels say which software this process runs."
        self._declare("rookery_build_info", "gauge", what, dict.fromkeys(about, ()))
        Gauge("rookery_build_info", what, tuple(about), registry=self.registry).labels(**about).set(1)

    @property
    def declared(self) -> tuple[Declared, ...]:
        """Every metric of this service but the standard `process_*`, in the order of declaration."""
        return tuple(self._declared.values())

    def render(self) -> bytes:
        """Everything in the Prometheus text format, as of now. Safe from any thread."""
        self.on_scrape()
        return generate_latest(_WithoutCreationTimes(self.registry))

    def _counter(self, name: str, what: str) -> Counter:
        full = self._declare(f"{self._prefix}{name}_total", "counter", what, {})
        return Counter(full, what, registry=self.registry)

    def _counters(self, name: str, what: str, *, label: str, values: Iterable[str]) -> Mapping[str, Counter]:
        """One counter for each value of a closed label; any other value is a KeyError, never a new series."""
        closed = tuple(map(str, values))
        full = self._declare(f"{self._prefix}{name}_total", "counter", what, {label: closed})
        family = Counter(full, what, (label,), registry=self.registry)
        return {value: family.labels(value) for value in closed}

    def _gauge(self, name: str, what: str, *, initial: float = 0.0) -> Gauge:
        gauge = Gauge(self._declare(self._prefix + name, "gauge", what, {}), what, registry=self.registry)
        gauge.set(initial)
        return gauge

    def _gauges(self, name: str, what: str, *, label: str, values: Iterable[str], initial: float = 0.0) -> Mapping[str, Gauge]:
        closed = tuple(map(str, values))
        family = Gauge(self._declare(self._prefix + name, "gauge", what, {label: closed}), what, (label,), registry=self.registry)
        for value in closed:
            family.labels(value).set(initial)
        return {value: family.labels(value) for value in closed}

    def _open_gauge(self, name: str, what: str, *, label: str) -> Gauge:
        """A gauge whose label values are not known here: `.labels(value).set(...)`."""
        return Gauge(self._declare(self._prefix + name, "gauge", what, {label: ()}), what, (label,), registry=self.registry)

    def _histogram(self, name: str, what: str, *, buckets: Iterable[float]) -> Histogram:
        full = self._declare(self._prefix + name, "histogram", what, {})
        return Histogram(full, what, buckets=tuple(buckets), registry=self.registry)

    def _phases(self, *names: str, clock: Clock) -> Phases:
        what = f"Seconds of the {self._service}'s loop by what it did, each second in one phase. Not of its other threads."
        full = self._declare(f"{self._prefix}phase_seconds_total", "counter", what, {"phase": names})
        phases = Phases(names, clock=clock, metric=full.removesuffix("_total"), help_text=what)
        self.registry.register(phases)
        return phases

    def _declare(self, name: str, kind: str, what: str, labels: Mapping[str, tuple[str, ...]]) -> str:
        self._declared[name] = Declared(name=name, type=kind, help=what, labels=labels)
        return name


class Phases(Collector):
    """Attributes each second of a loop to exactly one phase, from the first `enter` until `stop`.

    One thread enters phases; any thread may read. A reading includes the phase that is running, so the readings of one
    moment sum to the wall time since the first `enter`, and a loop that hangs shows where it hangs.
    """

    def __init__(
        self, names: Iterable[str], *, clock: Clock = time.monotonic, metric: str = "phase_seconds", help_text: str
    ) -> None:
        """Account for the closed set `names`, exposed as counters `<metric>_total{phase=...}`."""
        self._clock, self._metric, self._help = clock, metric, help_text
        self._seconds = dict.fromkeys(names, 0.0)
        self._current, self._since = "", 0.0
        self._lock = Lock()

    def enter(self, phase: str) -> str:
        """Switch to `phase`; returns the phase that ended ("" at first)."""
        if phase not in self._seconds:
            raise KeyError(phase)
        return self._switch(phase)

    def stop(self) -> None:
        """The loop has ended: from here on no second belongs to it."""
        self._switch("")

    def _switch(self, phase: str) -> str:
        with self._lock:
            # The clock is read inside the lock, or a reader could see a phase end before it began.
            now, before = self._clock(), self._current
            if before:
                self._seconds[before] += now - self._since
            self._current, self._since = phase, now
        return before

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Switch to `phase` for a block, then back to the phase it interrupted."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before or phase)

    def seconds(self) -> dict[str, Seconds]:
        """Seconds spent in each phase so far, the running one included."""
        with self._lock:
            read = dict(self._seconds)
            if self._current:
                read[self._current] += self._clock() - self._since
        return read

    def describe(self) -> list[Metric]:
        """The family without values, for the registry's check of names."""
        return [CounterMetricFamily(self._metric, self._help, labels=["phase"])]

    def collect(self) -> list[Metric]:
        """The family as of now, for a scrape."""
        family = CounterMetricFamily(self._metric, self._help, labels=["phase"])
        for phase, seconds in self.seconds().items():
            family.add_metric([phase], seconds)
        return [family]


class _WithoutCreationTimes(Collector):
    """A registry less its `_created` gauges: they double the series of every counter and nobody here reads them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            kept = Metric(metric.name, metric.documentation, metric.type)
            kept.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield kept


def advance(counter: Counter, total: float) -> None:
    """Bring a counter up to a total that is kept elsewhere (the ledger); it never goes back. Safe from any thread."""
    with _ADVANCING:
        (family,) = counter.collect()
        (now,) = (sample.value for sample in family.samples if sample.name.endswith("_total"))
        counter.inc(max(0.0, total - now))


def kinds(*types: type[Message]) -> tuple[str, ...]:
    """Values of the `kind` label: the tags of these messages."""
    return tuple(message.tag for message in types)
