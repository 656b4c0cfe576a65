"""`rookery doctor`: measure a run for a while, say what holds it up and what could be gained, and list what is broken."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TextIO

from common.errors import ConfigError
from common.runtime.bottleneck import percent
from common.units import Seconds
from services.cli.diagnosis import Diagnosis, diagnose
from services.cli.readings import Fleet, compare, shares
from services.cli.sources import Source
from services.cli.supervisor import LEARNER

HEALTHY, BROKEN = 0, 1


def doctor(source: Source, *, seconds: Seconds | None, stdout: TextIO, sleep: Callable[[Seconds], None] = time.sleep) -> int:
    """Diagnose over `seconds` (None: as long as suits the source) and return the exit code.

    Raises `ConfigError` where there is not one learner.
    """
    fleet = measure(source, seconds or source.window, sleep=sleep)
    learners = [service.title for service in fleet.services if service.role == LEARNER]
    if len(learners) != 1:
        fix = "name the services of one run, its learner among them, or its --namespace"
        raise ConfigError("a diagnosis is of one learner", found=", ".join(learners) or "none", wanted="one", fix=fix)
    diagnosis = diagnose(fleet)
    for line in report(source.title, fleet, diagnosis):
        print(line, file=stdout)
    return BROKEN if diagnosis.faults else HEALTHY


def measure(source: Source, seconds: Seconds, *, sleep: Callable[[Seconds], None] = time.sleep) -> Fleet:
    """The deployment over `seconds`: those just gone where the source remembers them, else those to come."""
    before = source.read(seconds)
    if not source.remembers:
        sleep(seconds)
    return compare(before, source.read())


def report(title: str, fleet: Fleet, diagnosis: Diagnosis) -> Iterator[str]:
    """What the user reads."""
    seconds = max(service.seconds for service in fleet.services)
    yield f"{title}: {_count(fleet)}, over {seconds:.0f} s"
    yield ""
    yield diagnosis.verdict.sentence
    if diagnosis.gain:
        yield f"  gain     {diagnosis.gain}"
    learner = fleet.learner
    if learner is not None and learner.shares:
        yield f"  learner  {_spent(learner.shares)}"
    if fleet.actors:
        yield f"  actors   {_spent(shares(fleet.acting))}"
    yield ""
    if not diagnosis.faults:
        yield "nothing is broken"
    for fault in diagnosis.faults:
        yield f"{fault.name}: {fault.sentence}"


def _count(fleet: Fleet) -> str:
    names = [service.title for service in fleet.services]
    return ", ".join(names) if len(names) <= 6 else f"{len(names)} services"  # noqa: PLR2004


def _spent(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{phase} {percent(part)}" for phase, part in sorted(parts.items(), key=lambda item: -item[1]))
