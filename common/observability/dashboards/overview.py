"""First dashboard: return, speed, bottleneck, policy lag, losses, processes."""

from __future__ import annotations

from common.observability import learner_metrics as learner
from common.observability import promql, worker_metrics
from common.observability.checks import WAITING
from common.observability.checks.base import CPU_LOST
from common.observability.checks.experience import DROPPED_LIMIT, LAG_LIMIT
from common.observability.checks.learner import SHORT_OF_TARGET
from common.observability.metrics import build_info
from common.observability.panels import SHOWN, Dashboard, Panel, Row, share, stat

TRAINED_STATE = 'state="trained"'
TRAINED = f"sum by (namespace) ({SHOWN.series(learner.LEDGER_ENV_STEPS, TRAINED_STATE)})"
PLANNED = f"max by (namespace) ({SHOWN.series(learner.ENV_STEPS_PLANNED)})"
CONNECTED = SHOWN.series(learner.WORKERS_CONNECTED, 'role="actor"')
ACTORS = f"sum by (namespace) ({CONNECTED})"

AT_A_GLANCE = Row(
    "Run at a glance",
    [
        stat(
            "Mean return of 100 episodes",
            "Raw return of the last 100 training episodes. It should rise; losses need not fall.",
            {"mean100": f"max by (namespace) ({SHOWN.series(learner.EPISODE_RETURN_MEAN)})"},
        ),
        stat("Emulator frames per second", "Trained on by the learner.", {"frames/s": SHOWN.total(learner.ENV_FRAMES_TRAINED)}),
        stat(
            "Bottleneck",
            "learner-bound: actors wait for credit. actor-bound: the learner waits for experience. "
            "network-bound, credit-bound: both wait, for the network or for one another; which of the two is unknown while an "
            "actor is connected that is not scraped. network-bound also where new policies do not reach the actors. "
            "balanced: neither waits. cpu-starved: a busy side waits for a core.",
            {"bottleneck": promql.bottleneck(SHOWN)},
            unit="none",
            meanings=promql.BOTTLENECKS,
        ),
        stat(
            "Policy lag",
            "Mean lag of the experience that is trained on, divided by the largest that is accepted (learner.max_policy_lag).",
            {"of the limit": promql.policy_lag_share(SHOWN)},
            unit="percentunit",
            limit=LAG_LIMIT,
        ),
        stat(
            "Env steps dropped",
            "Share of all env steps of the whole run, for any reason, resumes included.",
            {"dropped": promql.lost_share(SHOWN)},
            unit="percentunit",
            limit=DROPPED_LIMIT,
        ),
        stat("Actors connected", "Actors that were welcomed and send heartbeats.", {"actors": ACTORS}),
    ],
)

LEARNING_AND_SPEED = Row(
    "Learning and speed",
    [
        share(
            "Progress",
            "Env steps trained on, as a share of the budget (target.env_steps), resumes included.",
            {"of the env steps planned": f"{TRAINED} / {PLANNED}"},
            limit=SHORT_OF_TARGET.threshold,
        ),
        Panel(
            "Time left",
            "Until the run reaches a budget or its target of mean100, as the learner estimates it; none while it cannot.",
            {"left": f"max by (namespace) ({SHOWN.series(learner.TIME_LEFT)})"},
            unit="s",
        ),
        Panel(
            "Return",
            "Mean raw return of the last 100 training episodes (of all ranks) and of the last evaluation, greedy or as in "
            "training.",
            {
                "training, mean100 of {{instance}}": SHOWN.series(learner.EPISODE_RETURN_MEAN),
                "target of mean100": f"max by (namespace) ({SHOWN.series(learner.TARGET_RETURN)})",
                "target of greedy evaluations": f"max by (namespace) ({SHOWN.series(learner.TARGET_EVALUATION)})",
                "evaluation, {{mode}}": f"max by (namespace, mode) ({SHOWN.series(learner.EVALUATION_RETURN_MEAN)})",
            },
        ),
        Panel(
            "Emulator frames trained on and stepped",
            "Emulator frames per second: trained on by the learner, and stepped by all actors.",
            {"trained on": SHOWN.total(learner.ENV_FRAMES_TRAINED), "stepped": SHOWN.total(worker_metrics.ACTOR_ENV_FRAMES)},
        ),
    ],
    width=12,
)

FLOW = Row(
    "Waiting, policy lag, drops",
    [
        share(
            "Waiting",
            "Share of its time that each side waits for the other. A side below the line is busy.",
            {"learner, for experience": promql.learner_waits(SHOWN), "actors, for credit": promql.actors_wait(SHOWN)},
            limit=WAITING,
        ),
        Panel(
            "Policy lag in versions",
            "Versions between the policy that acted and the newest, when experience is trained on: their mean, and the "
            "largest number that is accepted.",
            {
                "mean": promql.policy_lag(SHOWN),
                "limit": f"max by (namespace) ({SHOWN.series(learner.POLICY_LAG_LIMIT)})",
            },
        ),
        Panel(
            "Env steps dropped, by reason",
            "Per second. A learner that resumes takes over the counts of its checkpoint, which shows as a peak.",
            {"{{reason}}": SHOWN.total(learner.ENV_STEPS_DROPPED, by="namespace, reason")},
            stacked=True,
        ),
    ],
)

PROCESSES = Row(
    "Processes",
    [
        Panel(
            "Actors connected and wanted",
            "Connected; and as many of these as would keep the learner busy, by the rates per second of work. "
            "Unknown in the warm-up of a replay memory.",
            {"connected": ACTORS, "wanted": promql.actors_wanted(SHOWN)},
        ),
        Panel("Targets up", "Services that answer Prometheus.", {"{{job}}": f"sum by (namespace, job) ({SHOWN.series('up')})"}),
        share(
            "Time without a core",
            "Share of its time in which a side has work for a core and has none. A busy side above the line is cpu-starved.",
            {"learner": promql.learner_cpu_lost(SHOWN), "actors": promql.actors_cpu_lost(SHOWN)},
            limit=CPU_LOST,
        ),
        Panel(
            "Resident memory",
            "Of each process.",
            {"{{job}} {{instance}}": SHOWN.series("process_resident_memory_bytes")},
            unit="bytes",
            width=12,
        ),
        Panel(
            "CPU", "Cores that each process uses.", {"{{job}} {{instance}}": SHOWN.rate("process_cpu_seconds_total")}, width=12
        ),
    ],
)

EVALUATOR = Row(
    "Evaluator",
    [
        Panel(
            "Return of evaluations",
            "Mean raw return of the last complete evaluation, greedy or as in training.",
            {"{{mode}}": SHOWN.series(worker_metrics.EVALUATOR_EPISODE_RETURN_MEAN)},
        ),
        Panel(
            "Versions behind the newest policy",
            "Newest version of the learner less the one under evaluation, or last evaluated; none before the first.",
            {"{{instance}}": promql.versions_behind(SHOWN)},
        ),
        share(
            "Phases of the evaluator",
            "Share of each phase in its time. It rests (idle) to leave the cores to the training.",
            {"{{phase}}": promql.phase_shares(SHOWN, worker_metrics.EVALUATOR_PHASE_SECONDS)},
            stacked=True,
        ),
    ],
)

DASHBOARD = Dashboard(
    uid="rookery-overview",
    title="Rookery / Overview",
    description="One run at a glance: return, speed, waiting, policy lag, drops.",
    of=build_info("learner"),
    rows=[AT_A_GLANCE, LEARNING_AND_SPEED, FLOW, EVALUATOR, PROCESSES],
)
