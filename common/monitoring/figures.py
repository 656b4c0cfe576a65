"""What is asked of a run, in PromQL: each figure once, for recording rules, alerts and panels alike.

A run is what shares the `namespace` that Kubernetes gives to its targets; where there is none, as in compose, all of one
Prometheus is one run. So whatever is summed over services is summed by `namespace`.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import DropReason
from common.monitoring.thresholds import WAITING, WIRE
from common.runtime.bottleneck import Kind

ORDINARY_DROPS = (DropReason.DUPLICATE, DropReason.ROLLED_BACK, DropReason.UNFINISHED, DropReason.RUN_ENDED)
"""What is dropped where nothing is wrong: what came twice, what a resume costs, and what the end of an actor or a run cuts."""

UNREADABLE_DROPS = (
    DropReason.DECODE,
    DropReason.SCHEMA,
    DropReason.NON_FINITE,
    DropReason.OUT_OF_RANGE,
    DropReason.EPISODES,
)
"""What no peer of this run would send."""

BOTTLENECKS = (Kind.BALANCED, Kind.LEARNER, Kind.ACTOR, Kind.PACE, Kind.NETWORK)
"""What the values of `bottleneck` mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Which series figures are made of, and over how long rates are taken."""

    window: str
    matchers: str = ""

    def series(self, metric: str, matchers: str = "") -> str:
        """A metric, narrowed to `matchers` and to this scope."""
        inside = ", ".join(filter(None, (matchers, self.matchers)))
        return f"{metric}{{{inside}}}" if inside else metric

    def rate(self, metric: str, matchers: str = "") -> str:
        """What a counter gains per second."""
        return f"rate({self.series(metric, matchers)}[{self.window}])"

    def total(self, metric: str, matchers: str = "", *, by: str = "namespace") -> str:
        """What all its counters gain per second."""
        return f"sum by ({by}) ({self.rate(metric, matchers)})"


def phase_shares(scope: Scope, service: str) -> str:
    """Parts of the time of all processes of a service, by phase."""
    metric = f"rookery_{service}_phase_seconds_total"
    return f"{scope.total(metric, by='namespace, phase')} / on (namespace) group_left () {scope.total(metric)}"


def learner_waits(scope: Scope) -> str:
    """Part of its time that the learner waits for experience."""
    return _share(scope, "rookery_learner_phase_seconds_total", 'phase="wait"')


def actors_wait(scope: Scope, *, by: str = "namespace") -> str:
    """Part of their time that the actors wait for credit."""
    return _share(scope, "rookery_actor_phase_seconds_total", 'phase="credit_wait"', by=by)


def _share(scope: Scope, metric: str, matchers: str, *, by: str = "namespace") -> str:
    return f"{scope.total(metric, matchers, by=by)} / {scope.total(metric, by=by)}"


def on_the_wire(scope: Scope) -> str:
    """Part of the time that messages are under way which they do not spend in the learner's queue."""
    queued = scope.total("rookery_learner_queue_seconds_total")
    return f"1 - {queued} / {scope.total('rookery_actor_unacknowledged_seconds_total')}"


def bottleneck(learner_waits: str, actors_wait: str, on_the_wire: str) -> str:
    """Index into `BOTTLENECKS`, by the rule of `common.runtime.bottleneck`; no series while nothing is known of the learner.

    Where nothing is known of the actors the learner alone decides.
    """
    waiting = f"{WAITING.value:g}"
    learner, actors = (f"(({share}) >= 0)" for share in (learner_waits, actors_wait))  # NaN, of 0 / 0 seconds, is left out
    both = f"{learner} >= {waiting} and on (namespace) {actors} >= {waiting}"
    network = f"0 * ({both} and on (namespace) ({on_the_wire}) >= {WIRE.value:g}) + {BOTTLENECKS.index(Kind.NETWORK)}"
    held = f"({actors} >= bool {waiting} or on (namespace) {learner} < bool {waiting})"
    return f"{network} or on (namespace) 2 * ({learner} >= bool {waiting}) + on (namespace) {held}"


def appetite(scope: Scope) -> str:
    """Env steps per second that the learner would train on if it never waited: per second of its work."""
    return f"{scope.total('rookery_learner_env_steps_trained_total')} / {_work(scope, 'learner', 'wait')}"


def actor_speed(scope: Scope, *, by: str = "namespace, instance") -> str:
    """Env steps per second of an actor that is never held up: per second of its work."""
    return f"{scope.total('rookery_actor_env_steps_total', by=by)} / {_work(scope, 'actor', 'credit_wait', by=by)}"


def _work(scope: Scope, service: str, waiting: str, *, by: str = "namespace") -> str:
    return scope.total(f"rookery_{service}_phase_seconds_total", f'phase!="{waiting}"', by=by)


def actors_wanted(scope: Scope) -> str:
    """Actors like those that play now which would keep the learner busy."""
    return f"({appetite(scope)}) / ({actor_speed(scope, by='namespace')})"


def actor_rates(scope: Scope) -> str:
    """Env steps per second of each actor."""
    return scope.total("rookery_actor_env_steps_total", by="namespace, instance")


def beside_the_median(rates: str) -> str:
    """Each actor's rate as a part of the median actor's."""
    return f"{rates} / on (namespace) group_left () quantile by (namespace) (0.5, {rates})"


def policy_lag(scope: Scope, quantile: float) -> str:
    """Versions between the policy that acted and the newest, when experience is trained on."""
    buckets = scope.total("rookery_learner_policy_lag_versions_bucket", by="namespace, le")
    return f"histogram_quantile({quantile:g}, {buckets})"


def policy_lag_share(scope: Scope) -> str:
    """The lag that 95 % of the experience stays below, as a part of what is accepted at all."""
    limit = scope.series("rookery_learner_policy_lag_limit_versions")
    return f"{policy_lag(scope, 0.95)} / max by (namespace) ({limit})"


def queue_fill(scope: Scope) -> str:
    """How full the learner's queue is on average."""
    depth, capacity = (
        f"sum by (namespace) (avg_over_time({scope.series(f'rookery_learner_queue_{what}')}[{scope.window}]))"
        for what in ("depth", "capacity")
    )
    return f"{depth} / {capacity}"


def dropped_share(scope: Scope) -> str:
    """Part of the env steps that were lost for a reason that is not ordinary, of all that was trained on or lost."""
    lost = scope.total("rookery_learner_env_steps_dropped_total", f'reason!~"{"|".join(ORDINARY_DROPS)}"')
    return f"{lost} / ({scope.total('rookery_learner_env_steps_trained_total')} + {lost})"


def lost_share(scope: Scope) -> str:
    """Part of all env steps of the whole run that was dropped, for whatever reason: what the ledger does not find elsewhere."""
    kept = scope.series("rookery_learner_ledger_env_steps", 'state!="produced"')
    produced = scope.series("rookery_learner_ledger_env_steps", 'state="produced"')
    return f"1 - sum by (namespace) ({kept}) / sum by (namespace) ({produced})"


def checkpoint_age(scope: Scope) -> str:
    """Seconds since the last checkpoint, or since the learner began where it has written none."""
    saved = scope.series("rookery_learner_checkpoint_last_success_timestamp_seconds")
    began = scope.series("process_start_time_seconds")
    learners = scope.series("rookery_learner_training")
    return f"time() - ({saved} > 0 or {began} and on (namespace, job, instance) {learners})"
