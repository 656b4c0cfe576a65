"""Dashboard of the learner: its time, the algorithm's scalars, its checkpoints."""

from __future__ import annotations

from common.observability import learner_metrics as learner
from common.observability import promql
from common.observability.checks.learner import CHECKPOINT_AGE, SATURATED
from common.observability.panels import SHOWN, Dashboard, Panel, Query, Row

SCALARS = f'label_values({learner.TRAINING_METRIC}{{namespace=~"$namespace", job=~"$job"}}, name)'


def _time() -> Row:
    return Row(
        "Use of time",
        [
            Panel(
                title="Phases",
                description="Share of each phase in the time of the train loop. Excludes the I/O thread.",
                queries=[Query(promql.phase_shares(SHOWN, learner.PHASE_SECONDS), "{{phase}}")],
                unit="percentunit",
                stacked=True,
                maximum=1,
            ),
            Panel(
                title="Env steps per second",
                description="Trained on, and the learner capacity: its rate if it never waited.",
                queries=[
                    Query(SHOWN.total(learner.ENV_STEPS_TRAINED), "trained on"),
                    Query(promql.learner_capacity(SHOWN), "capacity"),
                ],
                unit="short",
            ),
            Panel(
                title="Queue fill",
                description="Mean depth of the experience queue, divided by its capacity. Above the line actors mostly wait.",
                queries=[Query(promql.queue_fill(SHOWN), "fill")],
                unit="percentunit",
                limit=SATURATED.threshold,
                maximum=1,
            ),
            Panel(
                title="Updates per second",
                description="Batches trained on; each publishes a policy.",
                queries=[Query(f"max by (namespace) ({SHOWN.rate(learner.UPDATES)})", "updates")],
                unit="ops",
            ),
            Panel(
                title="Training",
                description="1 while the run trains; 0 while it starts, while its workers leave, and after its end.",
                queries=[Query(SHOWN.series(learner.TRAINING), "{{instance}}")],
                unit="bool_yes_no",
                maximum=1,
            ),
            Panel(
                title="Episode length",
                description="Mean length in env steps of the last 100 training episodes.",
                queries=[Query(SHOWN.series(learner.EPISODE_LENGTH_MEAN), "length")],
                unit="short",
            ),
        ],
    )


def _algorithm() -> Row:
    return Row(
        "Scalars of the last update (docs/metrics.md explains each)",
        [
            Panel(
                title="$scalar",
                description="A scalar of the algorithm. Each has a panel and a scale of its own. In reinforcement learning "
                "losses need not fall while the return rises.",
                queries=[Query(SHOWN.series(learner.TRAINING_METRIC, 'name=~"$scalar"'), "{{name}}")],
                unit="short",
                repeat="scalar",
            )
        ],
    )


def _ranks() -> Row:
    return Row(
        "Ranks of the learner",
        [
            Panel(
                title="Updates per second of each rank",
                description="All ranks take the same updates: one that shows another rate was restarted.",
                queries=[Query(SHOWN.rate(learner.UPDATES), "{{instance}}")],
                unit="ops",
                width=6,
            ),
            Panel(
                title="Wait for other ranks",
                description="Share of its time in which a rank is ready for an update and others are not. The rank with the "
                "lowest curve delays the others; a rank without actors waits all the time.",
                queries=[Query(SHOWN.rate(learner.RANKS_WAIT_SECONDS), "{{instance}}")],
                unit="percentunit",
                maximum=1,
                width=6,
            ),
            Panel(
                title="All-reduce",
                description="Share of its time that a rank spends in sums of gradients over all ranks.",
                queries=[Query(SHOWN.rate(learner.ALL_REDUCE_SECONDS), "{{instance}}")],
                unit="percentunit",
                maximum=1,
                width=6,
            ),
            Panel(
                title="Ledger of each rank",
                description="Env steps by state, whole run: produced = trained + queued + in flight + dropped, on every rank.",
                queries=[Query(SHOWN.series(learner.LEDGER_ENV_STEPS), "{{instance}} {{state}}")],
                unit="short",
                width=6,
            ),
        ],
    )


def _storage() -> Row:
    age = promql.checkpoint_age(SHOWN)
    interval = SHOWN.series(learner.CHECKPOINT_INTERVAL)
    mine = f"and on (namespace, job, instance) {SHOWN.series(learner.TRAINING)}"
    return Row(
        "Checkpoints and memory",
        [
            Panel(
                title="Age of the newest checkpoint",
                description="In checkpoint intervals: the training that is lost if the learner is killed now.",
                queries=[Query(f"({age}) / {interval}", "intervals")],
                unit="short",
                limit=CHECKPOINT_AGE,
            ),
            Panel(
                title="Checkpoints failed",
                description="Per second. The run continues without them.",
                queries=[Query(SHOWN.total(learner.CHECKPOINT_FAILURES), "failed")],
                unit="ops",
            ),
            Panel(
                title="Memory",
                description="Resident memory of the learner.",
                queries=[Query(f"{SHOWN.series('process_resident_memory_bytes')} {mine}", "{{instance}}")],
                unit="bytes",
            ),
        ],
    )


DASHBOARD = Dashboard(
    uid="rookery-learner",
    title="Rookery / Learner",
    description="The train loop, the scalars of the algorithm, checkpoints and memory.",
    of=learner.TRAINING,
    rows=[_time(), _ranks(), _storage(), _algorithm()],  # the last row is as long as the algorithm has scalars
    variables={"scalar": SCALARS},
)
