"""Dashboard of the transport: traffic, delays, failures, and the ledger of env steps."""

from __future__ import annotations

from common.observability import learner_metrics as learner
from common.observability import promql
from common.observability import worker_metrics as worker
from common.observability.checks.base import ON_THE_WIRE
from common.observability.checks.processes import REFUSED_RATE
from common.observability.metrics import build_info
from common.observability.panels import SHOWN, Dashboard, Panel, Row, per_second

TRAFFIC = Row(
    "Traffic of the learner",
    [
        per_second(
            "Messages received",
            "Per second, by kind; refused ones included.",
            {"{{kind}}": SHOWN.total(learner.MESSAGES_RECEIVED, by="namespace, kind")},
        ),
        per_second(
            "Messages sent",
            "Per second, by kind, as handed to the transport.",
            {"{{kind}}": SHOWN.total(learner.MESSAGES_SENT, by="namespace, kind")},
        ),
        Panel(
            "Bytes",
            "Per second, of all message parts. Received is mostly experience, sent are mostly snapshots.",
            {"received": SHOWN.total(learner.MESSAGE_BYTES_RECEIVED), "sent": SHOWN.total(learner.MESSAGE_BYTES_SENT)},
            unit="Bps",
        ),
    ],
)

KINDS = 'kind=~"trajectory|gradient"'
SENT, RECEIVED = SHOWN.total(worker.ACTOR_MESSAGES_SENT, KINDS), SHOWN.total(learner.MESSAGES_RECEIVED, KINDS)
UNDER_WAY = SHOWN.total(worker.ACTOR_UNACKNOWLEDGED_SECONDS)
QUEUED = SHOWN.total(learner.QUEUE_SECONDS)
DELAY = Row(
    "Delay of messages",
    [
        Panel(
            "Time to acknowledgement",
            "Mean time from sending a message to its acknowledgement, and its time in the learner's queue.",
            {"in total": f"{UNDER_WAY} / {SENT}", "in the queue": f"{QUEUED} / {RECEIVED}"},
            unit="s",
        ),
        Panel(
            "On the wire",
            "Share of that time outside the queue. Above the line, if both sides wait, the run is network-bound. "
            "No data while an actor is connected that is not scraped.",
            {"on the wire": promql.on_the_wire(SHOWN)},
            unit="percentunit",
            limit=ON_THE_WIRE,
        ),
    ],
    width=12,
)

FAILURES = Row(
    "Failures",
    [
        per_second(
            "Messages refused",
            "Per second, by reason (docs/metrics.md, drop reasons).",
            {"{{reason}}": SHOWN.total(learner.MESSAGES_DROPPED, by="namespace, reason")},
            stacked=True,
        ),
        per_second(
            "Connections refused",
            "Per second, by reason: keys that do not fit, or are on one side only (docs/security.md).",
            {"{{reason}}": SHOWN.total(learner.HANDSHAKES_FAILED, by="namespace, reason")},
            stacked=True,
            limit=REFUSED_RATE,
        ),
        per_second(
            "Sequence gaps",
            "Sequence numbers per second that never arrived.",
            {"gaps": SHOWN.total(learner.MESSAGES_DROPPED, 'reason="gap"')},
        ),
        per_second(
            "Reconnects",
            "Per second. Many mean a faulty network, or a learner that restarts.",
            {
                "counted by the learner": SHOWN.total(learner.RECONNECTS),
                "counted by actors": SHOWN.total(worker.ACTOR_RECONNECTS),
                "counted by evaluators": SHOWN.total(worker.EVALUATOR_RECONNECTS),
            },
        ),
        per_second(
            "All connections dropped",
            "Times per second that the learner dropped all connections because its memory was short.",
            {"dropped": SHOWN.total(learner.SOCKETS_REOPENED)},
        ),
    ],
    width=6,
)

UNDER_WAY = 'state=~"queued|in_flight"'
LEDGER = Row(
    "Ledger of env steps",
    [
        Panel(
            "Queued and in flight",
            "Env steps in the learner's queue or batch, and in flight: produced, and neither trained on nor dropped yet.",
            {"{{state}}": f"sum by (namespace, state) ({SHOWN.series(learner.LEDGER_ENV_STEPS, UNDER_WAY)})"},
        ),
        Panel(
            "Unacknowledged messages",
            "Of each actor: sent, and not taken by the learner yet.",
            {"{{instance}}": SHOWN.series(worker.ACTOR_QUEUE_DEPTH)},
        ),
        Panel(
            "Snapshot size",
            "Bytes of the parameters that each worker receives with a new policy.",
            {"parameters": f"max by (namespace) ({SHOWN.series(learner.SNAPSHOT_BYTES)})"},
            unit="bytes",
        ),
    ],
)

DASHBOARD = Dashboard(
    uid="rookery-transport",
    title="Rookery / Transport",
    description="Messages, bytes, connections, and the ledger of env steps.",
    of=build_info("learner"),
    rows=[TRAFFIC, DELAY, FAILURES, LEDGER],
)
