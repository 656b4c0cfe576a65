"""Recording rules and alerts: what Prometheus computes all the time, and when it calls somebody.

An alert that judges a run asks first whether the run trains: one that has ended, and whose learner stays to answer, is
silent. `docs/monitoring.md` has a heading for each alert: what it means, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from common.monitoring import figures
from common.monitoring import thresholds as limits
from common.monitoring.figures import Scope

RUNBOOK = "docs/monitoring.md"
"""Where the headings are, within this repository; a deployment may put the address of its own copy before it."""

ALL = Scope(window="5m")
TRAINS = "and on (namespace) rookery_learner_training == 1"

FRAMES = "namespace:rookery_learner_env_frames_trained:rate5m"
APPETITE = "namespace:rookery_learner_appetite_env_steps:rate5m"
WANTED = "namespace:rookery_actors_wanted:rate5m"
LEARNER_WAITS = "namespace:rookery_learner_wait:share5m"
ACTORS_WAIT = "namespace:rookery_actor_credit_wait:share5m"
ON_THE_WIRE = "namespace:rookery_messages_on_the_wire:share5m"
BOTTLENECK = "namespace:rookery_bottleneck:kind5m"
ACTOR_RATE = "namespace_instance:rookery_actor_env_steps:rate5m"
LAG = "namespace:rookery_learner_policy_lag:share_p95_5m"
QUEUE = "namespace:rookery_learner_queue:share_avg5m"
DROPPED = "namespace:rookery_learner_env_steps_dropped:share5m"

RECORDED = {  # name -> expression; a rule comes after those that it reads
    FRAMES: ALL.total("rookery_learner_env_frames_trained_total"),
    APPETITE: figures.appetite(ALL),
    WANTED: figures.actors_wanted(ALL),
    LEARNER_WAITS: figures.learner_waits(ALL),
    ACTORS_WAIT: figures.actors_wait(ALL),
    ON_THE_WIRE: figures.on_the_wire(ALL),
    BOTTLENECK: figures.bottleneck(LEARNER_WAITS, ACTORS_WAIT, ON_THE_WIRE),
    ACTOR_RATE: figures.actor_rates(ALL),
    LAG: figures.policy_lag_share(ALL),
    QUEUE: figures.queue_fill(ALL),
    DROPPED: figures.dropped_share(ALL),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert: it fires once `figure` has been `bad` for as long as `lasting`, where `only` holds."""

    name: str
    figure: str
    bad: str = ""
    only: Sequence[str] = ()
    lasting: str
    severity: Literal["critical", "warning", "info", "none"]
    summary: str
    description: str

    @property
    def expression(self) -> str:
        """The whole condition, a line for each part."""
        return "\n".join([f"{self.figure} {self.bad}".strip(), *self.only])

    def as_rule(self) -> dict[str, Any]:
        """As Prometheus wants it."""
        return {
            "alert": self.name,
            "expr": self.expression,
            "for": self.lasting,
            "labels": {"severity": self.severity, "app": "rookery"},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": f"{RUNBOOK}#{self.name.lower()}",
            },
        }


PERCENT = "{{ $value | humanizePercentage }}"

ALERTS = (
    Alert(
        name="LearnerDown",
        figure='up{job="learner"} == 0\n'
        'or count by (namespace) (up{job=~"actor|evaluator"}) unless on (namespace) up{job="learner"}',
        lasting="2m",
        severity="critical",
        summary="The learner does not answer",
        description="Peers run, and no learner answers Prometheus: nothing is trained.",
    ),
    Alert(
        name="LearnerStalled",
        figure=f"sum by (namespace) (increase(rookery_learner_updates_total[{limits.STALLED.value:g}s]))",
        bad="== 0",
        only=[TRAINS, 'and on (namespace) rookery_learner_peers_connected{role="actor"} > 0'],
        lasting="2m",
        severity="critical",
        summary="The learner trains on nothing although actors are connected",
        description=f"No update in {limits.STALLED.value:g} s.",
    ),
    Alert(
        name="LearnerStarved",
        figure=LEARNER_WAITS,
        bad=limits.STARVED.comparison,
        only=[TRAINS],
        lasting="10m",
        severity="warning",
        summary="The learner mostly waits for experience",
        description=f"It waits {PERCENT} of its time: more actors would make the run faster.",
    ),
    Alert(
        name="QueueSaturated",
        figure=QUEUE,
        bad=limits.SATURATED.comparison,
        only=[TRAINS],
        lasting="10m",
        severity="info",
        summary="Actors make more than the learner can train on",
        description=f"Its queue is {PERCENT} full: fewer actors would do.",
    ),
    Alert(
        name="PolicyLagHigh",
        figure=LAG,
        bad=limits.LAG.comparison,
        only=[TRAINS],
        lasting="10m",
        severity="warning",
        summary="Experience is old when it is trained on",
        description=f"The policy lag (95th percentile) is {PERCENT} of learner.max_policy_lag, beyond which it is dropped.",
    ),
    Alert(
        name="ExperienceDropped",
        figure=DROPPED,
        bad=limits.DROPPED.comparison,
        only=[TRAINS],
        # The counters of a learner that resumes begin at its checkpoint, which is a loss to the rate, for its window.
        lasting="10m",
        severity="warning",
        summary="Env steps are played and not trained on",
        description=f"{PERCENT} of the env steps are dropped.",
    ),
    Alert(
        name="DecodeErrors",
        figure=f'increase(rookery_learner_messages_dropped_total{{reason=~"{"|".join(figures.UNREADABLE_DROPS)}"}}[10m])',
        bad=limits.BAD_MESSAGES.comparison,
        lasting="0m",
        severity="warning",
        summary="The learner was sent what is no message of its run",
        description='{{ $value | printf "%.0f" }} messages in 10 minutes were refused as {{ $labels.reason }}.',
    ),
    Alert(
        name="PeersRefused",
        figure=ALL.total("rookery_learner_handshakes_failed_total", by="namespace, reason"),
        bad=limits.REFUSED.comparison,
        lasting="5m",
        severity="warning",
        summary="Somebody asks again and again to be let in, and is refused",
        description='{{ $value | printf "%.1f" }} connections a second come to nothing, by reason of {{ $labels.reason }}.',
    ),
    Alert(
        name="SocketReopened",
        figure="increase(rookery_learner_sockets_reopened_total[10m])",
        bad=limits.REOPENED.comparison,
        lasting="0m",
        severity="warning",
        summary="The learner dropped all connections since its memory was short",
        description='{{ $value | printf "%.0f" }} times in 10 minutes.',
    ),
    Alert(
        name="ActorsMissing",
        figure='sum by (namespace) (rookery_learner_peers_connected{role="actor"})\n'
        '/ (count by (namespace) (up{job="actor"}) or sum by (namespace) (rookery_learner_training))',
        bad=limits.ACTORS.comparison,
        only=[TRAINS],
        lasting="5m",
        severity="warning",
        summary="Actors run and are not connected to the learner, or none runs",
        description=f"{PERCENT} of the actors are connected.",
    ),
    Alert(
        name="ActorStraggler",
        figure=figures.beside_the_median(ACTOR_RATE),
        bad=limits.STRAGGLER.comparison,
        only=[TRAINS, f"and on (namespace) count by (namespace) ({ACTOR_RATE}) >= {limits.STRAGGLER_ACTORS}"],
        lasting="10m",
        severity="warning",
        summary="An actor is much slower than the others",
        description=f"{{{{ $labels.instance }}}} plays at {PERCENT} of the median actor's rate.",
    ),
    Alert(
        name="SnapshotsStale",
        figure=f"changes(rookery_actor_policy_version[{limits.SNAPSHOTS.value:g}s])",
        bad="== 0",
        only=[
            TRAINS,
            f"and on (namespace, instance) rate(rookery_actor_env_steps_total[{limits.SNAPSHOTS.value:g}s]) > 0",
            f"and on (namespace) changes(rookery_learner_policy_version[{limits.SNAPSHOTS.value:g}s]) > 0",
        ],
        lasting="2m",
        severity="warning",
        summary="An actor plays an old policy",
        description=f"{{{{ $labels.instance }}}} plays and has loaded no policy for {limits.SNAPSHOTS.value:g} s.",
    ),
    Alert(
        name="CheckpointTooOld",
        figure=f"({figures.checkpoint_age(ALL)})\n/ rookery_learner_checkpoint_interval_seconds",
        bad=limits.CHECKPOINT.comparison,
        only=[TRAINS],
        lasting="5m",
        severity="warning",
        summary="The newest checkpoint is old",
        description='It is {{ $value | printf "%.1f" }} times checkpoint.every_seconds old: so much is lost on a kill.',
    ),
    Alert(
        name="CheckpointFailing",
        figure="increase(rookery_learner_checkpoint_failures_total[15m])",
        bad="> 0",
        lasting="0m",
        severity="critical",
        summary="Checkpoints cannot be written",
        description='{{ $value | printf "%.0f" }} failed in 15 minutes: what is trained from here on is lost on a kill.',
    ),
    Alert(
        name="MemoryGrowing",
        figure='deriv(process_resident_memory_bytes{job=~"learner|actor|evaluator"}[1h]) * 3600',
        bad=limits.GROWTH.comparison,
        only=[
            f"and on (namespace, job, instance) time() - process_start_time_seconds {limits.SETTLED.comparison}",
            'unless on (namespace, job, instance) deriv(rookery_learner_training_metric{name="replay_env_steps"}[1h]) > 0',
        ],
        lasting="30m",
        severity="warning",
        summary="A process takes more and more memory",
        description="{{ $labels.job }} {{ $labels.instance }} grows by {{ $value | humanize1024 }}B per hour.",
    ),
    Alert(
        name="ThroughputDropped",
        figure=f"{FRAMES} / quantile_over_time(0.5, {FRAMES}[1h])",
        bad=limits.THROUGHPUT.comparison,
        only=[TRAINS],
        lasting="10m",
        severity="warning",
        summary="The run has become much slower",
        description=f"It trains on {PERCENT} of the frames per second of the last hour's median.",
    ),
    Alert(
        name="NonFiniteLoss",
        figure='max_over_time(rookery_learner_training_metric{name="nonfinite_steps"}[5m])',
        bad=limits.NON_FINITE.comparison,
        only=[TRAINS],
        lasting="0m",
        severity="warning",
        summary="The loss or its gradient is not finite",
        description='{{ $value | printf "%.0f" }} gradient steps of one update were left out.',
    ),
    Alert(
        name="TrainingNotFinite",
        figure='min_over_time(rookery_learner_training_metric{name="nonfinite_steps"}[5m])',
        bad=limits.NON_FINITE.comparison,
        only=[TRAINS],
        lasting="5m",
        severity="critical",
        summary="Every update leaves out gradient steps",
        description="No update of the last 5 minutes had a finite loss and gradient in all its steps.",
    ),
    Alert(
        name="Watchdog",
        figure="vector(1)",
        lasting="0m",
        severity="none",
        summary="Alerts are evaluated",
        description="It always fires. Where it stops, Prometheus or the way from it to you is broken.",
    ),
)


def groups() -> list[dict[str, Any]]:
    """All rules, as they stand in a rule file and in a PrometheusRule."""
    recording = [{"record": name, "expr": expression} for name, expression in RECORDED.items()]
    return [
        {"name": "rookery.figures", "rules": recording},
        {"name": "rookery.alerts", "rules": [alert.as_rule() for alert in ALERTS]},
    ]
