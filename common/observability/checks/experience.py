"""Checks of the way of experience: actors act by the newest policy at an even rate, and their messages are trained on."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from common.errors import BAD_CONTENT
from common.observability import env_metrics, promql, worker_metrics
from common.observability import learner_metrics as learner
from common.observability.bottleneck import percent
from common.observability.checks.base import COUNT, OURS, PERCENT, TRAINS, WAITING, Check, Threshold, declared, largest_first
from common.observability.deployment import ACTOR, Deployment, Service
from common.observability.promql import ORDINARY_DROPS
from common.observability.rules import ACTOR_RATE, ALL, DROPPED_SHARE, LAG_SHARE

# --- it is fresh ---

LAG_LIMIT = Threshold(
    value=0.5,
    unit="share of the largest policy lag accepted",
    why="half way to the lag at which experience is dropped as stale; the ordinary lag is far below",
)


def _lag(run: Deployment) -> Iterator[str]:
    lag, limit = run.learner.mean(learner.POLICY_LAG), run.learner.now(learner.POLICY_LAG_LIMIT)
    if limit and LAG_LIMIT.passed(lag / limit):
        yield f"experience is {lag:.0f} versions old, beyond {limit:.0f} it is dropped; lower learner.credits"


LAG = Check(
    name="PolicyLagHigh",
    sentence="Experience is old when it is trained on",
    promql=str(LAG_SHARE),
    threshold=LAG_LIMIT,
    only=[TRAINS],
    lasting="10m",
    detail=f"The mean policy lag is {PERCENT} of learner.max_policy_lag, beyond which experience is dropped.",
    predicate=_lag,
    runbook="""\
The ordinary lag is [credits x actors / batch](architecture.md#credits-and-policy-lag-in-numbers).
1. Raise `learner.batch` or lower `learner.credits`, or run fewer actors.
2. If the return rises in spite of it, raise `learner.max_policy_lag`.
""",
)


def _stale_snapshots(run: Deployment) -> Iterator[str]:
    for actor in run.stale_actors:
        version, newest = actor.now(worker_metrics.ACTOR_POLICY_VERSION), run.learner.now(learner.POLICY_VERSION)
        yield (
            f"{actor.title} has acted by version {version:.0f} through {actor.experience_sent:.0f} rollouts, the newest is "
            f"{newest:.0f}; look at the connection between the learner and it"
        )


STALE_SECONDS = 300
SNAPSHOTS = Check(
    name="SnapshotsStale",
    sentence="An actor acts by an old policy",
    promql=f"changes({worker_metrics.ACTOR_POLICY_VERSION}[{STALE_SECONDS}s])",
    threshold=Threshold(
        value=STALE_SECONDS,
        unit="seconds without a new policy",
        why="an actor takes the newest policy before each rollout, and a rollout takes seconds",
    ),
    condition="== 0",
    only=[
        TRAINS,
        f"and on (namespace, instance) rate({worker_metrics.ACTOR_ENV_STEPS}[{STALE_SECONDS}s]) > 0",
        f"and on (namespace) changes({learner.POLICY_VERSION}[{STALE_SECONDS}s]) > 0",
        f"and on (namespace, instance) {worker_metrics.ACTOR_POLICY_VERSION} offset {STALE_SECONDS}s",  # it was there
    ],
    lasting="2m",
    detail=f"{{{{ $labels.instance }}}} steps and has loaded no policy for {STALE_SECONDS} s.",
    predicate=_stale_snapshots,
    runbook="""\
1. Does one rollout take five minutes? Then shorten `rollout.length`.
2. Else bytes from learner to actor do not arrive: see the actor's log, and "Reconnects" on dashboard Transport.
""",
)

# --- it is not lost ---

DROPPED_LIMIT = Threshold(
    value=0.01,
    unit="share of the env steps",
    why="stepping environments is the largest cost; one per cent is more than a replaced actor now and then",
)


def _drops(run: Deployment) -> Iterator[str]:
    if run.learner.restarted:  # its counters start from the totals of its checkpoint
        return
    grown = run.learner.grew_by_label(learner.ENV_STEPS_DROPPED)
    lost = {reason: steps for reason, steps in grown.items() if steps and reason not in ORDINARY_DROPS}
    gone, trained = sum(lost.values()), run.learner.grew(learner.ENV_STEPS_TRAINED)
    if gone and DROPPED_LIMIT.passed(share := gone / (gone + trained)):
        yield f"{percent(share)} of the env steps are dropped ({largest_first(lost, ',.0f')}); see docs/metrics.md"


DROPPED = Check(
    name="ExperienceDropped",
    sentence="Env steps are dropped and not trained on",
    promql=str(DROPPED_SHARE),
    threshold=DROPPED_LIMIT,
    only=[TRAINS],
    # A learner that resumes takes over the counters of its checkpoint, which the rate counts as drops for its window.
    lasting="10m",
    detail=f"{PERCENT} of the env steps are dropped.",
    predicate=_drops,
    runbook="""\
Dashboard Overview, "Env steps dropped, by reason"; [metrics.md](metrics.md#drop-reasons) explains each reason.
1. `stale`: see [PolicyLagHigh](#policylaghigh).
2. `worker_lost`: actors die. Check their logs, their memory limits, and whether their machines are taken away.
3. `non_finite`, `out_of_range`, `episodes`, `schema`, `decode`: see [DecodeErrors](#decodeerrors).
""",
)

UNREADABLE = Threshold(
    value=0,
    unit="messages",
    why="workers of the same release send none: one means another version, a damaged link or an unknown sender",
)


def _unreadable(run: Deployment) -> Iterator[str]:
    unread = sum(run.learner.grew(learner.MESSAGES_DROPPED, reason) for reason in BAD_CONTENT)
    if UNREADABLE.passed(unread):
        yield f"{unread:.0f} messages are none of this run; use the same rookery version everywhere"


DECODE_ERRORS = Check(
    name="DecodeErrors",
    sentence="The learner received messages that are none of its run",
    promql=f'increase({learner.MESSAGES_DROPPED}{{reason=~"{"|".join(BAD_CONTENT)}"}}[10m])',
    threshold=UNREADABLE,
    detail=f"{COUNT} messages in 10 minutes were refused as {{{{ $labels.reason }}}}.",
    predicate=_unreadable,
    runbook="""\
The learner's log names the sender and the fault.
1. `decode`: another release on one side, or an unknown sender that reaches the port: close the port to the outside.
2. `schema`: an actor steps another environment, or has other packages.
3. `non_finite`: the environment returns NaN or infinity as reward or observation.
4. `out_of_range`: a reward beyond 1e7, or an observation or action beyond 1e6: scale it in the environment (a wrapper).
5. `episodes`: an actor reports returns that its rewards do not add up to: another release, or a forgery.

A worker of which 16 messages were refused, and no experience was accepted between them, is evicted for a minute: see
[WorkersEvicted](#workersevicted).
""",
)


def _evicted(run: Deployment) -> Iterator[str]:
    learner_, running = run.learner, sum(service.role == ACTOR for service in run.services)
    away = learner_.now(learner.WORKERS_CONNECTED, ACTOR) < running
    if learner_.grew(learner.WORKERS_EVICTED) or (away and learner_.now(learner.WORKERS_EVICTED) > 0):
        refused = {reason: learner_.now(learner.MESSAGES_DROPPED, reason) for reason in BAD_CONTENT}
        why = largest_first({reason: count for reason, count in refused.items() if count > 0}, ".0f")
        yield f"workers were evicted, because only bad messages came from them ({why}); the learner's log has worker and fault"


EVICTED = Check(
    name="WorkersEvicted",
    sentence="The learner evicted a worker that sends only experience that cannot be trained on",
    promql=f"increase({learner.WORKERS_EVICTED}[10m])",
    threshold=Threshold(
        value=0, unit="workers", why="no worker sends 16 bad messages by accident, and no good experience between them"
    ),
    detail=f"{COUNT} evictions in 10 minutes.",
    predicate=_evicted,
    runbook="""\
The learner's log has `experience_refused` with the worker, the reason and the fault, and then `worker_evicted`. The worker may
join again after a minute, and is evicted again if it sends the same. [DecodeErrors](#decodeerrors) explains the reasons. A run of
`rookery train` of which all experience is refused ends by itself.
""",
)

# --- a replay memory has room for it ---

REPLAY_INCOMPLETE = Threshold(
    value=0.2,
    unit="share of the replay memory in incomplete blocks",
    why="a tenth is planned for; blocks of more actors than actor.count, or of actors that restart, cannot hold rows of others",
)


def _replay_shrinks(run: Deployment) -> Iterator[str]:
    if REPLAY_INCOMPLETE.passed(share := run.learner.now(learner.TRAINING_METRIC, "replay_incomplete")):
        yield f"{percent(share)} of it are blocks that are not full; set actor.count to all actors that join"


REPLAY_SHRINKS = Check(
    name="ReplayShrinks",
    sentence="The replay memory holds less than it was set to",
    threshold=REPLAY_INCOMPLETE,
    predicate=_replay_shrinks,
    runbook="""\
Each environment writes to a block of its own, which cannot hold the rows of others. The memory is laid out for `actor.count`
actors: set it to the number of all that join, wherever they run, or raise `algorithm.replay_capacity`. Actors that restart again
and again leave incomplete blocks behind. The learner's log has `replay_shrinks`.
""",
)

# --- actors take part, each as fast as the others ---

CONNECTED_SHARE = Threshold(
    value=0.8,
    unit="share of the actors that run",
    why="one of a few may be restarting; a fifth is no coincidence",
    below=True,
)


def _missing(run: Deployment) -> Iterator[str]:
    running = sum(service.role == ACTOR for service in run.services)
    connected = run.learner.now(learner.WORKERS_CONNECTED, ACTOR)
    if running and not run.missing_ranks and CONNECTED_SHARE.passed(connected / running):
        yield f"{connected:.0f} of {running} actors are connected"


ACTORS_UP = f"up{{{promql.jobs(ACTOR)}}}"
MISSING = Check(
    name="ActorsMissing",
    sentence="Actors run and are not connected to the learner, or none runs",
    promql=f'sum by (namespace) ({learner.WORKERS_CONNECTED}{{role="actor"}})\n'
    f"/ (count by (namespace) ({ACTORS_UP} == 0 or {ACTORS_UP} {OURS}) or sum by (namespace) ({learner.TRAINING}))",
    threshold=CONNECTED_SHARE,
    only=[TRAINS],
    lasting="5m",
    detail=f"{PERCENT} of the actors are connected.",
    predicate=_missing,
    runbook="""\
1. `/readyz` of an actor that is not connected, and its log: it is refused (with the reason), or does not reach the learner's
   address.
2. The learner refuses more actors than `learner.max_actors`, in lockstep than `actor.count`.
3. If none runs, start some.
""",
)


def _rank_without_actors(run: Deployment) -> Iterator[str]:
    actors = {rank.title: rank.now(learner.WORKERS_CONNECTED, ACTOR) for rank in run.ranks}
    if run.learner.now(learner.RANKS) > 1 and any(connected > 0 for connected in actors.values()):
        for title in (title for title, connected in actors.items() if connected == 0):
            yield f"{title} has no actor and trains on nothing; start more actors, with names that end in 0, 1, ..."


RANK_WITHOUT_ACTORS = Check(
    name="RankWithoutActors",
    sentence="A rank of the learner has no actor, and trains on nothing",
    promql=f'sum by (namespace, instance) ({learner.WORKERS_CONNECTED}{{role="actor"}})',
    condition="== 0",
    only=[
        f"and on (namespace, instance) {learner.RANKS} > 1",
        f'and on (namespace) sum by (namespace) ({learner.WORKERS_CONNECTED}{{role="actor"}}) > 0',
        TRAINS,
    ],
    lasting="5m",
    detail="{{ $labels.instance }} has no actor.",
    predicate=_rank_without_actors,
    runbook="""\
The run goes on by the experience of the other ranks, and the core or GPU of this one is idle. An actor belongs to the rank of the
number at the end of its name, or of a hash of its name. Names of pods are random, so few actors may all belong to one rank.
1. Start more actors, or delete a pod of a rank that has several: the next one has another name.
2. Where you name the actors, let their names end in numbers from 0 on.
3. `actor.learner` of each actor has the addresses of all ranks, in the same order.
""",
)

ROWS_MISSING = Threshold(
    value=0.01,
    unit="share of the rows of a policy server",
    why="an env worker that is replaced costs a few rows; one of a hundred that is away costs one per cent",
)


def _env_workers_missing(run: Deployment) -> Iterator[str]:
    for actor in run.actors:
        connected = actor.now(str(env_metrics.ENV_WORKERS))  # NaN of an actor that is no policy server
        missing = actor.grew(str(env_metrics.MISSING_ROWS)) + (connected == 0)
        if missing and ROWS_MISSING.passed(share := missing / (missing + actor.grew(worker_metrics.ACTOR_ENV_STEPS))):
            seen = f"{percent(share)} of the rows of {actor.title} are missing (env workers connected: {connected:.0f})"
            yield f"{seen}; start those that lack, and see their logs"


ENV_WORKERS_MISSING = Check(
    name="EnvWorkersMissing",
    sentence="Rows of a policy server are missing, because env workers are lost, late or not there",
    promql=promql.missing_share(ALL),
    threshold=ROWS_MISSING,
    only=[TRAINS],
    lasting="5m",
    detail=f"{PERCENT} of the rows of {{{{ $labels.instance }}}} are missing.",
    predicate=_env_workers_missing,
    runbook="""\
These rows are not valid and in no ledger: the run goes on with the others, and a batch has fewer env steps. Dashboard Actors,
"Env workers" and "Missing rows".
1. Fewer env workers than `policy_server.workers`: start them; `env_worker_lost` in the log of the policy server names those that
   were lost, and their own logs have the reason.
2. As many as that: they are late, and `env_worker_late` names them. Give them more CPU, or raise `policy_server.step_timeout_ms`.
""",
)

STRAGGLER_ACTORS = 3
"""Number of actors from which one of them can be a straggler."""

STRAGGLER_SHARE = Threshold(
    value=0.5,
    unit="share of the median actor's env steps per second",
    why="equal actors on equal cores differ by a few per cent; half the speed is a throttled or shared core",
    below=True,
)


def _stragglers(run: Deployment) -> Iterator[str]:
    rates = {actor.name: actor.rate(worker_metrics.ACTOR_ENV_STEPS) for actor in run.actors}
    usual = median(rates.values()) if rates else 0.0
    if len(rates) < STRAGGLER_ACTORS:
        return
    for actor in run.actors:
        if actor.now(worker_metrics.ACTOR_CONNECTED) == 0:  # `WorkerDisconnected` names it
            continue
        waits = actor.shares.get("credit_wait", 0.0) >= WAITING.value
        if usual and not waits and STRAGGLER_SHARE.passed(rates[actor.name] / usual):
            yield (
                f"{actor.title} makes {rates[actor.name]:,.0f} env steps/s, the median is {usual:,.0f}; {_busiest(actor)}; "
                "look at what else runs on its machine"
            )


def _busiest(actor: Service) -> str:
    if not actor.shares:
        return "its loop does not turn"
    phase, share = max(actor.shares.items(), key=lambda item: item[1])
    return f"it spends {percent(share)} in {phase}"


STRAGGLER = Check(
    name="ActorStraggler",
    sentence="An actor is much slower than the others",
    promql=promql.beside_the_median(str(ACTOR_RATE)),
    threshold=STRAGGLER_SHARE,
    only=[
        TRAINS,
        f"and on (namespace) count by (namespace) ({ACTOR_RATE}) >= {STRAGGLER_ACTORS}",
        f"unless on (namespace, instance) ({promql.actors_wait(ALL, by='namespace, instance')}) >= {WAITING.value:g}",
        f"unless on (namespace, instance) {worker_metrics.ACTOR_CONNECTED} == 0",
    ],
    lasting="10m",
    detail=f"{{{{ $labels.instance }}}} makes env steps at {PERCENT} of the median actor's rate.",
    predicate=_stragglers,
    runbook="""\
It needs three actors or more. An actor that waits for credit is none: it could make more than the learner takes; nor is one that
is not connected.
1. Its CPU on dashboard Actors: near its limit it is throttled, far below the others it shares a core. Give it a whole core,
   and no more threads than cores (`actor.torch_threads`).
2. `snapshot` and `encode` larger than those of others: its network.
3. Kill it: another takes its place, and only its unfinished rollout is lost.
""",
)

CHECKS = declared(globals())
