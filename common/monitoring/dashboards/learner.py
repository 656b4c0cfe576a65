"""The learner: where its time goes, what the algorithm says, what is saved."""

from __future__ import annotations

from typing import Any

from common.monitoring import figures
from common.monitoring import thresholds as limits
from common.monitoring.panels import SHOWN, Dashboard, Panel, Query, Row

TRAINING = "rookery_learner_training_metric"
LOSSES, STEADINESS = "(.+_)?loss", "entropy|explained_variance|approx_kl|clip_fraction|first_ratio_error"
RATES = "learning_rate|grad_norm|nonfinite_steps"


def build() -> dict[str, Any]:
    """The JSON model."""
    return Dashboard(
        uid="rookery-learner",
        title="Rookery / Learner",
        description="The train loop, the algorithm's own figures, and what is kept.",
        of="rookery_learner_training",
        rows=[_time(), _algorithm(), _kept()],
    ).as_json()


def _time() -> Row:
    return Row(
        "Where its time goes",
        [
            Panel(
                title="Phases",
                description="Part of the train loop's time, by what it does. The I/O thread is not in it.",
                queries=[Query(figures.phase_shares(SHOWN, "learner"), "{{phase}}")],
                unit="percentunit",
                stacked=True,
                most=1,
            ),
            Panel(
                title="Env steps",
                description="Trained on per second, and the appetite: what it would train on if it never waited.",
                queries=[
                    Query(SHOWN.total("rookery_learner_env_steps_trained_total"), "trained on"),
                    Query(figures.appetite(SHOWN), "appetite"),
                ],
                unit="short",
            ),
            Panel(
                title="Queue",
                description="How full the queue of experience messages is on average. Above the line actors mostly wait.",
                queries=[Query(figures.queue_fill(SHOWN), "fill")],
                unit="percentunit",
                limit=limits.SATURATED,
                most=1,
            ),
            Panel(
                title="Updates",
                description="Batches trained on per second; each publishes a policy.",
                queries=[Query(SHOWN.total("rookery_learner_updates_total"), "updates")],
                unit="ops",
            ),
            Panel(
                title="Is it training?",
                description="1 while the run trains; 0 while it starts, lets its peers go, or has ended. Alerts ask this first.",
                queries=[Query(SHOWN.series("rookery_learner_training"), "{{instance}}")],
                unit="bool_yes_no",
                most=1,
            ),
            Panel(
                title="Episodes",
                description="Mean length in env steps of the last 100 training episodes.",
                queries=[Query(SHOWN.series("rookery_learner_episode_length_mean"), "length")],
                unit="short",
            ),
        ],
    )


def _algorithm() -> Row:
    return Row(
        "What the algorithm says (of the last update; docs/metrics.md explains each)",
        [
            Panel(
                title="Losses",
                description="Parts of the loss. In reinforcement learning they need not fall while the return rises.",
                queries=[Query(SHOWN.series(TRAINING, f'name=~"{LOSSES}"'), "{{name}}")],
                unit="short",
            ),
            Panel(
                title="Steadiness",
                description="Entropy, KL, clipping and what the value explains, where the algorithm measures them; else lag.",
                queries=[Query(SHOWN.series(TRAINING, f'name=~"{STEADINESS}|policy_lag_mean"'), "{{name}}")],
                unit="short",
            ),
            Panel(
                title="Steps",
                description="Learning rate, size of the gradient, and steps left out because they were not finite.",
                queries=[Query(SHOWN.series(TRAINING, f'name=~"{RATES}"'), "{{name}}")],
                unit="short",
            ),
            Panel(
                title="All else",
                description="Every other figure of the algorithm: of replay, Q values, its own.",
                queries=[Query(SHOWN.series(TRAINING, f'name!~"{LOSSES}|{STEADINESS}"'), "{{name}}")],
                unit="short",
                width=24,
            ),
        ],
    )


def _kept() -> Row:
    age = figures.checkpoint_age(SHOWN)
    interval = SHOWN.series("rookery_learner_checkpoint_interval_seconds")
    mine = f"and on (namespace, job, instance) {SHOWN.series('rookery_learner_training')}"
    return Row(
        "What is kept",
        [
            Panel(
                title="Age of the newest checkpoint",
                description="In checkpoint intervals. So much training is lost if the learner is killed now.",
                queries=[Query(f"({age}) / {interval}", "intervals")],
                unit="short",
                limit=limits.CHECKPOINT,
            ),
            Panel(
                title="Checkpoints that failed",
                description="Per second. The run goes on without them.",
                queries=[Query(SHOWN.total("rookery_learner_checkpoint_failures_total"), "failed")],
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
