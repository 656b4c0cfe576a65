"""First dashboard: return, speed, bottleneck, policy lag, losses, processes."""

from __future__ import annotations

from common.observability import learner_metrics as learner
from common.observability import promql, worker_metrics
from common.observability.checks import WAITING
from common.observability.checks.base import CPU_LOST
from common.observability.checks.experience import DROPPED_LIMIT, LAG_LIMIT
from common.observability.checks.learner import SHORT_OF_TARGET
from common.observability.metrics import build_info
from common.observability.panels import SHOWN, Dashboard, Panel, Query, Row, stat

TRAINED_STATE = 'state="trained"'
TRAINED = f"sum by (namespace) ({SHOWN.series(learner.LEDGER_ENV_STEPS, TRAINED_STATE)})"
PLANNED = f"max by (namespace) ({SHOWN.series(learner.ENV_STEPS_PLANNED)})"
ACTORS = SHOWN.series(learner.WORKERS_CONNECTED, 'role="actor"')


def _at_a_glance() -> Row:
    learns = f"max by (namespace) ({SHOWN.series(learner.EPISODE_RETURN_MEAN)})"
    frames = SHOWN.total(learner.ENV_FRAMES_TRAINED)
    return Row(
        "Run at a glance",
        [
            stat(
                "Mean return of 100 episodes",
                "Raw return of the last 100 training episodes. It should rise; losses need not fall.",
                Query(learns, "mean100"),
                unit="short",
            ),
            stat("Emulator frames per second", "Trained on by the learner.", Query(frames, "frames/s"), unit="short"),
            stat(
                "Bottleneck",
                "learner-bound: actors wait for credit. actor-bound: the learner waits for experience. "
                "network-bound, pace-bound: both wait, for the network or for one another. balanced: neither waits. "
                "cpu-starved: a busy side waits for a core.",
                Query(promql.bottleneck(SHOWN), "bottleneck"),
                unit="none",
                meanings=promql.BOTTLENECKS,
            ),
            stat(
                "Policy lag",
                "95th percentile of the lag of the experience that is trained on, divided by the largest lag that is "
                "accepted (learner.max_policy_lag).",
                Query(promql.policy_lag_share(SHOWN), "of the limit"),
                unit="percentunit",
                limit=LAG_LIMIT,
            ),
            stat(
                "Env steps dropped",
                "Share of all env steps of the whole run, for any reason, resumes included.",
                Query(promql.lost_share(SHOWN), "dropped"),
                unit="percentunit",
                limit=DROPPED_LIMIT,
            ),
            stat(
                "Actors connected",
                "Actors that were welcomed and send heartbeats.",
                Query(f"sum by (namespace) ({ACTORS})", "actors"),
                unit="short",
            ),
        ],
    )


def _learning_and_speed() -> Row:
    return Row(
        "Learning and speed",
        [
            Panel(
                title="Progress",
                description="Env steps trained on, as a share of the budget (target.env_steps), resumes included.",
                queries=[Query(f"{TRAINED} / {PLANNED}", "of the env steps planned")],
                unit="percentunit",
                limit=SHORT_OF_TARGET.threshold,
                maximum=1,
                width=12,
            ),
            Panel(
                title="Time left",
                description="Until the env step budget is spent, at this rate. A target return may end the run before.",
                queries=[Query(f"({PLANNED} - {TRAINED}) / {SHOWN.total(learner.ENV_STEPS_TRAINED)}", "left")],
                unit="s",
                width=12,
            ),
            Panel(
                title="Return",
                description="Mean raw return: of the last 100 training episodes, and of the last evaluation, acting greedily or "
                "as in training.",
                queries=[
                    Query(SHOWN.series(learner.EPISODE_RETURN_MEAN), "training, mean100"),
                    Query(SHOWN.series(learner.TARGET_RETURN), "target of mean100"),
                    Query(SHOWN.series(learner.TARGET_EVALUATION), "target of greedy evaluations"),
                    Query(SHOWN.series(learner.EVALUATION_RETURN_MEAN), "evaluation, {{mode}}"),
                ],
                unit="short",
                width=12,
            ),
            Panel(
                title="Emulator frames trained on and stepped",
                description="Emulator frames per second: trained on by the learner, and stepped by all actors.",
                queries=[
                    Query(SHOWN.total(learner.ENV_FRAMES_TRAINED), "trained on"),
                    Query(SHOWN.total(worker_metrics.ACTOR_ENV_FRAMES), "stepped"),
                ],
                unit="short",
                width=12,
            ),
        ],
    )


def _flow() -> Row:
    return Row(
        "Waiting, policy lag, drops",
        [
            Panel(
                title="Waiting",
                description="Share of its time that each side waits for the other. A side below the line is busy.",
                queries=[
                    Query(promql.learner_waits(SHOWN), "learner, for experience"),
                    Query(promql.actors_wait(SHOWN), "actors, for credit"),
                ],
                unit="percentunit",
                limit=WAITING,
                maximum=1,
            ),
            Panel(
                title="Policy lag in versions",
                description="Versions between the policy that acted and the newest, when experience is trained on; and the "
                "largest that is accepted.",
                queries=[
                    Query(promql.policy_lag(SHOWN, 0.5), "median"),
                    Query(promql.policy_lag(SHOWN, 0.95), "95 %"),
                    Query(f"max by (namespace) ({SHOWN.series(learner.POLICY_LAG_LIMIT)})", "limit"),
                ],
                unit="short",
            ),
            Panel(
                title="Env steps dropped, by reason",
                description="Per second. A learner that resumes takes over the counts of its checkpoint, which shows as a peak.",
                queries=[Query(SHOWN.total(learner.ENV_STEPS_DROPPED, by="namespace, reason"), "{{reason}}")],
                unit="short",
                stacked=True,
            ),
        ],
    )


def _processes() -> Row:
    return Row(
        "Processes",
        [
            Panel(
                title="Actors connected and wanted",
                description="Connected; and as many of these as would keep the learner busy, by the rates per second of work.",
                queries=[
                    Query(f"sum by (namespace) ({ACTORS})", "connected"),
                    Query(promql.actors_wanted(SHOWN), "wanted"),
                ],
                unit="short",
            ),
            Panel(
                title="Targets up",
                description="Services that answer Prometheus.",
                queries=[Query(f"sum by (namespace, job) ({SHOWN.series('up')})", "{{job}}")],
                unit="short",
            ),
            Panel(
                title="Time without a core",
                description="Share of its time in which a side has work for a core and has none. A busy side above the line is "
                "cpu-starved.",
                queries=[
                    Query(promql.learner_cpu_lost(SHOWN), "learner"),
                    Query(promql.actors_cpu_lost(SHOWN), "actors"),
                ],
                unit="percentunit",
                limit=CPU_LOST,
                maximum=1,
            ),
            Panel(
                title="Resident memory",
                description="Of each process.",
                queries=[Query(SHOWN.series("process_resident_memory_bytes"), "{{job}} {{instance}}")],
                unit="bytes",
                width=12,
            ),
            Panel(
                title="CPU",
                description="Cores that each process uses.",
                queries=[Query(SHOWN.rate("process_cpu_seconds_total"), "{{job}} {{instance}}")],
                unit="short",
                width=12,
            ),
        ],
    )


def _evaluator() -> Row:
    version = f"max by (namespace) ({SHOWN.series(learner.POLICY_VERSION)})"
    return Row(
        "Evaluator",
        [
            Panel(
                title="Return of evaluations",
                description="Mean raw return of the last complete evaluation, acting greedily or as in training.",
                queries=[Query(SHOWN.series(worker_metrics.EVALUATOR_EPISODE_RETURN_MEAN), "{{mode}}")],
                unit="short",
            ),
            Panel(
                title="Versions behind the newest policy",
                description="Newest version of the learner less the one under evaluation, or last evaluated.",
                queries=[
                    Query(
                        f"{version} - on (namespace) group_right () {SHOWN.series(worker_metrics.EVALUATOR_POLICY_VERSION)}",
                        "{{instance}}",
                    )
                ],
                unit="short",
            ),
            Panel(
                title="Phases of the evaluator",
                description="Share of each phase in its time. It rests (idle) to leave the cores to the training.",
                queries=[Query(promql.phase_shares(SHOWN, worker_metrics.EVALUATOR_PHASE_SECONDS), "{{phase}}")],
                unit="percentunit",
                stacked=True,
                maximum=1,
            ),
        ],
    )


DASHBOARD = Dashboard(
    uid="rookery-overview",
    title="Rookery / Overview",
    description="One run at a glance: return, speed, waiting, policy lag, drops.",
    of=build_info("learner"),
    rows=[_at_a_glance(), _learning_and_speed(), _flow(), _evaluator(), _processes()],
)
