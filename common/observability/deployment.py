"""Two scrapes of a deployment, and the rates, shares and the bottleneck of the time between them. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeAlias

from common.errors import REFUSED_EXPERIENCE
from common.observability import learner_metrics as learner
from common.observability import worker_metrics as worker
from common.observability.bottleneck import NO_QUOTA, WAITING, Kind, Quota, Verdict, find_bottleneck, shares
from common.observability.cpu_limit import QUOTA_STATES
from common.observability.metrics import Metric
from common.units import Seconds

LEARNER, ACTOR, EVALUATOR, ENV_WORKER = "learner", "actor", "evaluator", "env_worker"
JOBS: Mapping[str, str] = MappingProxyType({
    "learner": LEARNER,
    "actor": ACTOR,
    "policy-server": ACTOR,  # to its learner, and in its metrics
    "evaluator": EVALUATOR,
    "env-worker": ENV_WORKER,
})  # fmt: skip
"""All services: label `job` in Prometheus -> role, which the names of its metrics contain."""
ROLES = tuple(dict.fromkeys(JOBS.values()))
EXPERIENCE = ("trajectory", "gradient")
"""Kinds of message that wait for an acknowledgement."""

MOSTLY_WAITS = 0.5
"""Share of its time, but for saves, above which a learner that receives nothing stands still: below, its update is longer."""

ROLLOUTS = 2
"""Rollouts by one policy that make it an old one: the second was begun after a newer policy had been published for a while."""

Samples: TypeAlias = Mapping[tuple[str, str], float]
"""Metrics of one service: (name, value of its label `run_id`, else of its first label, else "") -> value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSample:
    """One service at one moment. Without `samples`, `unreachable` is the reason."""

    at: Seconds  # Unix time
    received: Seconds | None = None  # by the monotonic clock of this process, which no correction of the time moves
    role: str = ""  # "" where it is not known
    samples: Samples = field(default_factory=lambda: MappingProxyType({}))
    unhealthy: str = ""  # the fault that /healthz reports, or, from a Prometheus, its metric
    unreachable: str = ""
    foreign: bool = False  # an HTTP server answers that is no rookery service


Scrape: TypeAlias = Mapping[str, ServiceSample]
"""A sample of each service of a deployment, by name or address."""


def by_label(samples: Samples, name: str) -> dict[str, float]:
    """Return the values of one metric by the value of its label, such as seconds by phase."""
    return {label: value for (sample, label), value in samples.items() if sample == name}


def role_of(samples: Samples) -> str:
    """Return the role of the service that exports these; "" where it is no rookery service."""
    return next((role for role in ROLES if any(name.startswith(f"rookery_{role}_") for name, _ in samples)), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One service over the time from `before` to `after`.

    A metric that several services have, such as `policy_version`, may be given as that of any of them.
    """

    name: str
    role: str
    before: ServiceSample
    after: ServiceSample

    @property
    def title(self) -> str:
        """Return the name, with the role where the name does not contain it."""
        return self.name if self.role in self.name else f"{self.role.replace('_', ' ')} {self.name}"

    @property
    def seconds(self) -> Seconds:
        """Return the time between the two samples."""
        if self.before.received is None or self.after.received is None:  # from a Prometheus, or without an answer
            return self.after.at - self.before.at
        return self.after.received - self.before.received

    @property
    def measured(self) -> bool:
        """Return whether there is a sample at both ends of a time that is long enough to divide by."""
        return bool(self.before.samples and self.after.samples) and self.seconds > 0

    @property
    def restarted(self) -> bool:
        """Return whether the process at the end is another than at the beginning."""
        return self.measured and self.now("process_start_time_seconds") > self.then("process_start_time_seconds")

    def now(self, metric: Metric[Any] | str, label: str = "") -> float:
        """Return the value at the end; NaN where there is none."""
        return self.after.samples.get((self._full(metric), label), math.nan)

    def then(self, metric: Metric[Any] | str, label: str = "") -> float:
        """Return the value at the beginning; NaN where there was none."""
        return self.before.samples.get((self._full(metric), label), math.nan)

    def grew(self, metric: Metric[Any] | str, label: str = "") -> float:
        """Return the growth of a counter. One that fell has started again at 0, with its process."""
        if not self.measured:
            return 0.0
        now, then = self.now(metric, label), self.then(metric, label)
        return 0.0 if math.isnan(now) else now - then if now >= then else now

    def rate(self, metric: Metric[Any] | str, label: str = "") -> float:
        """Return the growth of a counter per second."""
        return self.grew(metric, label) / self.seconds if self.measured else 0.0

    def mean(self, summary: Metric[Any]) -> float:
        """Return the mean of the observations of a summary; NaN of none."""
        name = self._full(summary)
        count = self.grew(f"{name}_count")
        return self.grew(f"{name}_sum") / count if count else math.nan

    def grew_by_label(self, metric: Metric[Any]) -> dict[str, float]:
        """Return the growth of a counter by the value of its label."""
        return {label: self.grew(metric, label) for label in by_label(self.after.samples, self._full(metric))}

    @property
    def phases(self) -> dict[str, Seconds]:
        """Return the seconds that the loop spent in each phase."""
        return self.grew_by_label(learner.PHASE_SECONDS)

    @property
    def shares(self) -> dict[str, float]:
        """Return the shares of the phases in their sum; empty before anything was measured."""
        return shares(self.phases)

    @property
    def experience_sent(self) -> float:
        """Return the number of experience messages sent."""
        return sum(self.grew(worker.ACTOR_MESSAGES_SENT, kind) for kind in EXPERIENCE)

    def _full(self, metric: Metric[Any] | str) -> str:
        return metric if isinstance(metric, str) else f"rookery_{self.role}_{metric.short}"


@dataclass(frozen=True, slots=True)
class Deployment:
    """All services that were scraped, over one time."""

    services: tuple[Service, ...]

    @property
    def known_learner(self) -> Service | None:
        """Return the learner, reachable or not, of several ranks as one service; None where none is known."""
        return joined(self.ranks)

    @property
    def ranks(self) -> list[Service]:
        """Return all learners: one, or the ranks of one."""
        return [service for service in self.services if service.role == LEARNER]

    @property
    def of_one_run(self) -> bool:
        """Return whether the learners are of one run, as its ranks are: by its id, and by their number.

        A learner that starts does not know its run yet, only how many ranks it has.
        """
        runs = {run for rank in self.ranks for run in by_label(rank.after.samples, learner.RUN_INFO.name)}
        counts = [count for rank in self.ranks if (count := rank.now(learner.RANKS)) >= 1]
        return len(runs) <= 1 and len(set(counts)) <= 1 and len(counts) <= max(counts, default=0)

    @property
    def missing_ranks(self) -> str:
        """Return how many of the learner's ranks answer, of which its sums are; "" where all or none do."""
        answer = [rank for rank in self.ranks if rank.after.samples]
        wanted = max((count for rank in answer if (count := rank.now(learner.RANKS)) >= 1), default=0.0)
        return f"{len(answer)} of {wanted:.0f} ranks answer: sums are of these" if len(answer) < wanted else ""

    @property
    def learner(self) -> Service:
        """Return the learner, reachable or not. AssertionError where none is known."""
        found = self.known_learner
        assert found is not None
        return found

    @property
    def actors(self) -> list[Service]:
        """Return the actors that were measured."""
        return [service for service in self.services if service.role == ACTOR and service.measured]

    @property
    def connected_actors(self) -> list[Service]:
        """Return the measured actors that have a learner at the end: one that lost it waits for a connection, not for credit."""
        return [actor for actor in self.actors if actor.now(worker.ACTOR_CONNECTED) != 0]

    @property
    def actor_phases(self) -> dict[str, Seconds]:
        """Return the seconds of all connected actors together in each phase."""
        spent: defaultdict[str, Seconds] = defaultdict(float)
        for actor in self.connected_actors:
            for phase, seconds in actor.phases.items():
                spent[phase] += seconds
        return dict(spent)

    @property
    def unacknowledged_seconds(self) -> float:
        """Return the seconds that messages waited for their acknowledgement, summed over messages."""
        return sum(actor.grew(worker.ACTOR_UNACKNOWLEDGED_SECONDS) for actor in self.connected_actors)

    @property
    def unmeasured(self) -> str:
        """Return which part of the connected actors, or of the ranks, was measured; "" where all were."""
        measured, connected = len(self.connected_actors), self.learner.now(learner.WORKERS_CONNECTED, ACTOR)
        return f"{measured} of {connected:.0f} connected actors are measured" if measured < connected else self.missing_ranks

    @property
    def wire(self) -> float:
        """Return the share of that time outside the queue of the learner, which holds messages of all actors; NaN if unknown."""
        seconds = self.unacknowledged_seconds
        if self.unmeasured or not seconds:
            return math.nan
        return min(1.0, max(0.0, 1.0 - sum(rank.grew(learner.QUEUE_SECONDS) for rank in self.ranks) / seconds))

    @property
    def learner_cpu_lost(self) -> float:
        """Return the share of its time in which the learner computes and has no core; NaN where that is unknown."""
        phases = self.learner.phases
        computes, whole = sum(phases.get(phase, 0.0) for phase in learner.COMPUTING), sum(phases.values())
        if math.isnan(self.learner.now(learner.COMPUTING_CPU_SECONDS)) or not whole:
            return math.nan
        computes -= self.learner.grew(learner.ALL_REDUCE_SECONDS)  # which need another rank, not a core
        return max(0.0, computes - self.learner.grew(learner.COMPUTING_CPU_SECONDS)) / whole

    @property
    def actors_cpu_lost(self) -> float:
        """Return the share of their time in which actors have work for a core and have none; NaN where that is unknown.

        An environment may wait for a simulator of its own. So the seconds without a core for each CPU second are taken from the
        phases that only compute, and hold for all CPU seconds of a process, or, where its threads use more, for the time in which
        its loop works.
        """
        phases = self.actor_phases
        computes, whole = sum(phases.get(phase, 0.0) for phase in worker.ACTOR_COMPUTING), sum(phases.values())
        got, used = sum(actor.grew(worker.ACTOR_COMPUTING_CPU_SECONDS) for actor in self.connected_actors), 0.0
        for actor in self.connected_actors:
            works = sum(seconds for phase, seconds in actor.phases.items() if phase != "credit_wait")
            used += min(actor.grew("process_cpu_seconds_total"), works)
        return min(1.0, max(0.0, used * (computes / got - 1.0)) / whole) if got and whole else math.nan

    def quota(self, role: str) -> Quota:
        """Return the CPU limit of the containers of a role: cores of the smallest, share of the throttled periods of all."""
        measured = [service for service in self.services if service.role == role and service.measured]
        limits = [cores for service in measured if not math.isnan(cores := service.now(learner.CPU_LIMIT_CORES))]
        throttled, free = (sum(service.grew(learner.CPU_LIMIT_PERIODS, state) for service in measured) for state in QUOTA_STATES)
        return Quota(min(limits), throttled / (throttled + free)) if limits and throttled else NO_QUOTA

    @property
    def stale_actors(self) -> list[Service]:
        """Return the actors whose last rollouts were all by one policy although a newer one had been published before."""
        version, published = worker.ACTOR_POLICY_VERSION, self.learner.then(learner.POLICY_VERSION)
        return [
            actor
            for actor in self.actors
            if actor.experience_sent >= ROLLOUTS and actor.then(version) == actor.now(version) < published
        ]

    @property
    def stands_still(self) -> bool:
        """Return whether the learner waits while nothing moves: no update, no experience, no env step."""
        arrived = sum(self.learner.grew(learner.MESSAGES_RECEIVED, kind) for kind in EXPERIENCE)
        moved = self.learner.grew(learner.UPDATES) or arrived or sum(actor.grew(worker.ACTOR_ENV_STEPS) for actor in self.actors)
        waits, saves = (self.learner.shares.get(phase, 0.0) for phase in ("wait", "checkpoint"))
        return not moved and waits > max(WAITING, MOSTLY_WAITS * (1.0 - saves))  # else an update or a save takes longer

    @property
    def bottleneck(self) -> Verdict:
        """Return the bottleneck of this time."""
        found = self.known_learner
        if reason := self._unknown(found):
            return Verdict(kind=Kind.UNKNOWN, share=0.0, sentence=f"unknown: {reason}")
        assert found is not None
        return find_bottleneck(
            learner=found.phases,
            actors=self.actor_phases,
            wire=self.wire,
            unmeasured=self.unmeasured,
            stale=len(self.stale_actors) / len(self.actors) if self.actors else 0.0,
            learner_cpu_lost=self.learner_cpu_lost,
            actors_cpu_lost=self.actors_cpu_lost,
            learner_quota=self.quota(LEARNER),
            actors_quota=self.quota(ACTOR),
        )

    def _unknown(self, found: Service | None) -> str:
        """Return the reason why this time has no bottleneck; "" where it has one."""
        if found is None:
            return "no learner is known"
        if found.after.unreachable:
            return f"the learner is unreachable ({found.after.unreachable})"
        if found.now(learner.TRAINING) == 0:
            return "the learner does not train, it starts or has ended"
        if not found.measured:
            return "the learner was not measured at both ends of this time"
        if any(rank.restarted for rank in self.ranks):  # the actors' seconds include those without a learner, its own do not
            return "the learner began anew within this time"
        if refused := [reason for reason in REFUSED_EXPERIENCE if found.grew(learner.MESSAGES_DROPPED, reason)]:
            return f"experience is refused ({', '.join(refused)}); see the learner's log"
        summing = found.grew(learner.ALL_REDUCE_SECONDS) > MOSTLY_WAITS * sum(found.phases.values())
        if summing and not found.grew(learner.UPDATES):
            return "the learner waits for another of its ranks, which hangs or is stopped"
        return "no env step is made, received or trained on" if self.stands_still else ""


ADDED = (learner.LEDGER_ENV_STEPS.name, learner.WORKERS_CONNECTED.name, learner.QUEUE_DEPTH.name, learner.QUEUE_CAPACITY.name)
"""Gauges of which each rank has its own part."""

OF_ALL = (learner.UPDATES.name, learner.NONFINITE_STEPS.name)
"""Counters that each rank has of all ranks."""

COUNTERS = ("_total", "_sum", "_count")
"""Ends of the names of counters."""


def joined(ranks: Sequence[Service]) -> Service | None:
    """Return the ranks of a learner as one service.

    Counters but `OF_ALL` and gauges `ADDED` are sums; other values are those of the first rank that has them. A rank
    that was not scraped at both ends is no part of the sums of counters, which would seem to fall or to jump.
    """
    if not ranks or not any(rank.now(learner.RANKS) > 1 for rank in ranks):
        return next(iter(ranks), None)
    parts = [rank for rank in ranks if rank.measured] or ranks
    gauges = [_without_counters(rank.after) for rank in ranks if rank not in parts]
    unreachable = next((rank.after.unreachable for rank in ranks if rank.after.unreachable), "")
    hung = next((rank.after.unhealthy for rank in ranks if rank.after.unhealthy), "")
    before, after = _sum([part.before for part in parts]), _sum([*(part.after for part in parts), *gauges])
    return replace(ranks[0], before=before, after=replace(after, unreachable=unreachable, unhealthy=hung))


def _without_counters(sample: ServiceSample) -> ServiceSample:
    return replace(sample, samples={key: value for key, value in sample.samples.items() if not key[0].endswith(COUNTERS)})


def _sum(parts: Sequence[ServiceSample]) -> ServiceSample:
    samples = dict(parts[0].samples)
    for part in parts[1:]:
        for (name, label), value in part.samples.items():
            if name in ADDED or (name.endswith(COUNTERS) and name not in OF_ALL):
                samples[name, label] = samples.get((name, label), 0.0) + value
            elif math.isnan(samples.get((name, label), math.nan)):  # one rank alone has an evaluator and a store
                samples[name, label] = value
    return replace(parts[0], samples=samples)


def compare(before: Scrape, after: Scrape) -> Deployment:
    """Return the deployment between two scrapes.

    A service in `after` alone was not measured. A worker in `before` alone is none of it any more: an orchestrator took it away.
    A learner must not be.
    """
    services = []
    for name in {**{name: sample for name, sample in before.items() if sample.role == LEARNER}, **after}:
        end = after.get(name) or ServiceSample(at=before[name].at, unreachable="it is gone")
        begin = before.get(name, end)
        role = end.role or begin.role
        services.append(Service(name=name, role=role, before=begin, after=end))
    return Deployment(tuple(sorted(services, key=lambda service: ROLES.index(service.role) if service.role else len(ROLES))))
