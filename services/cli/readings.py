"""What services said of themselves at two moments, and what that makes of the time between. Pure: readings in, figures out."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

from common.runtime.bottleneck import Verdict, find_bottleneck
from common.units import Seconds
from services.cli.status import Samples, by_label
from services.cli.supervisor import ACTOR, EVALUATOR, LEARNER

ROLES = (LEARNER, ACTOR, EVALUATOR)
EXPERIENCE = ("trajectory", "gradient")
"""Kinds of message that are under way until they are acknowledged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One service at one moment. Without `samples`, `silence` says why."""

    at: Seconds  # Unix time
    role: str = ""  # "" where it never said
    samples: Samples = field(default_factory=lambda: MappingProxyType({}))
    complaint: str = ""  # what /healthz finds wrong
    silence: str = ""
    stranger: bool = False  # it answers, and is no service of ours


Moment: TypeAlias = Mapping[str, Reading]
"""A reading of each service, by name or address."""


def role_of(samples: Samples) -> str:
    """Which service exports these; "" where none of ours does."""
    return next((role for role in ROLES if (f"rookery_{role}_policy_version", "") in samples), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One service over the time from `before` to `after`. Names of metrics go without `rookery_<role>_`."""

    name: str
    role: str
    before: Reading
    after: Reading

    @property
    def title(self) -> str:
        """Its name, with its role where the name does not tell."""
        return self.name if self.role in self.name else f"{self.role} {self.name}"

    @property
    def seconds(self) -> Seconds:
        """The time between the two readings."""
        return self.after.at - self.before.at

    @property
    def measured(self) -> bool:
        """Whether it answered at both ends of a time that is long enough to divide by."""
        return bool(self.before.samples and self.after.samples) and self.seconds > 0

    @property
    def restarted(self) -> bool:
        """Whether another process answered at the end than at the beginning."""
        return self.measured and self.now("process_start_time_seconds") > self.then("process_start_time_seconds")

    def now(self, name: str, label: str = "") -> float:
        """Value at the end; NaN where it has none."""
        return self.after.samples.get((self._full(name), label), math.nan)

    def then(self, name: str, label: str = "") -> float:
        """Value at the beginning; NaN where it had none."""
        return self.before.samples.get((self._full(name), label), math.nan)

    def grew(self, name: str, label: str = "") -> float:
        """By how much a counter grew. One that fell began again at 0, with its process."""
        if not self.measured:
            return 0.0
        now, then = self.now(name, label), self.then(name, label)
        return 0.0 if math.isnan(now) else now - then if now >= then else now

    def rate(self, name: str, label: str = "") -> float:
        """Growth of a counter per second."""
        return self.grew(name, label) / self.seconds if self.measured else 0.0

    def mean(self, name: str) -> float:
        """Mean of what a histogram observed; NaN where it observed nothing."""
        count = self.grew(f"{name}_count")
        return self.grew(f"{name}_sum") / count if count else math.nan

    def grew_by_label(self, name: str) -> dict[str, float]:
        """Growth of a counter by the value of its label."""
        return {label: self.grew(name, label) for label in by_label(self.after.samples, self._full(name))}

    @property
    def phases(self) -> dict[str, Seconds]:
        """Seconds that its loop spent in each phase."""
        return self.grew_by_label("phase_seconds_total")

    @property
    def shares(self) -> dict[str, float]:
        """The same, as parts of their sum; empty before anything was measured."""
        return shares(self.phases)

    def sent(self) -> float:
        """Experience messages sent."""
        return sum(self.grew("messages_sent_total", kind) for kind in EXPERIENCE)

    def _full(self, name: str) -> str:
        return name if name.startswith("process_") else f"rookery_{self.role}_{name}"


def shares(seconds: Mapping[str, Seconds]) -> dict[str, float]:
    """Parts of a sum; empty where that is 0."""
    whole = sum(seconds.values())
    return {name: part / whole for name, part in seconds.items()} if whole > 0 else {}


@dataclass(frozen=True, slots=True)
class Fleet:
    """All services that were asked, over one time."""

    services: tuple[Service, ...]

    @property
    def learner(self) -> Service | None:
        """The learner, whether it answers or not; None where none is known."""
        return next((service for service in self.services if service.role == LEARNER), None)

    @property
    def actors(self) -> list[Service]:
        """The actors that answered at both ends."""
        return [service for service in self.services if service.role == ACTOR and service.measured]

    @property
    def knows_all_actors(self) -> bool:
        """Whether as many actors answered as the learner has."""
        connected = self.learner.now("peers_connected", ACTOR) if self.learner else math.nan
        return len(self.actors) >= connected

    @property
    def acting(self) -> dict[str, Seconds]:
        """Seconds of all actors together in each phase."""
        spent: defaultdict[str, Seconds] = defaultdict(float)
        for actor in self.actors:
            for phase, seconds in actor.phases.items():
                spent[phase] += seconds
        return dict(spent)

    @property
    def under_way(self) -> float:
        """Seconds that messages were under way, added up over messages."""
        return sum(actor.grew("unacknowledged_seconds_total") for actor in self.actors)

    @property
    def wire(self) -> float:
        """Share of that which they did not spend in the learner's queue; 0 where not all is known."""
        if not (self.learner and self.under_way and self.knows_all_actors):
            return 0.0
        return min(1.0, max(0.0, 1.0 - self.learner.grew("queue_seconds_total") / self.under_way))

    @property
    def bottleneck(self) -> Verdict:
        """The one rule, on this time."""
        learner = self.learner.phases if self.learner else {}
        return find_bottleneck(learner=learner, actors=self.acting, wire=self.wire)


def compare(before: Moment, after: Moment) -> Fleet:
    """What lies between two moments. Who is in one of them only has nothing to compare, and who left is silent."""
    services = []
    for name in {**before, **after}:
        end = after.get(name) or Reading(at=before[name].at, silence="it is gone")
        begin = before.get(name, end)
        role = end.role or begin.role
        services.append(Service(name=name, role=role, before=begin, after=end))
    return Fleet(tuple(sorted(services, key=lambda service: ROLES.index(service.role) if service.role else len(ROLES))))
