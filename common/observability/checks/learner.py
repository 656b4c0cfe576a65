"""Checks of the learner: it runs, trains, has enough and not too much experience, and saves."""

from __future__ import annotations

import math
from collections.abc import Iterator

from common.observability import learner_metrics as learner
from common.observability import promql
from common.observability.bottleneck import percent
from common.observability.checks.base import COUNT, OURS, PERCENT, TRAINS, Check, Threshold, declared
from common.observability.deployment import ACTOR, LEARNER, MOSTLY_WAITS, ROLES, Deployment, by_label
from common.observability.metrics import LOOP_OVERDUE
from common.observability.promql import Scope
from common.observability.rules import ALL, ENV_FRAMES, LEARNER_WAITS, QUEUE_FILL

# --- it runs and trains ---


def _unreachable(run: Deployment) -> Iterator[str]:
    if run.learner.after.unreachable:
        yield f"{run.learner.title} does not answer: {run.learner.after.unreachable}; see its log"


WORKERS = tuple(role for role in ROLES if role != LEARNER)
WORKERS_UP = f"(up{{{promql.jobs(*WORKERS)}}} {OURS})"
HAS_ENDED = f"last_over_time({learner.ENDED}[1d]) == 1"
JUST_ENDED = f"last_over_time({learner.ENDED}[15m]) == 1"
LEARNER_UP = f'(up{{job="learner"}} == 0 or up{{job="learner"}} {OURS})'  # or down, which the first clause reports
STARTS = f"last_over_time(process_start_time_seconds[1d]) and on (namespace, job, instance) last_over_time({learner.ENDED}[1d])"
NEWEST = f"topk by (namespace) (1, {STARTS})"

DOWN = Check(
    name="LearnerDown",
    sentence="The learner does not answer",
    promql=f'up{{job="learner"}} == 0 '
    f"unless on (namespace, instance) ({JUST_ENDED} or {HAS_ENDED} unless on (namespace) {WORKERS_UP} == 1)\n"
    f"or count by (namespace) {WORKERS_UP} unless on (namespace) {LEARNER_UP} "
    f"unless on (namespace) ({HAS_ENDED} and on (namespace, instance) {NEWEST})",
    lasting="2m",
    severity="critical",
    detail="Workers run, and no learner answers Prometheus: nothing is trained.",
    predicate=_unreachable,
    while_training=False,
    runbook="""\
1. Does the process run? Its last log lines give the reason why it ended; exit code 2 is one line about a setting, port, folder or
   checkpoint.
2. It resumes from its newest checkpoint when it is started again, and the actors reconnect by themselves: do not restart them.
3. If it runs and is not scraped, check the network and `metrics.host`, which must not be loopback.
4. After the end of a run it is silent for a day, if Prometheus has scraped `rookery_learner_ended` before the learner exited and
   no other learner has begun. If the end of a run takes less than a scrape interval, let the learner linger (`--linger`);
   with `--job` it cannot: end the workers.
5. Where the target of that learner stays and is down, it is silent for 15 minutes, and then for as long as no worker is up:
   workers that are up may wait for the learner of the next run, which cannot start. Let the learner linger, or end the workers.
""",
)

STALLED_SECONDS = 300
UPDATING = promql.learner_trains(Scope(window=f"{STALLED_SECONDS}s"))


def _stalled(run: Deployment) -> Iterator[str]:
    if not run.stands_still:
        return
    seconds = f"no update in {run.learner.seconds:.0f} s"
    if not run.learner.now(learner.WORKERS_CONNECTED, ACTOR):
        yield f"{seconds}: no actor is connected; start one with `rookery actor --learner ...`"
    else:
        yield f"{seconds}: actors are connected and send nothing; look at their logs"


STALLED = Check(
    name="LearnerStalled",
    sentence="The learner trains on nothing although actors are connected",
    promql=f"sum by (namespace) (increase({learner.UPDATES}[{STALLED_SECONDS}s]))",
    threshold=Threshold(
        value=STALLED_SECONDS,
        unit="seconds without an update",
        why="as long as a gradient step may take before the learner itself counts it as hung",
    ),
    condition="== 0",
    only=[
        TRAINS,
        f'and on (namespace) {learner.WORKERS_CONNECTED}{{role="actor"}} > 0',
        f"and on (namespace) {learner.TRAINING} offset {STALLED_SECONDS}s == 1",  # a new run has had no time for an update
        # A long update is no standstill, unless one of its gradient steps hangs.
        f'and on (namespace) ({UPDATING} < {MOSTLY_WAITS} or on (namespace) {LOOP_OVERDUE}{{job="learner"}} > 0)',
    ],
    lasting="2m",
    severity="critical",
    detail=f"No update in {STALLED_SECONDS} s.",
    predicate=_stalled,
    runbook="""\
Silent while an update takes long and its gradient steps do not hang.

1. `/healthz` of the learner names a gradient step that hangs.
2. Dashboard Learner, "Phases". All `wait`: no batch fills. In lockstep one actor is missing; else check whether actors step
   (dashboard Actors) and whether their messages are refused (dashboard Transport).
3. All `checkpoint`: the disk does not answer.
""",
)

# --- experience arrives as fast as it is trained on ---

WAITING_SHARE = Threshold(
    value=MOSTLY_WAITS,
    unit="share of time",
    why="a learner that waits more could train twice as much: the better half of its machine is idle",
)


def _waiting(run: Deployment) -> Iterator[str]:
    waits = run.learner.shares.get("wait", 0.0)
    if WAITING_SHARE.passed(waits) and not run.stands_still:
        yield f"the learner waits {percent(waits)} of its time for experience; see the bottleneck"


LEARNER_WAITING = Check(
    name="LearnerWaiting",
    sentence="The learner mostly waits for experience",
    severity="info",
    fault=False,
    promql=str(LEARNER_WAITS),
    threshold=WAITING_SHARE,
    only=[TRAINS],
    lasting="10m",
    detail=f"It waits {PERCENT} of its time: more actors would make the run faster.",
    predicate=_waiting,
    runbook="""\
1. Dashboard Overview, "Actors connected and wanted": start as many as are wanted, if there are cores for them.
2. Dashboard Actors, "Phases of all actors": a large `env` or `act` is work; a large `snapshot` or `encode` is a slow network,
   or too short a rollout.
3. Actors that wait for credit at the same time make the run credit-bound: raise `learner.credits`, or lower `learner.batch`.
4. In lockstep it is the price: raise `actor.count`, or accept it.
""",
)
SATURATED = Check(
    name="QueueSaturated",
    sentence="Actors make more than the learner can train on",
    promql=str(QUEUE_FILL),
    threshold=Threshold(
        value=0.9,
        unit="share of the queue's capacity",
        why="nearly every credit is used up: more actors would only wait",
    ),
    only=[TRAINS],
    lasting="10m",
    severity="info",
    detail=f"Its queue is {PERCENT} full: fewer actors would do.",
    runbook="""\
No fault: cores of actors are idle. Run fewer actors, or give the learner more (a GPU, `learner.torch_threads`, a smaller network,
fewer gradient steps per env step).
""",
)
STARTED = f"(process_start_time_seconds and on (namespace, job, instance) {learner.TRAINING})"
SLOWED_MINUTES = 65  # an hour of rates, of which the first is over five minutes
SLOWED = Check(
    name="ThroughputDropped",
    sentence="The run has become much slower",
    promql=f"{ENV_FRAMES} / quantile_over_time(0.5, {ENV_FRAMES}[1h])",
    threshold=Threshold(
        value=0.5,
        unit="share of the median of the last hour",
        why="evaluations and checkpoints cost a few per cent; half is a lost machine or a throttled one",
        below=True,
    ),
    only=[
        TRAINS,
        f"unless on (namespace) time() - {STARTED} < {60 * SLOWED_MINUTES}",
    ],
    lasting="10m",
    detail=f"It trains on {PERCENT} of the emulator frames per second of the last hour's median.",
    runbook="""\
Silent for the first hour of a learner process, which has nothing to be compared with: the run before, and a warm-up without
gradient steps, may have been faster.

1. Were actors removed, by hand or by an autoscaler? Then nothing is wrong.
2. Dashboard Overview, "Bottleneck": if actor-bound, look at the actors; if learner-bound, at the learner's phases and CPU.
3. Another tenant on the machine shows as less CPU for the same processes.
""",
)

# --- it will reach its target ---

BUDGET_SPENT = Threshold(
    value=0.95,
    unit="share of the env step budget",
    why="with a twentieth of the budget left there is time to raise it, and little hope of the return without that",
)


def _short_of_target(run: Deployment) -> Iterator[str]:
    now = run.learner.now
    spent = now(learner.LEDGER_ENV_STEPS, "trained") / (now(learner.ENV_STEPS_PLANNED) or math.nan)
    returns = {
        "the mean return": (now(learner.EPISODE_RETURN_MEAN), now(learner.TARGET_RETURN)),
        "the last greedy evaluation": (now(learner.EVALUATION_RETURN_MEAN, "greedy"), now(learner.TARGET_EVALUATION)),
    }
    short = [f"{name} is {mean:.4g} of {target:.4g}" for name, (mean, target) in returns.items() if mean < target]
    if short and not run.missing_ranks and BUDGET_SPENT.passed(spent):
        yield f"{percent(spent)} of the env steps are spent, and {' and '.join(short)}; raise target.env_steps"


def _below(mean: str, target: object) -> str:
    return f"max by (namespace) ({mean}) < max by (namespace) ({target})"


_EPISODES_BELOW = _below(str(learner.EPISODE_RETURN_MEAN), learner.TARGET_RETURN)
_EVALUATION_BELOW = _below(f'{learner.EVALUATION_RETURN_MEAN}{{mode="greedy"}}', learner.TARGET_EVALUATION)

SHORT_OF_TARGET = Check(
    name="TargetNotReached",
    sentence="The env step budget is nearly spent and the return is below the target",
    promql=f'sum by (namespace) ({learner.LEDGER_ENV_STEPS}{{state="trained"}})\n'
    f"/ max by (namespace) ({learner.ENV_STEPS_PLANNED})",
    threshold=BUDGET_SPENT,
    only=[
        TRAINS,
        f"and on (namespace) ({_EPISODES_BELOW} or {_EVALUATION_BELOW})",
    ],
    lasting="1m",
    severity="info",
    detail=f"{PERCENT} of the env steps are spent.",
    predicate=_short_of_target,
    runbook="""\
1. Dashboard Overview, "Return": if it still rises, let the run end and resume it with a larger `target.env_steps`.
2. If it does not rise, compare the settings with the preset of a similar environment: more env steps alone will not help.
""",
)

# --- its numbers are finite ---

LEFT_OUT = Threshold(
    value=0,
    unit="gradient steps left out",
    why="a loss that is NaN or infinite seldom comes alone",
)


def _non_finite(run: Deployment) -> Iterator[str]:
    if LEFT_OUT.passed(left_out := run.learner.grew(learner.NONFINITE_STEPS)):
        yield f"{left_out:,.0f} gradient steps were not finite and left out; lower algorithm.learning_rate"


NON_FINITE = Check(
    name="NonFiniteLoss",
    sentence="The loss or its gradient is not finite",
    promql=f"increase({learner.NONFINITE_STEPS}[5m])",
    threshold=LEFT_OUT,
    only=[TRAINS],
    detail=f"{COUNT} gradient steps in 5 minutes were left out.",
    predicate=_non_finite,
    runbook="""\
The weights are intact: such a step is not taken. Lower `algorithm.learning_rate`, check the scale of rewards and observations
(`model.normalize_observation`), and, where every step is left out, resume from an earlier checkpoint.
""",
)
NEVER_FINITE = Check(
    name="TrainingNotFinite",
    sentence="Every update leaves out gradient steps",
    promql=f'min_over_time({learner.TRAINING_METRIC}{{name="nonfinite_steps"}}[5m])',
    threshold=LEFT_OUT,
    only=[
        TRAINS,
        f"and on (namespace, job, instance) changes({learner.UPDATES}[5m]) > 0",  # without updates the gauge keeps its last value
    ],
    lasting="5m",
    severity="critical",
    detail="No update of the last 5 minutes had a finite loss and gradient in all its steps.",
    runbook="""\
The run makes little or no progress: see [NonFiniteLoss](#nonfiniteloss), which alone fires where updates take over 5 minutes.
1. `rookery_learner_messages_dropped_total`, reasons `out_of_range` and `non_finite`: the environment of an actor is broken.
2. Else the weights are: lower `algorithm.learning_rate` and resume from an earlier checkpoint.
""",
)

# --- it saves ---

CHECKPOINT_AGE = Threshold(
    value=2.5,
    unit="checkpoint intervals",
    why="one may be missed behind a long update; two are a fault",
)


def _old_checkpoint(run: Deployment) -> Iterator[str]:
    last, every = run.learner.now(learner.CHECKPOINT_LAST_SUCCESS), run.learner.now(learner.CHECKPOINT_INTERVAL)
    trained = max(sum(by_label(rank.after.samples, learner.PHASE_SECONDS.name).values()) for rank in run.ranks)
    age = run.learner.after.at - last if last else trained  # the start of a process may take minutes, and needs no checkpoint
    if every and CHECKPOINT_AGE.passed(age / every):
        found = f"the last one is {age:,.0f} s old" if last else f"none was written in {age:,.0f} s of training"
        yield f"{found}, wanted every {every:,.0f} s; look at the disk"


CHECKPOINT_OLD = Check(
    name="CheckpointTooOld",
    sentence="The newest checkpoint is old",
    promql=f"({promql.checkpoint_age(ALL)})\n/ {learner.CHECKPOINT_INTERVAL}",
    threshold=CHECKPOINT_AGE,
    only=[TRAINS],
    lasting="5m",
    detail='It is {{ $value | printf "%.1f" }} times checkpoint.every_seconds old: so much is lost on a kill.',
    predicate=_old_checkpoint,
    runbook="""\
1. If [CheckpointFailing](#checkpointfailing) fires too, follow its steps.
2. A checkpoint waits for the update that runs. If updates are longer than `checkpoint.every_seconds`, raise it.
""",
)


def _failed_checkpoints(run: Deployment) -> Iterator[str]:
    if failed := run.learner.grew(learner.CHECKPOINT_FAILURES):
        yield f"{failed:.0f} could not be written; look at the disk and the learner's log"


CHECKPOINT_FAILING = Check(
    name="CheckpointFailing",
    sentence="Checkpoints cannot be written",
    promql=f"increase({learner.CHECKPOINT_FAILURES}[15m])",
    threshold=Threshold(value=0, unit="checkpoints that failed", why="a disk that refuses one refuses the next"),
    severity="critical",
    detail=f"{COUNT} failed in 15 minutes: what is trained from here on is lost on a kill.",
    predicate=_failed_checkpoints,
    runbook="""\
The learner's log has the reason. Free space on the disk or the volume; the learner tries again after
`checkpoint.every_seconds`. Do not stop the learner before a checkpoint succeeds: a stop that cannot save exits with 2.
""",
)


UPLOADS_FAILED = Threshold(
    value=5, unit="uploads that failed", why="one is repeated after 30 seconds; more than five are an outage of minutes"
)
COPY_AGE = Threshold(
    value=900,
    unit="seconds by which the copy is older than the checkpoint before the newest",
    why="an upload takes seconds or minutes; one that hangs, or fails after minutes, is seldom counted as failed",
)


def _failed_uploads(run: Deployment) -> Iterator[str]:
    now, failed = run.learner.now, run.learner.grew(learner.UPLOAD_FAILURES)
    copied = now(learner.UPLOAD_LAST_SUCCESS) or now("process_start_time_seconds")
    newer = now(learner.CHECKPOINT_LAST_SUCCESS) - copied
    if failed:
        yield f"{failed:.0f} to the store failed; look at the learner's log"
    elif COPY_AGE.passed(newer - now(learner.CHECKPOINT_INTERVAL)):
        yield f"the copy in the store is {newer:,.0f} s older than the newest checkpoint; look at the learner's log"


UPLOAD_FAILING = Check(
    name="UploadFailing",
    sentence="The copy of the run in its store is not brought up to date",
    promql=f"increase({learner.UPLOAD_FAILURES}[15m])",
    threshold=UPLOADS_FAILED,
    condition=f"{UPLOADS_FAILED.comparison}\nor {promql.copy_age(ALL)} {COPY_AGE.comparison}",
    detail="Uploads to run.store fail or hang: what is newer than the copy is lost with the machine.",
    predicate=_failed_uploads,
    runbook="""\
The learner's log has the reason in its line `upload_failed`: the address of the store, its credentials, or the network. The run
continues, and the next upload that succeeds brings the copy up to date. Keep the run directory until `uploads_resumed` is logged.
Without `upload_failed` an upload hangs or takes a quarter of an hour: raise `checkpoint.every_seconds`, or use a nearer store.
""",
)

CHECKS = declared(globals())
