"""The actors, one by one: who is slow, who waits, who plays an old policy."""

from __future__ import annotations

from typing import Any

from common.monitoring import figures
from common.monitoring import thresholds as limits
from common.monitoring.panels import SHOWN, Dashboard, Panel, Query, Row

EACH = "{{instance}}"


def build() -> dict[str, Any]:
    """The JSON model."""
    return Dashboard(
        uid="rookery-actors",
        title="Rookery / Actors",
        description="What each actor does, beside the others.",
        of="rookery_actor_connected",
        rows=[_speed(), _time(), _state()],
    ).as_json()


def _speed() -> Row:
    rates = figures.actor_rates(SHOWN)
    return Row(
        "Who is slow?",
        [
            Panel(
                title="Env steps per second",
                description="What each actor plays, waiting included.",
                queries=[Query(rates, EACH)],
                unit="short",
            ),
            Panel(
                title="Beside the median actor",
                description="Each actor's rate as a part of the median's. Below the line it is a straggler.",
                queries=[Query(figures.beside_the_median(rates), EACH)],
                unit="percentunit",
                limit=limits.STRAGGLER,
            ),
            Panel(
                title="Speed while it works",
                description="Env steps per second of work, waiting for credit left out: a slow actor shows even where all are "
                "held to one pace, as in lockstep.",
                queries=[Query(figures.actor_speed(SHOWN), EACH)],
                unit="short",
            ),
        ],
    )


def _time() -> Row:
    return Row(
        "Who waits?",
        [
            Panel(
                title="Phases of all actors",
                description="Part of the actors' time, by what they do.",
                queries=[Query(figures.phase_shares(SHOWN, "actor"), "{{phase}}")],
                unit="percentunit",
                stacked=True,
                most=1,
                width=12,
            ),
            Panel(
                title="Waiting for credit",
                description="Part of its time that each actor waits for the learner to take what it sent.",
                queries=[Query(figures.actors_wait(SHOWN, by="namespace, instance"), EACH)],
                unit="percentunit",
                limit=limits.WAITING,
                most=1,
                width=12,
            ),
        ],
    )


def _state() -> Row:
    mine = f"and on (namespace, job, instance) {SHOWN.series('rookery_actor_connected')}"
    return Row(
        "How are they?",
        [
            Panel(
                title="Policy version",
                description="Of the policy that acts. Actors that play take a newer one before each rollout.",
                queries=[Query(SHOWN.series("rookery_actor_policy_version"), EACH)],
                unit="short",
            ),
            Panel(
                title="Return",
                description="Mean raw return of each actor's last 100 episodes. One that falls behind plays another game.",
                queries=[Query(SHOWN.series("rookery_actor_episode_return_mean"), EACH)],
                unit="short",
            ),
            Panel(
                title="Env steps given up",
                description="Per second, by reason: what an actor dropped itself, or the learner refused.",
                queries=[Query(SHOWN.total("rookery_actor_env_steps_dropped_total", by="namespace, reason"), "{{reason}}")],
                unit="short",
                stacked=True,
            ),
            Panel(
                title="Connected",
                description="1 while a learner has welcomed the actor and still answers.",
                queries=[Query(SHOWN.series("rookery_actor_connected"), EACH)],
                unit="bool_yes_no",
                most=1,
            ),
            Panel(
                title="Memory",
                description="Resident memory of each actor.",
                queries=[Query(f"{SHOWN.series('process_resident_memory_bytes')} {mine}", EACH)],
                unit="bytes",
            ),
            Panel(
                title="CPU",
                description="Cores that each actor uses. More than its CPU limit it cannot; fewer than one where it waits.",
                queries=[Query(f"{SHOWN.rate('process_cpu_seconds_total')} {mine}", EACH)],
                unit="short",
            ),
        ],
    )
