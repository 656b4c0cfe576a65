"""Dashboard of the learner: its time, the algorithm's scalars, its checkpoints."""

from __future__ import annotations

from common.observability import learner_metrics as learner
from common.observability import promql
from common.observability.checks.learner import CHECKPOINT_AGE, SATURATED
from common.observability.panels import SHOWN, Dashboard, Panel, Row, per_second, share

SCALARS = f'label_values({learner.TRAINING_METRIC}{{namespace=~"$namespace", job=~"$job"}}, name)'

TIME = Row(
    "Use of time",
    [
        share(
            "Phases",
            "Share of each phase in the time of the train loop. Excludes the I/O thread.",
            {"{{phase}}": promql.phase_shares(SHOWN, learner.PHASE_SECONDS)},
            stacked=True,
        ),
        Panel(
            "Env steps per second",
            "Trained on, and the learner capacity: its rate if it never waited, which is unknown in a warm-up.",
            {"trained on": SHOWN.total(learner.ENV_STEPS_TRAINED), "capacity": promql.learner_capacity(SHOWN)},
        ),
        share(
            "Queue fill",
            "Mean depth of the experience queue, divided by its capacity. Above the line actors mostly wait.",
            {"fill": promql.queue_fill(SHOWN)},
            limit=SATURATED.threshold,
        ),
        per_second(
            "Updates per second",
            "Batches trained on; each publishes a policy.",
            {"updates": f"max by (namespace) ({SHOWN.rate(learner.UPDATES)})"},
        ),
        Panel(
            "Training",
            "1 while the run trains; 0 while it starts, while its workers leave, and after its end.",
            {"{{instance}}": SHOWN.series(learner.TRAINING)},
            unit="bool_yes_no",
            maximum=1,
        ),
        Panel(
            "Episode length",
            "Mean length in env steps of the last 100 training episodes.",
            {"{{instance}}": SHOWN.series(learner.EPISODE_LENGTH_MEAN)},
        ),
    ],
)

ALGORITHM = Row(
    "Scalars of training (docs/metrics.md explains each)",
    [
        Panel(
            "$scalar",
            "A scalar of the algorithm. Each has a panel and a scale of its own. In reinforcement learning "
            "losses need not fall while the return rises.",
            {"{{instance}}": SHOWN.series(learner.TRAINING_METRIC, 'name=~"$scalar"')},
            repeat="scalar",
        )
    ],
)

RANKS = Row(
    "Ranks of the learner",
    [
        per_second(
            "Updates per second of each rank",
            "All ranks take the same updates: one that shows another rate was restarted.",
            {"{{instance}}": SHOWN.rate(learner.UPDATES)},
        ),
        share(
            "Wait for other ranks",
            "Share of its time in which a rank is ready for an update and others are not. The rank with the "
            "lowest curve delays the others; a rank without actors waits all the time.",
            {"{{instance}}": SHOWN.rate(learner.RANKS_WAIT_SECONDS)},
        ),
        share(
            "All-reduce",
            "Share of its time that a rank spends in sums of gradients over all ranks.",
            {"{{instance}}": SHOWN.rate(learner.ALL_REDUCE_SECONDS)},
        ),
        Panel(
            "Ledger of each rank",
            "Env steps by state, whole run: produced = trained + queued + in flight + dropped, on every rank.",
            {"{{instance}} {{state}}": SHOWN.series(learner.LEDGER_ENV_STEPS)},
        ),
    ],
    width=6,
)

AGE = promql.checkpoint_age(SHOWN)
INTERVAL = SHOWN.series(learner.CHECKPOINT_INTERVAL)
MINE = f"and on (namespace, job, instance) {SHOWN.series(learner.TRAINING)}"
STORAGE = Row(
    "Checkpoints and memory",
    [
        Panel(
            "Age of the newest checkpoint",
            "In checkpoint intervals: the training that is lost if the learner is killed now.",
            {"{{instance}}": f"({AGE}) / {INTERVAL}"},
            limit=CHECKPOINT_AGE,
        ),
        per_second(
            "Checkpoints failed",
            "Per second. The run continues without them.",
            {"failed": SHOWN.total(learner.CHECKPOINT_FAILURES)},
        ),
        Panel(
            "Memory",
            "Resident memory of the learner.",
            {"{{instance}}": f"{SHOWN.series('process_resident_memory_bytes')} {MINE}"},
            unit="bytes",
        ),
    ],
)

DASHBOARD = Dashboard(
    uid="rookery-learner",
    title="Rookery / Learner",
    description="The train loop, the scalars of the algorithm, checkpoints and memory.",
    of=learner.TRAINING,
    rows=[TIME, RANKS, STORAGE, ALGORITHM],  # the last row is as long as the algorithm has scalars
    variables={"scalar": SCALARS},
)
