"""`rookery doctor`: measures a run for a while, names its bottleneck and the possible gain, and lists the checks that fail.

Every run has a bottleneck, so that a bottleneck alone is no fault.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TextIO

from common.errors import ConfigError
from common.observability import learner_metrics as metrics
from common.observability.bottleneck import WAITING, Kind, Verdict, percent, shares
from common.observability.checks import CHECKS, Finding, findings
from common.observability.deployment import LEARNER, Deployment, compare
from common.observability.worker_metrics import ACTOR_ENV_STEPS
from common.units import Seconds
from services.cli.inspect.scrape import Source

HEALTHY, BROKEN = 0, 1
WHOLE_CYCLE = 2  # updates, between which the learner waits and trains once
BELIEVED = 0.95  # share of time idle, above which no gain is promised: the rate of a busy side was not measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """`gain` is the most that removing the bottleneck could bring; "" where it is not known."""

    verdict: Verdict
    gain: str
    findings: tuple[Finding, ...]


def doctor(source: Source, *, seconds: Seconds | None, stdout: TextIO, sleep: Callable[[Seconds], None] = time.sleep) -> int:
    """Diagnose over `seconds` (None: the default of the source), print the report, and return the exit code.

    Raises `ConfigError` where there is no learner, or more than the ranks of one, or no time has passed between the two scrapes.
    """
    measured = measure(source, seconds or source.window, sleep=sleep)
    run = with_learner(measured)
    learners = [service.title for service in run.ranks]
    silent = [service for service in run.services if not service.role]
    if not learners and silent:  # several: any of them may be the learner, or a rank of it
        found = ", ".join(f"{service.title} ({service.after.unreachable})" for service in silent)
        print(f"{source.title}: no learner answers, and no answer came from {found}; see their logs", file=stdout)
        return BROKEN
    ranks = any(rank.now(metrics.RANKS) > 1 for rank in run.ranks) or all(rank.after.unreachable for rank in run.ranks)
    if not learners or (len(learners) > 1 and not ranks) or not run.of_one_run:
        fix = "name the services of one run, its learner among them, or its --namespace"
        raise ConfigError("a diagnosis is of one learner", found=", ".join(learners) or "none", wanted="one", fix=fix)
    if all(service.seconds <= 0 for service in run.services):
        fix = "raise --seconds to several scrape intervals" if source.keeps_history else "raise --seconds"
        raise ConfigError("nothing was measured", found="two scrapes of one moment", wanted="some seconds between them", fix=fix)
    diagnosis = diagnose(run)
    for line in report(source.title, run, diagnosis):
        print(line, file=stdout)
    if run is not measured:
        print(f"{run.learner.name} was taken for the learner: it does not answer, and no other service is one", file=stdout)
    return BROKEN if any(finding.check.fault for finding in diagnosis.findings) else HEALTHY


def with_learner(run: Deployment) -> Deployment:
    """Return the run with the one service whose role is not known as its learner, where no learner is known.

    A killed learner does not state its role, and an address does not contain it.
    """
    unknown = [service for service in run.services if not service.role]
    if run.known_learner or len(unknown) != 1:
        return run
    return Deployment(tuple(replace(service, role=service.role or LEARNER) for service in run.services))


def measure(source: Source, seconds: Seconds, *, sleep: Callable[[Seconds], None] = time.sleep) -> Deployment:
    """Return the deployment over `seconds`: the last ones where the source keeps history, else the next ones."""
    before = source.read(seconds)
    if not source.keeps_history:
        sleep(seconds)
    return compare(before, source.read())


def diagnose(run: Deployment) -> Diagnosis:
    """Return bottleneck, gain and failed checks of a run. Its learner must be known."""
    training = bool(run.learner.now(metrics.TRAINING) == 1 and run.learner.measured)
    verdict = run.bottleneck
    return Diagnosis(verdict=verdict, gain=gain(run, verdict), findings=findings(CHECKS, run, training=training))


# --- the gain ---


def gain(run: Deployment, verdict: Verdict) -> str:
    """Return how much faster the run could be at most without its bottleneck: Amdahl's law on the measured shares."""
    waits, held = run.learner.shares.get("wait", 0.0), shares(run.actor_phases).get("credit_wait", 0.0)
    match verdict.kind:
        case Kind.ACTOR:
            return f"{_at_most(waits)}, the most that the learner could train on{_more_actors(run, waits)}"
        case Kind.LEARNER if run.connected_actors:
            return f"{_at_most(held)}, the most that these actors could make; without that phase {_at_most(verdict.share)}"
        case Kind.CPU:
            return f"{_at_most(verdict.share)}, if a core were always free"
        case Kind.NETWORK | Kind.CREDIT | Kind.CREDIT_OR_NETWORK if held >= WAITING:
            return f"{_at_most(min(waits, held))}, until the side that waits less is busy{_round_trip(run)}"
        case _:
            return ""


def _at_most(idle: float) -> str:
    return "many times as fast" if idle > BELIEVED else f"at most {1.0 / (1.0 - idle):.1f} times as fast"


def _more_actors(run: Deployment, waits: float) -> str:
    count = len(run.connected_actors)
    if not count or run.unmeasured or waits > BELIEVED:
        return ""
    more = math.ceil(count * waits / (1.0 - waits))
    rate = sum(actor.rate(ACTOR_ENV_STEPS) for actor in run.connected_actors) / count
    actors = "actor" if more == 1 else "actors"
    return f"; {more} more {actors} like the {count} here ({rate:,.0f} env steps/s each) would feed it"


def _round_trip(run: Deployment) -> str:
    messages = sum(actor.experience_sent for actor in run.connected_actors)
    if not messages:
        return ""
    seconds = run.unacknowledged_seconds / messages
    bytes_ = run.learner.rate(metrics.MESSAGE_BYTES_RECEIVED) + run.learner.rate(metrics.MESSAGE_BYTES_SENT)
    on_the_wire = "" if math.isnan(run.wire) else f", {percent(run.wire)} of that on the wire"
    return f"; a message is under way for {seconds:.2g} s{on_the_wire}; the wire carries {bytes_ / 1e6:.2g} MB/s"


# --- the report ---


def report(title: str, run: Deployment, diagnosis: Diagnosis) -> Iterator[str]:
    """Yield the lines of the report."""
    seconds = max(service.seconds for service in run.services)
    yield f"{title}: {_count(run)}, over {seconds:.0f} s"
    if run.missing_ranks:
        yield run.missing_ranks
    yield ""
    yield diagnosis.verdict.sentence
    if diagnosis.gain:
        yield f"  gain     {diagnosis.gain}"
    if run.learner.shares:
        yield f"  learner  {_spent(run.learner.shares)}"
    if run.connected_actors:
        yield f"  actors   {_spent(shares(run.actor_phases))}"
    if diagnosis.verdict.kind is not Kind.UNKNOWN and (updates := run.learner.grew(metrics.UPDATES)) < WHOLE_CYCLE:
        yield f"  updates within this time: {updates:.0f}; the shares are of a part of an update; raise --seconds"
    yield ""
    if not any(finding.check.fault for finding in diagnosis.findings):
        yield "nothing is broken"
    for finding in diagnosis.findings:
        yield f"{finding.check.name}: {finding.sentence}"


def _count(run: Deployment) -> str:
    names = [service.title for service in run.services]
    return ", ".join(names) if len(names) <= 6 else f"{len(names)} services"  # noqa: PLR2004


def _spent(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{phase} {percent(part)}" for phase, part in sorted(parts.items(), key=lambda item: -item[1]))
