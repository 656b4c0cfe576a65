"""Recording rules: the series that Prometheus computes all the time, for alerts and autoscalers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from common.observability import learner_metrics as learner
from common.observability import promql
from common.observability.promql import BOTTLENECKS, Scope

ALL = Scope(window="5m")


@dataclass(frozen=True, slots=True)
class RecordingRule:
    """A recording rule: its name, its expression, and its row of `docs/monitoring.md`."""

    name: str
    expression: str
    help: str

    def __str__(self) -> str:
        return self.name


ENV_FRAMES = RecordingRule(
    "namespace:rookery_learner_env_frames_trained:rate5m",
    ALL.total(learner.ENV_FRAMES_TRAINED),
    "emulator frames trained on per second",
)
LEARNER_CAPACITY = RecordingRule(
    "namespace:rookery_learner_capacity_env_steps:rate5m",
    promql.learner_capacity(ALL),
    "learner capacity: env steps per second that the learner would train on if it never waited; none while the window holds the "
    "warm-up of a replay memory, in which env steps cost no gradient steps",
)
ACTORS_WANTED = RecordingRule(
    "namespace:rookery_actors_wanted:rate5m",
    promql.actors_wanted(ALL),
    "learner capacity divided by the env steps that one actor makes per second of work: the actors that keep the learner busy",
)
LEARNER_WAITS = RecordingRule(
    "namespace:rookery_learner_wait:share5m", promql.learner_waits(ALL), "share of its time that the learner waits for experience"
)
ACTORS_WAIT = RecordingRule(
    "namespace:rookery_actor_credit_wait:share5m",
    promql.actors_wait(ALL),
    "share of their time that the connected actors wait for credit",
)
ON_THE_WIRE = RecordingRule(
    "namespace:rookery_messages_on_the_wire:share5m",
    promql.on_the_wire(ALL),
    "share of the time from sending a message to its acknowledgement that it is not in the learner's queue; none while "
    "the window holds the start of another learner process, or an actor is connected that is not scraped",
)
ACTORS_STALE = RecordingRule(
    "namespace:rookery_actor_policy_stale:share5m",
    promql.actors_stale(ALL),
    "share of the actors that sent two rollouts or more, all by one policy, although a newer one had been published before",
)
LEARNER_CPU_LOST = RecordingRule(
    "namespace:rookery_learner_cpu_lost:share5m",
    promql.learner_cpu_lost(ALL),
    "share of its time in which the learner computes and has no core",
)
ACTORS_CPU_LOST = RecordingRule(
    "namespace:rookery_actor_cpu_lost:share5m",
    promql.actors_cpu_lost(ALL),
    "share of their time in which the connected actors have work for a core and have none",
)
SHARES = (LEARNER_WAITS, ACTORS_WAIT, ON_THE_WIRE, ACTORS_STALE, LEARNER_CPU_LOST, ACTORS_CPU_LOST)
BOTTLENECK = RecordingRule(
    "namespace:rookery_bottleneck:kind5m",
    promql.bottleneck(ALL, {rule.expression: rule.name for rule in SHARES}),
    ", ".join(f"{number} {kind}" for number, kind in enumerate(BOTTLENECKS)),
)
ACTOR_RATE = RecordingRule(
    "namespace_instance:rookery_actor_env_steps:rate5m", promql.actor_rates(ALL), "env steps per second of each actor"
)
LAG_SHARE = RecordingRule(
    "namespace:rookery_learner_policy_lag:share_avg5m",
    promql.policy_lag_share(ALL),
    "mean policy lag, divided by `learner.max_policy_lag`",
)
QUEUE_FILL = RecordingRule(
    "namespace:rookery_learner_queue:share_avg5m",
    promql.queue_fill(ALL),
    "mean depth of the learner's queue, divided by its capacity",
)
DROPPED_SHARE = RecordingRule(
    "namespace:rookery_learner_env_steps_dropped:share5m",
    promql.dropped_share(ALL),
    "share of the env steps that is dropped, without the ordinary drops: duplicates, resumes, the ends of actors and runs",
)

# In the order of this module: a rule comes after those that it reads.
RECORDING_RULES = tuple(rule for rule in tuple(globals().values()) if isinstance(rule, RecordingRule))


def groups(alerts: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return recording rules and `alerts` in the form of a rule file and of a PrometheusRule."""
    recording = [{"record": rule.name, "expr": rule.expression} for rule in RECORDING_RULES]
    return [
        {"name": "rookery.recording", "rules": recording},
        {"name": "rookery.alerts", "rules": list(alerts)},
    ]
