"""Quantities of a run in PromQL: each is written once, for recording rules, alerts and panels alike.

All targets of one run share the `namespace` that Kubernetes gives them; without one, as in compose, rules hold for one run.
Sums over services are therefore sums by `namespace`. Dashboards show one run by the labels of `rookery_run_info`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from common.errors import DropReason
from common.observability import env_metrics as env
from common.observability import learner_metrics as learner
from common.observability import worker_metrics as worker
from common.observability.bottleneck import CPU_LOST, ON_THE_WIRE, STALE, WAITING, Kind
from common.observability.deployment import ACTOR, EXPERIENCE, JOBS, LEARNER, ROLLOUTS
from common.observability.metrics import Metric

ORDINARY_DROPS = (DropReason.DUPLICATE, DropReason.ROLLED_BACK, DropReason.UNFINISHED, DropReason.RUN_ENDED)
"""Drops of a healthy run: duplicates, the cost of a resume, and rollouts cut short by the end of an actor or a run."""

BOTTLENECKS = (Kind.BALANCED, Kind.LEARNER, Kind.ACTOR, Kind.CREDIT, Kind.NETWORK, Kind.CPU, Kind.CREDIT_OR_NETWORK)
"""Meaning of the values of `bottleneck`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The series of a quantity, and the window over which rates are taken. `run` matches the labels of their runs; "": any.

    Rates of a scope of `connected` are those of `Deployment.connected_actors` alone.
    """

    window: str
    matchers: str = ""
    run: str = ""
    connected: bool = False

    def series(self, metric: Metric[Any] | str, matchers: str = "") -> str:
        """Return the series of a metric, narrowed to `matchers` and to this scope."""
        return self.of_runs(self.selector(metric, matchers))

    def selector(self, metric: Metric[Any] | str, matchers: str = "") -> str:
        """Return the selector of a metric, narrowed to `matchers` and to those of this scope."""
        inside = ", ".join(filter(None, (matchers, self.matchers)))
        return f"{metric}{{{inside}}}" if inside else str(metric)

    def of_runs(self, vector: str) -> str:
        """Return a vector without the series of other runs' processes."""
        return f"({vector} and on (namespace, job, instance) {learner.RUN_INFO}{{{self.run}}})" if self.run else vector

    def rate(self, metric: Metric[Any] | str, matchers: str = "") -> str:
        """Return the growth of each counter per second."""
        growth = self.of_runs(f"rate({self.selector(metric, matchers)}[{self.window}])")
        lost = f"unless on (namespace, job, instance) {self.selector(worker.ACTOR_CONNECTED)} == 0"
        return f"({growth} {lost})" if self.connected else growth

    def total(self, metric: Metric[Any] | str, matchers: str = "", *, by: str = "namespace") -> str:
        """Return the growth per second of all counters together."""
        return f"sum by ({by}) ({self.rate(metric, matchers)})"


def jobs(*roles: str) -> str:
    """Return the matcher of the services with these roles."""
    return _one_of("job", (job for job, role in JOBS.items() if role in roles))


def phase_shares(scope: Scope, phase_seconds: Metric[Any]) -> str:
    """Share of each phase in the time of all processes of a service."""
    return f"{scope.total(phase_seconds, by='namespace, phase')} / on (namespace) group_left () {scope.total(phase_seconds)}"


def learner_waits(scope: Scope) -> str:
    """Share of its time that the learner waits for experience."""
    return _share(scope, learner.PHASE_SECONDS, 'phase="wait"')


def learner_trains(scope: Scope) -> str:
    """Share of its time that the learner spends in updates."""
    return _share(scope, learner.PHASE_SECONDS, 'phase="train"')


def actors_wait(scope: Scope, *, by: str = "namespace") -> str:
    """Share of their time that the actors wait for credit."""
    return _share(replace(scope, connected=True), worker.ACTOR_PHASE_SECONDS, 'phase="credit_wait"', by=by)


def _share(scope: Scope, metric: Metric[Any], matchers: str, *, by: str = "namespace") -> str:
    return f"{scope.total(metric, matchers, by=by)} / {scope.total(metric, by=by)}"


def on_the_wire(scope: Scope) -> str:
    """Share of the time from sending a message to its acknowledgement that it is not in the queue of the learner.

    No series while actors are connected that are not scraped: the queue holds their messages too.
    """
    actors, sent = replace(scope, connected=True), worker.ACTOR_UNACKNOWLEDGED_SECONDS
    queued, under_way = scope.total(learner.QUEUE_SECONDS), actors.total(sent)
    connected, scraped = scope.series(learner.WORKERS_CONNECTED, 'role="actor"'), actors.rate(sent)
    some_lack = f"sum by (namespace) ({connected}) > count by (namespace) ({scraped})"
    return f"1 - {queued} / {under_way} unless on (namespace) {some_lack} {unless_restarted(scope)}"


def unless_restarted(scope: Scope) -> str:
    """Return a clause that leaves out runs whose learner began anew: the seconds of actors go on without a learner.

    After a long outage, or as another target, it has no value at the begin of the window, where its actors have one.
    """
    start, actors = (scope.selector("process_start_time_seconds", jobs(role)) for role in (LEARNER, ACTOR))
    lacked = f"{start} unless {start} offset {scope.window} and on (namespace) {actors} offset {scope.window}"
    return f"unless on (namespace) {scope.of_runs(f'(changes({start}[{scope.window}]) > 0 or {lacked})')}"


def actors_stale(scope: Scope) -> str:
    """Share of the actors whose last rollouts were all by one policy, as `Deployment.stale_actors` finds."""
    each, kinds = "namespace, instance", _one_of("kind", EXPERIENCE)
    version, window = worker.ACTOR_POLICY_VERSION, f"[{scope.window}]"
    rollouts = scope.of_runs(f"increase({scope.selector(worker.ACTOR_MESSAGES_SENT, kinds)}{window})")
    loaded = scope.of_runs(f"changes({scope.selector(version)}{window})")
    published = scope.of_runs(f"min_over_time({scope.selector(learner.POLICY_VERSION)}{window})")  # at the start of the window
    older = f"{scope.series(version)} < on (namespace) group_left () max by (namespace) ({published})"
    stale = f"sum by ({each}) ({rollouts}) >= {ROLLOUTS} and on ({each}) {loaded} == 0 and on ({each}) {older}"
    actors = f"count by (namespace) ({scope.series(version)})"
    return f"(count by (namespace) ({stale}) or on (namespace) 0 * {actors}) / {actors}"


def learner_cpu_lost(scope: Scope) -> str:
    """Share of its time in which the learner computes and has no core."""
    computes = scope.total(learner.PHASE_SECONDS, _one_of("phase", learner.COMPUTING))
    all_reduce, cpu = scope.total(learner.ALL_REDUCE_SECONDS), scope.total(learner.COMPUTING_CPU_SECONDS)
    return f"clamp_min(({computes} - {all_reduce} - {cpu}) / {scope.total(learner.PHASE_SECONDS)}, 0)"


def actors_cpu_lost(scope: Scope, *, by: str = "namespace") -> str:
    """Share of their time in which actors have work for a core and have none, as `Deployment.actors_cpu_lost` estimates it."""
    actors, phases, each = replace(scope, connected=True), worker.ACTOR_PHASE_SECONDS, "namespace, instance"
    computes = actors.total(phases, _one_of("phase", worker.ACTOR_COMPUTING), by=by)
    got, whole = (actors.total(metric, by=by) for metric in (worker.ACTOR_COMPUTING_CPU_SECONDS, phases))
    cpu, works = (
        actors.total(metric, matchers, by=each)
        for metric, matchers in (("process_cpu_seconds_total", jobs(ACTOR)), (phases, 'phase!="credit_wait"'))
    )
    used = f"sum by ({by}) ({cpu} < {works} or {works} and {cpu})"
    return f"clamp_max({used} * ({computes} / {got} - 1) / {whole}, 1)"


def _one_of(label: str, values: Iterable[str]) -> str:
    return f'{label}=~"{"|".join(values)}"'


def bottleneck(scope: Scope, recorded: Mapping[str, str] = MappingProxyType({})) -> str:
    """Index into `BOTTLENECKS`, by the rule of `find_bottleneck`; no series before the learner has been measured.

    Without measured actors the learner alone decides. `recorded` has the names of recording rules by their expressions.
    """
    shares = (learner_waits, actors_wait, on_the_wire, actors_stale, learner_cpu_lost, actors_cpu_lost)
    expressions = (share(scope) for share in shares)
    learner_share, actors_share, wire, stale, learner_lost, actors_lost = (recorded.get(text, text) for text in expressions)
    waiting = f"{WAITING:g}"
    learner, actors = (f"(({share}) >= 0)" for share in (learner_share, actors_share))  # NaN, of 0 / 0 seconds, is left out
    both = f"{learner} >= {waiting} and on (namespace) {actors} >= {waiting}"
    network = f"0 * ({both} and on (namespace) ({wire}) >= {ON_THE_WIRE:g}) + {BOTTLENECKS.index(Kind.NETWORK)}"
    unknown = f"0 * ({both} unless on (namespace) ({wire})) + {BOTTLENECKS.index(Kind.CREDIT_OR_NETWORK)}"
    held = f"({actors} >= bool {waiting} or on (namespace) {learner} < bool {waiting})"
    short = " or on (namespace) ".join(
        f"{side} < {waiting} and on (namespace) ({lost}) > {CPU_LOST:g}"
        for side, lost in ((learner, learner_lost), (actors, actors_lost))
    )
    cpu_starved = f"0 * ({short}) + {BOTTLENECKS.index(Kind.CPU)}"
    cut_off = f"{learner} >= {waiting} and on (namespace) ({stale}) >= {STALE:g}"
    no_policies = f"0 * ({cut_off}) + {BOTTLENECKS.index(Kind.NETWORK)}"
    by_waits = f"2 * ({learner} >= bool {waiting}) + on (namespace) {held}"
    by_wire = f"{network} or on (namespace) {unknown}"
    kind = f"({no_policies} or on (namespace) {cpu_starved} or on (namespace) {by_wire} or on (namespace) {by_waits})"
    return f"{kind} {unless_restarted(scope)}"


def learner_capacity(scope: Scope) -> str:
    """Env steps that the learner trains on per second of work: its rate if it never waited.

    No series while the window holds a warm-up, in which env steps cost no gradient steps.
    """
    by = "namespace, instance"  # each rank has a capacity of its own
    trained = scope.total(learner.ENV_STEPS_TRAINED, by=by)
    working = scope.total(learner.PHASE_SECONDS, 'phase!="wait"', by=by)
    drawn = scope.selector(learner.TRAINING_METRIC, 'name="samples_per_insert"')
    warm_up = scope.of_runs(f"min_over_time({drawn}[{scope.window}]) == 0")
    return f"sum by (namespace) ({trained} / {working}) unless on (namespace) {warm_up}"


def actor_speed(scope: Scope, *, by: str = "namespace, instance") -> str:
    """Env steps of each actor per second of work: its rate if it never waited."""
    working = scope.total(worker.ACTOR_PHASE_SECONDS, 'phase!="credit_wait"', by=by)
    return f"{scope.total(worker.ACTOR_ENV_STEPS, by=by)} / {working}"


def actors_wanted(scope: Scope) -> str:
    """Number of actors, as fast as the present ones, that would keep the learner busy."""
    return f"({learner_capacity(scope)}) / ({actor_speed(scope, by='namespace')})"


def actor_rates(scope: Scope) -> str:
    """Env steps per second of each actor."""
    return scope.total(worker.ACTOR_ENV_STEPS, by="namespace, instance")


def beside_the_median(rates: str) -> str:
    """Rate of each actor divided by the median."""
    return f"{rates} / on (namespace) group_left () quantile by (namespace) (0.5, {rates})"


def policy_lag(scope: Scope) -> str:
    """Mean number of versions between the policy that acted and the newest, when experience is trained on."""
    return f"{scope.total(f'{learner.POLICY_LAG}_sum')} / {scope.total(f'{learner.POLICY_LAG}_count')}"


def versions_behind(scope: Scope) -> str:
    """Newest version of the learner less that of each evaluator that has a policy."""
    newest = f"max by (namespace) ({scope.series(learner.POLICY_VERSION)})"
    return f"{newest} - on (namespace) group_right () ({scope.series(worker.EVALUATOR_POLICY_VERSION)} >= 0)"


def policy_lag_share(scope: Scope) -> str:
    """Mean policy lag divided by the largest lag that is trained on."""
    limit = scope.series(learner.POLICY_LAG_LIMIT)
    return f"{policy_lag(scope)} / max by (namespace) ({limit})"


def queue_fill(scope: Scope) -> str:
    """Mean depth of the learner's queue divided by its capacity."""
    depth, capacity = (
        f"sum by (namespace) ({scope.of_runs(f'avg_over_time({scope.selector(metric)}[{scope.window}])')})"
        for metric in (learner.QUEUE_DEPTH, learner.QUEUE_CAPACITY)
    )
    return f"{depth} / {capacity}"


def dropped_share(scope: Scope) -> str:
    """Env steps dropped for a reason not in `ORDINARY_DROPS`, divided by those and the env steps trained on."""
    lost = scope.total(learner.ENV_STEPS_DROPPED, f'reason!~"{"|".join(ORDINARY_DROPS)}"')
    return f"{lost} / ({scope.total(learner.ENV_STEPS_TRAINED)} + {lost})"


def missing_share(scope: Scope) -> str:
    """Missing rows of each policy server, divided by those and its env steps; 1 of one without env workers: it makes no step."""
    by = "namespace, instance"
    none = f"(sum by ({by}) ({scope.series(env.ENV_WORKERS)}) == bool 0)"
    missing = f"({scope.total(env.MISSING_ROWS, by=by)} + {none})"
    return f"{missing} / ({missing} + {scope.total(worker.ACTOR_ENV_STEPS, by=by)})"


def lost_share(scope: Scope) -> str:
    """Share of all env steps of the whole run that was dropped, for any reason: the rest of the ledger."""
    kept = scope.series(learner.LEDGER_ENV_STEPS, 'state!="produced"')
    produced = scope.series(learner.LEDGER_ENV_STEPS, 'state="produced"')
    return f"1 - sum by (namespace) ({kept}) / sum by (namespace) ({produced})"


def checkpoint_age(scope: Scope) -> str:
    """Seconds since the last checkpoint, or since the start of a learner that has written none."""
    saved = scope.series(learner.CHECKPOINT_LAST_SUCCESS)
    began = scope.series("process_start_time_seconds")
    learners = scope.series(learner.TRAINING)
    scraped = scope.of_runs(f"timestamp({scope.selector(learner.TRAINING)})")  # now may be a scrape interval later
    return f"{scraped} - ({saved} > 0 or {began} and on (namespace, job, instance) {learners})"


def copy_age(scope: Scope) -> str:
    """Seconds by which the last upload, or the start of a learner without one, is older than the checkpoint before the newest."""
    saved, every = scope.series(learner.CHECKPOINT_LAST_SUCCESS), scope.series(learner.CHECKPOINT_INTERVAL)
    copied, began = scope.series(learner.UPLOAD_LAST_SUCCESS), scope.series("process_start_time_seconds")
    return f"{saved} - {every} - ({copied} > 0 or {began} and on (namespace, job, instance) {copied} == 0)"
