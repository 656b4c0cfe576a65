"""What crosses the wire, and where every env step is."""

from __future__ import annotations

from typing import Any

from common.monitoring import figures
from common.monitoring import thresholds as limits
from common.monitoring.panels import SHOWN, Dashboard, Panel, Query, Row


def build() -> dict[str, Any]:
    """The JSON model."""
    return Dashboard(
        uid="rookery-transport",
        title="Rookery / Transport",
        description="Messages, bytes, connections, and the ledger of env steps.",
        of="rookery_build_info",
        rows=[_traffic(), _way(), _troubles(), _ledger()],
    ).as_json()


def _traffic() -> Row:
    return Row(
        "Traffic of the learner",
        [
            Panel(
                title="Messages received",
                description="Per second, by kind; refused ones included.",
                queries=[Query(SHOWN.total("rookery_learner_messages_received_total", by="namespace, kind"), "{{kind}}")],
                unit="ops",
            ),
            Panel(
                title="Messages sent",
                description="Per second, by kind, as handed to the transport.",
                queries=[Query(SHOWN.total("rookery_learner_messages_sent_total", by="namespace, kind"), "{{kind}}")],
                unit="ops",
            ),
            Panel(
                title="Bytes",
                description="Of all frames, without the transport's own framing. What is received is experience, what is sent "
                "are snapshots, nearly all of it.",
                queries=[
                    Query(SHOWN.total("rookery_learner_message_bytes_received_total"), "received"),
                    Query(SHOWN.total("rookery_learner_message_bytes_sent_total"), "sent"),
                ],
                unit="Bps",
            ),
        ],
    )


def _way() -> Row:
    sent = SHOWN.total("rookery_actor_messages_sent_total", 'kind=~"trajectory|gradient"')
    under_way = SHOWN.total("rookery_actor_unacknowledged_seconds_total")
    queued = SHOWN.total("rookery_learner_queue_seconds_total")
    return Row(
        "How long is the way?",
        [
            Panel(
                title="Time of a message",
                description="From being sent to being acknowledged, on average; and its wait in the learner's queue.",
                queries=[Query(f"{under_way} / {sent}", "under way"), Query(f"{queued} / {sent}", "in the queue")],
                unit="s",
                width=12,
            ),
            Panel(
                title="On the wire",
                description="Part of the time under way that is not spent in the queue. Above the line, where both sides "
                "wait, the network holds the run up.",
                queries=[Query(figures.on_the_wire(SHOWN), "on the wire")],
                unit="percentunit",
                limit=limits.WIRE,
                width=12,
            ),
        ],
    )


def _troubles() -> Row:
    reconnects = [
        Query(SHOWN.total(f"rookery_{service}_reconnects_total"), f"seen by {service}s")
        for service in ("learner", "actor", "evaluator")
    ]
    return Row(
        "Troubles",
        [
            Panel(
                title="Messages refused",
                description="Per second, by reason (docs/metrics.md, drop reasons).",
                queries=[Query(SHOWN.total("rookery_learner_messages_dropped_total", by="namespace, reason"), "{{reason}}")],
                unit="ops",
                stacked=True,
                width=6,
            ),
            Panel(
                title="Connections refused",
                description="Per second, by reason: keys that do not fit, or are on one side only (docs/security.md).",
                queries=[Query(SHOWN.total("rookery_learner_handshakes_failed_total", by="namespace, reason"), "{{reason}}")],
                unit="ops",
                stacked=True,
                limit=limits.REFUSED,
                width=6,
            ),
            Panel(
                title="Gaps",
                description="Sequence numbers per second that never came.",
                queries=[Query(SHOWN.total("rookery_learner_sequence_gaps_total"), "gaps")],
                unit="ops",
                width=6,
            ),
            Panel(
                title="Reconnects",
                description="Per second. Connections that break again and again are a sick network, or a learner that restarts.",
                queries=reconnects,
                unit="ops",
                width=6,
            ),
            Panel(
                title="All connections dropped",
                description="Times per second that the learner dropped all connections, since its memory was short.",
                queries=[Query(SHOWN.total("rookery_learner_sockets_reopened_total"), "dropped")],
                unit="ops",
                width=6,
            ),
        ],
    )


def _ledger() -> Row:
    return Row(
        "Where every env step is",
        [
            Panel(
                title="Under way",
                description="Env steps in the learner's queue or batch, and in flight: produced, and neither trained on nor "
                "dropped yet.",
                queries=[Query(SHOWN.series("rookery_learner_ledger_env_steps", 'state=~"queued|in_flight"'), "{{state}}")],
                unit="short",
            ),
            Panel(
                title="Unacknowledged messages",
                description="Of each actor: sent, and not yet taken by the learner.",
                queries=[Query(SHOWN.series("rookery_actor_queue_depth"), "{{instance}}")],
                unit="short",
            ),
            Panel(
                title="Snapshot",
                description="Size of the parameters that each peer is sent with every new policy.",
                queries=[Query(SHOWN.series("rookery_learner_snapshot_bytes"), "parameters")],
                unit="bytes",
            ),
        ],
    )
