"""Dashboard of the actors, one by one: speed, waiting, state."""

from __future__ import annotations

from common.observability import env_metrics as env
from common.observability import promql
from common.observability import worker_metrics as worker
from common.observability.checks import WAITING
from common.observability.checks.base import CPU_LOST
from common.observability.checks.experience import STRAGGLER_SHARE
from common.observability.panels import SHOWN, Dashboard, Panel, Row, share

EACH = "{{instance}}"

RATES = promql.actor_rates(SHOWN)
SPEED = Row(
    "Speed",
    [
        Panel("Env steps per second", "Rate of each actor, waiting included.", {EACH: RATES}),
        Panel(
            "Rate divided by the median",
            "Rate of each actor divided by the median actor's. Below the line it is a straggler.",
            {EACH: promql.beside_the_median(RATES)},
            unit="percentunit",
            limit=STRAGGLER_SHARE,
        ),
        Panel(
            "Env steps per second of work",
            "Waiting for credit left out: a slow actor shows even where all have one pace, as in lockstep.",
            {EACH: promql.actor_speed(SHOWN)},
        ),
    ],
)

TIME = Row(
    "Use of time",
    [
        share(
            "Phases of all actors",
            "Share of each phase in the time of all actors.",
            {"{{phase}}": promql.phase_shares(SHOWN, worker.ACTOR_PHASE_SECONDS)},
            stacked=True,
        ),
        share(
            "Waiting for credit",
            "Share of its time that each connected actor waits until the learner has taken its messages.",
            {EACH: promql.actors_wait(SHOWN, by="namespace, instance")},
            limit=WAITING,
        ),
        share(
            "Time without a core",
            "Share of its time in which each connected actor has work for a core and has none: others, or a CPU limit, take it.",
            {EACH: promql.actors_cpu_lost(SHOWN, by="namespace, instance")},
            limit=CPU_LOST,
        ),
    ],
)

MINE = f"and on (namespace, job, instance) {SHOWN.series(worker.ACTOR_CONNECTED)}"
STATE = Row(
    "State",
    [
        Panel(
            "Policy version",
            "Of the policy that acts. An actor takes the newest one before each rollout.",
            {EACH: SHOWN.series(worker.ACTOR_POLICY_VERSION)},
        ),
        Panel(
            "Return",
            "Mean raw return of each actor's last 100 episodes. One that is far off steps another environment.",
            {EACH: SHOWN.series(worker.ACTOR_EPISODE_RETURN_MEAN)},
        ),
        Panel(
            "Env steps dropped by actors",
            "Per second, by reason. Excludes those that the learner refused or dropped.",
            {"{{reason}}": SHOWN.total(worker.ACTOR_ENV_STEPS_DROPPED, by="namespace, reason")},
            stacked=True,
        ),
        Panel(
            "Connected",
            "1 while a learner has welcomed the actor and still answers.",
            {EACH: SHOWN.series(worker.ACTOR_CONNECTED)},
            unit="bool_yes_no",
            maximum=1,
        ),
        Panel(
            "Memory",
            "Resident memory of each actor.",
            {EACH: f"{SHOWN.series('process_resident_memory_bytes')} {MINE}"},
            unit="bytes",
        ),
        Panel(
            "CPU",
            "Cores that each actor uses: at most its CPU limit, and fewer than one where it waits.",
            {EACH: f"{SHOWN.rate('process_cpu_seconds_total')} {MINE}"},
        ),
    ],
)

STEPS, WAITED = SHOWN.rate(env.STEPS), SHOWN.rate(env.WAIT_SECONDS)
POLICY_SERVERS = Row(
    "Policy servers and env workers",
    [
        Panel("Env workers", "Slots of each policy server that an env worker holds.", {EACH: SHOWN.series(env.ENV_WORKERS)}),
        Panel(
            "Wait of a step for env workers",
            "Mean time from sending actions until the rows of all env workers were there.",
            {EACH: f"{WAITED} / {STEPS}"},
            unit="s",
        ),
        Panel(
            "Rows waiting",
            "Environments of each policy server that were sent an action and have not answered.",
            {EACH: SHOWN.series(env.ROWS_WAITING)},
        ),
        Panel(
            "Missing rows",
            "Rows per second that no env worker brought: it was late, lost or not there yet.",
            {EACH: SHOWN.rate(env.MISSING_ROWS)},
        ),
        Panel(
            "Emulator frames of env workers",
            "Emulator frames per second of each env worker.",
            {EACH: SHOWN.rate(env.ENV_WORKER_ENV_FRAMES)},
        ),
        share(
            "Env workers that wait",
            "Share of its time that each env worker waits for actions.",
            {EACH: SHOWN.rate(env.ENV_WORKER_PHASE_SECONDS, 'phase="wait"')},
        ),
    ],
)

DASHBOARD = Dashboard(
    uid="rookery-actors",
    title="Rookery / Actors",
    description="Each actor beside the others.",
    of=worker.ACTOR_CONNECTED,
    rows=[SPEED, TIME, STATE, POLICY_SERVERS],
)
