"""A check of a run: one declaration for the alert, the doctor's finding, the limit of a panel, and the documentation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from common.observability import bottleneck
from common.observability import learner_metrics as learner
from common.observability.deployment import Deployment

RUNBOOKS = "monitoring.md"
"""Page of the runbooks within docs/."""

TRAINS = f"and on (namespace) {learner.TRAINING} == 1"
"""Condition that the run trains: after its end it raises no alert, even while its learner lingers."""

OURS = f"and on (namespace, job, instance) last_over_time({learner.BUILD_INFO}[1h])"
"""Condition that a target is a process of Rookery: another program's `job` may have the same name."""

PERCENT = "{{ $value | humanizePercentage }}"
COUNT = '{{ $value | printf "%.0f" }}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """A limit. A value above it is bad, or below it where `below` is set; `why` is the reason for the value."""

    value: float
    unit: str
    why: str
    below: bool = False

    @property
    def comparison(self) -> str:
        """Return the condition of a bad value in PromQL: `> 0.5`."""
        return f"{'<' if self.below else '>'} {self.value:.15g}"

    def passed(self, measured: float) -> bool:
        """Return whether `measured` is on the bad side; an unknown one, NaN, is not."""
        return measured < self.value if self.below else measured > self.value


WAITING = Threshold(
    value=bottleneck.WAITING,
    unit="share of time",
    why="a side that waits more is held up by the other; jitter alone makes a few per cent",
)
ON_THE_WIRE = Threshold(
    value=bottleneck.ON_THE_WIRE,
    unit="share of the time from sending a message to its acknowledgement",
    why="where both sides wait and messages are mostly between them, the network holds them up",
)
STALE = Threshold(
    value=bottleneck.STALE,
    unit="share of the actors that new policies do not reach",
    why="where the learner waits, it drops the experience of these actors; a single one of many is no bottleneck",
)
CPU_LOST = Threshold(
    value=bottleneck.CPU_LOST,
    unit="share of time without a core",
    why="two processes that share a core lose half of their time each; jitter and threads of the process itself cost a tenth",
)

Predicate: TypeAlias = Callable[[Deployment], Iterable[str]]
"""Takes a deployment that has a learner; yields a sentence for each occurrence: what was found, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check. An alert fires once `promql` has been bad for as long as `lasting`, while every condition of `only` holds.

    Without `promql` there is no alert, without `predicate` no finding of `rookery doctor`. `runbook` is Markdown.
    """

    name: str
    sentence: str
    promql: str = ""
    threshold: Threshold | None = None
    condition: str = ""  # of a bad value in PromQL, where it is not the comparison with the threshold
    only: Sequence[str] = ()
    lasting: str = "0m"
    severity: Literal["critical", "warning", "info", "none"] = "warning"
    fault: bool = True  # False: a finding states a bottleneck, and nothing is broken
    detail: str = ""  # of the alert, a template of Prometheus
    predicate: Predicate | None = None
    while_training: bool = True  # the predicate holds only of a run that trains
    runbook: str

    @property
    def expression(self) -> str:
        """Return the whole condition of the alert, a line for each part."""
        bad = self.condition or (self.threshold.comparison if self.threshold else "")
        return "\n".join([f"{self.promql} {bad}".strip(), *self.only])

    def as_rule(self, *, docs: str = "") -> dict[str, Any]:
        """Return the alert in the form of a rule file. `docs` is the address of docs/; "" where no server has it."""
        runbook = f"{RUNBOOKS}#{self.name.lower()}"
        return {
            "alert": self.name,
            "expr": self.expression,
            "for": self.lasting,
            "labels": {"severity": self.severity, "app": "rookery"},
            "annotations": {
                "summary": self.sentence,
                "description": self.detail,
                **({"runbook_url": f"{docs.rstrip('/')}/{runbook}"} if docs else {"runbook": f"docs/{runbook}"}),
            },
        }


def declared(module: Mapping[str, object]) -> tuple[Check, ...]:
    """Return the checks among the globals of a module, in its order."""
    return tuple(value for value in module.values() if isinstance(value, Check))


@dataclass(frozen=True, slots=True)
class Finding:
    """One occurrence of a check in a deployment."""

    check: Check
    sentence: str


def findings(checks: Iterable[Check], deployment: Deployment, *, training: bool) -> tuple[Finding, ...]:
    """Return what the checks find; those of a run that trains only where it is `training`."""
    return tuple(
        Finding(check, sentence)
        for check in checks
        if check.predicate and (training or not check.while_training)
        for sentence in check.predicate(deployment)
    )


def largest_first(counts: Mapping[str, float], form: str) -> str:
    """Return counts by reason in words, the largest first, each in a format."""
    return ", ".join(f"{reason} {count:{form}}" for reason, count in sorted(counts.items(), key=lambda item: -item[1]))
