"""Checks that hold of every process and connection, whether the run trains or not; and of the alerts themselves."""

from __future__ import annotations

from collections.abc import Iterator

from common.observability import learner_metrics as learner
from common.observability import promql
from common.observability import worker_metrics as worker
from common.observability.checks.base import COUNT, OURS, Check, Threshold, declared, largest_first
from common.observability.deployment import LEARNER, ROLES, Deployment
from common.observability.metrics import LOOP_OVERDUE
from common.observability.rules import ALL
from common.protocol.messages import server_of
from common.units import MIB, Seconds

NOISE = 8 * MIB  # of an allocator
HOUR: Seconds = 3600.0


# --- processes ---


def _unreachable(run: Deployment) -> Iterator[str]:
    for service in run.services:
        if service.after.unreachable and service.role != LEARNER:
            yield f"{service.title} does not answer: {service.after.unreachable}; see its log"


UNREACHABLE = Check(
    name="WorkerUnreachable",
    sentence="A worker does not answer",
    predicate=_unreachable,
    while_training=False,
    runbook="The process has ended, or its machine is not reachable: see its log. A supervisor or Kubernetes starts it again.\n",
)


def _hung(run: Deployment) -> Iterator[str]:
    for service in run.services:
        if service.after.unhealthy:
            yield f"{service.title}: {service.after.unhealthy}; restart it"


OVERDUE = Threshold(
    value=0,
    unit="seconds for which a loop has owed a tick",
    why="a loop that waits ticks too, and long work states its own limit",
)
HUNG = Check(
    name="LoopHung",
    sentence="A process answers and its loop does not turn",
    promql=str(LOOP_OVERDUE),
    threshold=OVERDUE,
    lasting="2m",
    detail="{{ $labels.job }} {{ $labels.instance }} should have ticked {{ $value | humanizeDuration }} ago.",
    predicate=_hung,
    while_training=False,
    runbook="""\
`/healthz` names the loop and its last step. Kubernetes ends such a process within 90 s, before this alert, and restarts it
(`ProcessRestarted`); elsewhere restart it yourself.
""",
)


def _restarted(run: Deployment) -> Iterator[str]:
    for service in run.services:
        if service.restarted:
            yield f"{service.title} began anew within the {service.seconds:.0f} s measured; see its log"


RESTARTED = Check(
    name="ProcessRestarted",
    sentence="Another process answers than before",
    promql=f"changes(process_start_time_seconds{{{promql.jobs(*ROLES)}}}[1h])",
    threshold=Threshold(
        value=2,
        unit="restarts of a process within an hour",
        why="machines and people cause one or two; a third is a fault of the process",
    ),
    only=[OURS],
    detail=f"{{{{ $labels.job }}}} {{{{ $labels.instance }}}} began anew {COUNT} times within an hour.",
    predicate=_restarted,
    while_training=False,
    runbook="""\
The log of the process that ended has the reason; out of memory leaves none, and exit code 137. The doctor names each restart.
A learner that ends before each of its checkpoints makes no progress: lower `checkpoint.every_seconds` until the reason is found.
""",
)

GROWTH = Threshold(
    value=64 * MIB,
    unit="bytes per hour",
    why="queue, replay and connections are bounded: a process does not grow after its first hours",
)
WARM_UP = Threshold(
    value=7200,
    unit="seconds since a process began",
    why="imports, buffers and a replay memory that fills are no leak",
)

FILLING = 0.5
"""Rows that a replay memory gains for each env step, above which it fills: a full one gains and loses blocks in turn."""
_GAINED = f'deriv({learner.TRAINING_METRIC}{{name="replay_env_steps"}}[1h])'
_FILLS = f"{_GAINED} > on (namespace, job, instance) {FILLING:g} * rate({learner.ENV_STEPS_TRAINED}[1h])"


def _grows(run: Deployment) -> Iterator[str]:
    for service in run.services:
        size, began = service.now("process_resident_memory_bytes"), service.now("process_start_time_seconds")
        replay = learner.TRAINING_METRIC, "replay_env_steps"
        gained = service.now(*replay) - service.then(*replay)  # NaN without a replay memory
        fills = gained > FILLING * service.grew(learner.ENV_STEPS_TRAINED)
        if not service.measured or not WARM_UP.passed(service.after.at - began) or fills:
            continue
        growth = size - service.then("process_resident_memory_bytes")
        if growth > NOISE and GROWTH.passed(growth / service.seconds * HOUR):
            grew = f"{service.title} grew by {growth / MIB:,.0f} MiB in {service.seconds:.0f} s and holds {size / MIB:,.0f} MiB"
            yield f"{grew}; restart it before the machine runs out, and report it"


MEMORY = Check(
    name="MemoryGrowing",
    sentence="A process takes more and more memory",
    promql=f"deriv(process_resident_memory_bytes{{{promql.jobs(*ROLES)}}}[1h]) * 3600",
    threshold=GROWTH,
    only=[
        OURS,
        f"and on (namespace, job, instance) time() - process_start_time_seconds {WARM_UP.comparison}",
        f"unless on (namespace, job, instance) {_FILLS}",
    ],
    lasting="30m",
    detail="{{ $labels.job }} {{ $labels.instance }} grows by {{ $value | humanize1024 }}B per hour.",
    predicate=_grows,
    while_training=False,
    runbook="""\
Not in the first two hours of a process, nor while a replay memory fills; the doctor needs 8 MiB of growth within its window.
In an actor suspect the environment. Restart the process before it reaches its limit: an actor loses a rollout, a learner
resumes. If it is not the environment, it is a fault of Rookery: report it with the curve.
""",
)

DESCRIPTORS_USED = Threshold(
    value=0.8,
    unit="share of the limit of open files",
    why="each connection takes one; the learner accepts no worker beyond the limit",
)


def _descriptors_short(run: Deployment) -> Iterator[str]:
    for service in run.services:
        used, most = service.now("process_open_fds"), service.now("process_max_fds")
        if most and DESCRIPTORS_USED.passed(used / most):
            yield f"{service.title} has {used:,.0f} of {most:,.0f} files and connections open; raise the limit (ulimit -Hn)"


DESCRIPTORS = Check(
    name="DescriptorsShort",
    sentence="A process has almost as many files and connections open as it may",
    threshold=DESCRIPTORS_USED,
    predicate=_descriptors_short,
    while_training=False,
    runbook="""\
Each process raises its soft limit to the hard one when it starts, so the hard limit is short. Raise it where the process is
started: `LimitNOFILE` of systemd, `ulimits` of Compose, the container runtime of a cluster. See
[how many workers one learner holds](architecture.md#how-many-workers-one-learner-holds).
""",
)

# --- connections ---

REFUSED_RATE = Threshold(
    value=0.1,
    unit="failed connections per second",
    why="a refused worker tries again every second; a restart or a port scan makes one or two",
)


def _refused(run: Deployment) -> Iterator[str]:
    failed = {reason: times for reason, times in run.learner.grew_by_label(learner.HANDSHAKES_FAILED).items() if times}
    if failed and REFUSED_RATE.passed(sum(failed.values()) / run.learner.seconds):
        seen = f"connections to the learner failed in {run.learner.seconds:.0f} s ({largest_first(failed, '.0f')})"
        yield f"{seen}; see docs/security.md, or close the port to the outside"


REFUSED = Check(
    name="WorkersRefused",
    sentence="Connections fail again and again before their first message",
    promql=ALL.total(learner.HANDSHAKES_FAILED, by="namespace, reason"),
    threshold=REFUSED_RATE,
    lasting="5m",
    detail='{{ $value | printf "%.1f" }} connections a second fail, reason {{ $labels.reason }}.',
    predicate=_refused,
    while_training=False,
    runbook="""\
Dashboard Transport, "Connections refused"; the log of the refused worker has `handshake_failed` with possible reasons, see
[security.md](security.md#failed-handshakes).
1. `key`: its public key is not among those that the learner allows. Add the key, or, if it is not yours, close the port.
2. `learner_key`: it expects another learner's key.
3. `mechanism`: one side has keys and the other has none.
4. `broken`: the other program is no worker of Rookery, or the network cuts connections at once.
""",
)

REOPENED = Threshold(
    value=0,
    unit="times that the learner dropped all connections",
    why="workers that keep to their credits never fill its memory: one means a hostile sender, or a memory limit that is too low",
)


def _reopened(run: Deployment) -> Iterator[str]:
    if REOPENED.passed(times := run.learner.grew(learner.SOCKETS_REOPENED)):
        seen = f"the learner dropped all connections {times:.0f} times because memory was short"
        yield f"{seen}; close its port to the outside, or give it more memory"


SOCKET_REOPENED = Check(
    name="SocketReopened",
    sentence="The learner dropped all connections because its memory was short",
    promql=f"increase({learner.SOCKETS_REOPENED}[10m])",
    threshold=REOPENED,
    detail=f"{COUNT} times in 10 minutes.",
    predicate=_reopened,
    while_training=False,
    runbook="""\
The learner's log has `socket_reopened`, with the memory that was freed:
1. Much: a sender fills the memory with messages that it does not finish, or sends beyond its credits. Use [keys](security.md);
   with keys, remove the key of that sender.
2. Little: the memory is taken by something else. Give the learner a higher limit, or lower `algorithm.replay_capacity`.
""",
)


def _disconnected(run: Deployment) -> Iterator[str]:
    for service in run.services:
        if service.measured and service.now(worker.ACTOR_CONNECTED) == 0:
            server = server_of(service.role)
            yield f"{service.title} has no {server}; look whether it reaches the address of the {server}"


DISCONNECTED = Check(
    name="WorkerDisconnected",
    sentence="A worker has no connection to its server",
    predicate=_disconnected,
    runbook="Its log has the address that it tries, and a refusal with the reason.\n",
)


def _reconnects(run: Deployment) -> Iterator[str]:
    for service in run.services:
        if service.role == LEARNER or (service.measured and service.now(worker.ACTOR_CONNECTED) == 0):
            continue
        if again := service.grew(worker.ACTOR_RECONNECTS):
            times = "once" if again == 1 else f"{again:.0f} times"
            yield f"{service.title} lost the {server_of(service.role)} {times} in {service.seconds:.0f} s; look at the network"


RECONNECTS = Check(
    name="WorkerReconnects",
    sentence="A worker lost its server and found it again",
    predicate=_reconnects,
    runbook='Dashboard Transport, "Reconnects". All workers at once: the learner restarted. One alone: its network.\n',
)

# --- the alerts themselves ---

WATCHDOG = Check(
    name="Watchdog",
    sentence="Alerts are evaluated",
    promql="vector(1)",
    severity="none",
    detail="It always fires. If it stops, Prometheus or the way of its alerts is broken.",
    runbook="It fires as long as alerts are evaluated. Send it to a service that calls you when it stops.\n",
)

CHECKS = declared(globals())
