"""A cluster as far as the autoscaler sees it: pods that take a while to start, counters, Prometheus, and the loop of the HPA.

Simulated in steps of a second. The HPA follows its documented algorithm (autoscaling/v2: sync period, tolerance,
policies, stabilisation); the numbers of the policies are those of our manifest. Actors and learner are coupled by flow
control: the faster side waits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

SYNC = 15  # seconds between two decisions, the default of --horizontal-pod-autoscaler-sync-period
TOLERANCE = 0.1  # the default of --horizontal-pod-autoscaler-tolerance
SCRAPE = 15
WINDOW = 120  # of rate() in the queries


@dataclass(slots=True)
class Counters:
    """Of one process: env steps, and seconds that it waited (for experience, or for credit)."""

    born: int
    steps: float = 0.0
    waited: float = 0.0


@dataclass(slots=True)
class Seen:
    """The samples that Prometheus has of one process, one per scrape."""

    samples: deque[tuple[int, float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW // SCRAPE + 1))

    def rates(self, now: int) -> tuple[float, float] | None:
        """rate() of both counters; None with fewer than two samples in the window, as for a pod that has just come."""
        inside = [sample for sample in self.samples if sample[0] > now - WINDOW]
        if len(inside) < 2:
            return None
        (first, *before), (last, *after) = inside[0], inside[-1]
        return tuple((b - a) / (last - first) for a, b in zip(before, after, strict=True))  # type: ignore[return-value]


class Run:
    """A learner with a capacity and actors that make `supply` env steps a second each, if they need not wait."""

    def __init__(self, *, capacity: Callable[[int], float], supply: float, start_seconds: int, replicas: int) -> None:
        """`capacity(second)` is what the learner could train on; a pod acts `start_seconds` after it was asked for."""
        self.capacity, self.supply, self.start = capacity, supply, start_seconds
        self.learner, self.actors = Counters(born=0), [Counters(born=-start_seconds) for _ in range(replicas)]
        self.seen: dict[int, Seen] = {}
        self.connected: deque[int] = deque(maxlen=WINDOW // SCRAPE)  # actors, one number per scrape

    def second(self, now: int) -> None:
        """Advance actors and learner by a second; the faster side waits."""
        acting = [actor for actor in self.actors if actor.born + self.start <= now]
        offered, wanted = self.supply * len(acting), self.capacity(now)
        done = min(offered, wanted)
        self.learner.steps += done
        self.learner.waited += 1.0 - done / wanted
        for actor in acting:
            actor.steps += done / len(acting)
            actor.waited += 1.0 - done / offered
        if now % SCRAPE == 0:
            self.connected.append(len(acting))
            for process in (self.learner, *acting):
                self.seen.setdefault(id(process), Seen()).samples.append((now, process.steps, process.waited))

    def scale(self, replicas: int, now: int) -> None:
        """The Deployment follows: the newest leave first."""
        self.actors = self.actors[:replicas] + [Counters(born=now) for _ in range(replicas - len(self.actors))]

    def rates(self, now: int) -> dict[str, Any]:
        """Return the rates of the scraped processes, from which the queries are computed."""
        acting = [rates for actor in self.actors if (seen := self.seen.get(id(actor))) and (rates := seen.rates(now))]
        learner = self.seen[id(self.learner)].rates(now) if id(self.learner) in self.seen else None
        return {"learner": learner, "actors": acting, "connected": sum(self.connected) / len(self.connected)}


@dataclass(slots=True)
class Autoscaler:
    """The HPA behind a ScaledObject; `queries` give the value of each trigger, or None where Prometheus has none."""

    manifest: Mapping[str, Any]  # spec of the ScaledObject
    queries: list[Callable[[Mapping[str, Any]], float | None]]
    _recommended: deque[tuple[int, int]] = field(default_factory=deque)
    _changes: deque[tuple[int, int]] = field(default_factory=deque)  # (second, difference)

    def decide(self, rates: Mapping[str, Any], current: int, now: int) -> int:
        """The number of replicas from now on."""
        spec = self.manifest
        values = [query(rates) for query in self.queries]
        known = [
            self._wanted(value, float(trigger["metadata"]["threshold"]), current)
            for value, trigger in zip(values, spec["triggers"], strict=True)
            if value is not None
        ]
        if len(known) < len(values) and (not known or max(known) < current):
            return current  # fallback: currentReplicas; and a metric that is missing never scales in
        wanted = min(max(*known, spec["minReplicaCount"]), spec["maxReplicaCount"])
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        self._recommended.append((now, wanted))
        down = behavior["scaleDown"]["stabilizationWindowSeconds"]
        while self._recommended[0][0] <= now - down:
            self._recommended.popleft()
        if wanted < current:
            wanted = min(current, max(number for _, number in self._recommended))
        wanted = self._limited(wanted, current, behavior, now)
        if wanted != current:
            self._changes.append((now, wanted - current))
        return wanted

    @staticmethod
    def _wanted(value: float, target: float, current: int) -> int:
        """AverageValue: the metric is for all pods together."""
        return current if abs(value / (target * current) - 1.0) <= TOLERANCE else math.ceil(value / target)

    def _limited(self, wanted: int, current: int, behavior: Mapping[str, Any], now: int) -> int:
        """By the policies, relative to what there was at the start of their periods."""
        way = "scaleUp" if wanted > current else "scaleDown"
        (policy,) = behavior[way]["policies"]
        assert policy["type"] == "Percent"
        changed = sum(by for at, by in self._changes if at > now - policy["periodSeconds"] and (by > 0) == (way == "scaleUp"))
        base = current - changed
        if way == "scaleUp":
            return min(wanted, math.ceil(base * (1 + policy["value"] / 100)))
        return max(wanted, math.floor(base * (1 - policy["value"] / 100)))
