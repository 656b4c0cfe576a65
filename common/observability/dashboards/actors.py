"""Dashboard of the actors, one by one: speed, waiting, state."""

from __future__ import annotations

from common.observability import env_metrics as env
from common.observability import promql
from common.observability import worker_metrics as worker
from common.observability.checks import WAITING
from common.observability.checks.base import CPU_LOST
from common.observability.checks.experience import STRAGGLER_SHARE
from common.observability.panels import SHOWN, Dashboard, Panel, Query, Row

EACH = "{{instance}}"


def _speed() -> Row:
    rates = promql.actor_rates(SHOWN)
    return Row(
        "Speed",
        [
            Panel(
                title="Env steps per second",
                description="Rate of each actor, waiting included.",
                queries=[Query(rates, EACH)],
                unit="short",
            ),
            Panel(
                title="Rate divided by the median",
                description="Rate of each actor divided by the median actor's. Below the line it is a straggler.",
                queries=[Query(promql.beside_the_median(rates), EACH)],
                unit="percentunit",
                limit=STRAGGLER_SHARE,
            ),
            Panel(
                title="Env steps per second of work",
                description="Waiting for credit left out: a slow actor shows even where all have one pace, as in lockstep.",
                queries=[Query(promql.actor_speed(SHOWN), EACH)],
                unit="short",
            ),
        ],
    )


def _time() -> Row:
    return Row(
        "Use of time",
        [
            Panel(
                title="Phases of all actors",
                description="Share of each phase in the time of all actors.",
                queries=[Query(promql.phase_shares(SHOWN, worker.ACTOR_PHASE_SECONDS), "{{phase}}")],
                unit="percentunit",
                stacked=True,
                maximum=1,
            ),
            Panel(
                title="Waiting for credit",
                description="Share of its time that each actor waits until the learner has taken its messages.",
                queries=[Query(promql.actors_wait(SHOWN, by="namespace, instance"), EACH)],
                unit="percentunit",
                limit=WAITING,
                maximum=1,
            ),
            Panel(
                title="Time without a core",
                description="Share of its time in which each actor has work for a core and has none: other programs or a CPU "
                "limit take it.",
                queries=[Query(promql.actors_cpu_lost(SHOWN, by="namespace, instance"), EACH)],
                unit="percentunit",
                limit=CPU_LOST,
                maximum=1,
            ),
        ],
    )


def _state() -> Row:
    mine = f"and on (namespace, job, instance) {SHOWN.series(worker.ACTOR_CONNECTED)}"
    return Row(
        "State",
        [
            Panel(
                title="Policy version",
                description="Of the policy that acts. An actor takes the newest one before each rollout.",
                queries=[Query(SHOWN.series(worker.ACTOR_POLICY_VERSION), EACH)],
                unit="short",
            ),
            Panel(
                title="Return",
                description="Mean raw return of each actor's last 100 episodes. One that is far off steps another environment.",
                queries=[Query(SHOWN.series(worker.ACTOR_EPISODE_RETURN_MEAN), EACH)],
                unit="short",
            ),
            Panel(
                title="Env steps dropped by actors",
                description="Per second, by reason: dropped by an actor, or refused by the learner.",
                queries=[Query(SHOWN.total(worker.ACTOR_ENV_STEPS_DROPPED, by="namespace, reason"), "{{reason}}")],
                unit="short",
                stacked=True,
            ),
            Panel(
                title="Connected",
                description="1 while a learner has welcomed the actor and still answers.",
                queries=[Query(SHOWN.series(worker.ACTOR_CONNECTED), EACH)],
                unit="bool_yes_no",
                maximum=1,
            ),
            Panel(
                title="Memory",
                description="Resident memory of each actor.",
                queries=[Query(f"{SHOWN.series('process_resident_memory_bytes')} {mine}", EACH)],
                unit="bytes",
            ),
            Panel(
                title="CPU",
                description="Cores that each actor uses: at most its CPU limit, and fewer than one where it waits.",
                queries=[Query(f"{SHOWN.rate('process_cpu_seconds_total')} {mine}", EACH)],
                unit="short",
            ),
        ],
    )


def _policy_servers() -> Row:
    steps, waited = SHOWN.rate(env.STEPS), SHOWN.rate(env.WAIT_SECONDS)
    return Row(
        "Policy servers and env workers",
        [
            Panel(
                title="Env workers",
                description="Slots of each policy server that an env worker holds.",
                queries=[Query(SHOWN.series(env.ENV_WORKERS), EACH)],
                unit="short",
            ),
            Panel(
                title="Wait of a step for env workers",
                description="Mean time from sending actions until the rows of all env workers were there.",
                queries=[Query(f"{waited} / {steps}", EACH)],
                unit="s",
            ),
            Panel(
                title="Rows waiting",
                description="Environments of each policy server that were sent an action and have not answered.",
                queries=[Query(SHOWN.series(env.ROWS_WAITING), EACH)],
                unit="short",
            ),
            Panel(
                title="Missing rows",
                description="Rows per second that no env worker brought: it was late, lost or not there yet.",
                queries=[Query(SHOWN.rate(env.MISSING_ROWS), EACH)],
                unit="short",
            ),
            Panel(
                title="Emulator frames of env workers",
                description="Emulator frames per second of each env worker.",
                queries=[Query(SHOWN.rate(env.ENV_WORKER_ENV_FRAMES), EACH)],
                unit="short",
            ),
            Panel(
                title="Env workers that wait",
                description="Share of its time that each env worker waits for actions.",
                queries=[Query(SHOWN.rate(env.ENV_WORKER_PHASE_SECONDS, 'phase="wait"'), EACH)],
                unit="percentunit",
                maximum=1,
            ),
        ],
    )


DASHBOARD = Dashboard(
    uid="rookery-actors",
    title="Rookery / Actors",
    description="Each actor beside the others.",
    of=worker.ACTOR_CONNECTED,
    rows=[_speed(), _time(), _state(), _policy_servers()],
)
