"""Dashboard of the transport: traffic, delays, failures, and the ledger of env steps."""

from __future__ import annotations

from common.observability import learner_metrics as learner
from common.observability import promql
from common.observability import worker_metrics as worker
from common.observability.checks.base import ON_THE_WIRE
from common.observability.checks.processes import REFUSED_RATE
from common.observability.metrics import build_info
from common.observability.panels import SHOWN, Dashboard, Panel, Query, Row


def _traffic() -> Row:
    return Row(
        "Traffic of the learner",
        [
            Panel(
                title="Messages received",
                description="Per second, by kind; refused ones included.",
                queries=[Query(SHOWN.total(learner.MESSAGES_RECEIVED, by="namespace, kind"), "{{kind}}")],
                unit="ops",
            ),
            Panel(
                title="Messages sent",
                description="Per second, by kind, as handed to the transport.",
                queries=[Query(SHOWN.total(learner.MESSAGES_SENT, by="namespace, kind"), "{{kind}}")],
                unit="ops",
            ),
            Panel(
                title="Bytes",
                description="Per second, of all message parts. Received is mostly experience, sent are mostly snapshots.",
                queries=[
                    Query(SHOWN.total(learner.MESSAGE_BYTES_RECEIVED), "received"),
                    Query(SHOWN.total(learner.MESSAGE_BYTES_SENT), "sent"),
                ],
                unit="Bps",
            ),
        ],
    )


def _delay() -> Row:
    sent = SHOWN.total(worker.ACTOR_MESSAGES_SENT, 'kind=~"trajectory|gradient"')
    under_way = SHOWN.total(worker.ACTOR_UNACKNOWLEDGED_SECONDS)
    queued = SHOWN.total(learner.QUEUE_SECONDS)
    return Row(
        "Delay of messages",
        [
            Panel(
                title="Time to acknowledgement",
                description="Mean time from sending a message to its acknowledgement, and its time in the learner's queue.",
                queries=[Query(f"{under_way} / {sent}", "in total"), Query(f"{queued} / {sent}", "in the queue")],
                unit="s",
                width=12,
            ),
            Panel(
                title="On the wire",
                description="Share of that time outside the queue. Above the line, if both sides wait, the run is network-bound.",
                queries=[Query(promql.on_the_wire(SHOWN), "on the wire")],
                unit="percentunit",
                limit=ON_THE_WIRE,
                width=12,
            ),
        ],
    )


def _failures() -> Row:
    reconnects = [
        Query(SHOWN.total(learner.RECONNECTS), "counted by the learner"),
        Query(SHOWN.total(worker.ACTOR_RECONNECTS), "counted by actors"),
        Query(SHOWN.total(worker.EVALUATOR_RECONNECTS), "counted by evaluators"),
    ]
    return Row(
        "Failures",
        [
            Panel(
                title="Messages refused",
                description="Per second, by reason (docs/metrics.md, drop reasons).",
                queries=[Query(SHOWN.total(learner.MESSAGES_DROPPED, by="namespace, reason"), "{{reason}}")],
                unit="ops",
                stacked=True,
                width=6,
            ),
            Panel(
                title="Connections refused",
                description="Per second, by reason: keys that do not fit, or are on one side only (docs/security.md).",
                queries=[Query(SHOWN.total(learner.HANDSHAKES_FAILED, by="namespace, reason"), "{{reason}}")],
                unit="ops",
                stacked=True,
                limit=REFUSED_RATE,
                width=6,
            ),
            Panel(
                title="Sequence gaps",
                description="Sequence numbers per second that never arrived.",
                queries=[Query(SHOWN.total(learner.MESSAGES_DROPPED, 'reason="gap"'), "gaps")],
                unit="ops",
                width=6,
            ),
            Panel(
                title="Reconnects",
                description="Per second. Many mean a faulty network, or a learner that restarts.",
                queries=reconnects,
                unit="ops",
                width=6,
            ),
            Panel(
                title="All connections dropped",
                description="Times per second that the learner dropped all connections because its memory was short.",
                queries=[Query(SHOWN.total(learner.SOCKETS_REOPENED), "dropped")],
                unit="ops",
                width=6,
            ),
        ],
    )


def _ledger() -> Row:
    return Row(
        "Ledger of env steps",
        [
            Panel(
                title="Queued and in flight",
                description="Env steps in the learner's queue or batch, and in flight: produced, and neither trained on nor "
                "dropped yet.",
                queries=[Query(SHOWN.series(learner.LEDGER_ENV_STEPS, 'state=~"queued|in_flight"'), "{{state}}")],
                unit="short",
            ),
            Panel(
                title="Unacknowledged messages",
                description="Of each actor: sent, and not taken by the learner yet.",
                queries=[Query(SHOWN.series(worker.ACTOR_QUEUE_DEPTH), "{{instance}}")],
                unit="short",
            ),
            Panel(
                title="Snapshot size",
                description="Bytes of the parameters that each worker receives with a new policy.",
                queries=[Query(SHOWN.series(learner.SNAPSHOT_BYTES), "parameters")],
                unit="bytes",
            ),
        ],
    )


DASHBOARD = Dashboard(
    uid="rookery-transport",
    title="Rookery / Transport",
    description="Messages, bytes, connections, and the ledger of env steps.",
    of=build_info("learner"),
    rows=[_traffic(), _delay(), _failures(), _ledger()],
)
