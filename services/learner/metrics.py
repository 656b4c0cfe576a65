"""The metrics of the learner. `docs/metrics.md` explains each; a test holds the two together."""

from __future__ import annotations

import time

from common.errors import DropReason
from common.runtime.metrics import POLICY_LAGS, UNKNOWN, Clock, ServiceMetrics, advance, kinds
from common.transport.api import Failure
from common.wire.messages import (
    MODES,
    ROLES,
    Credit,
    Drain,
    Evaluation,
    Goodbye,
    Gradient,
    Hello,
    Refusal,
    Report,
    Snapshot,
    SnapshotWanted,
    Trajectory,
    Welcome,
)
from services.learner.intake import Figures

PHASES = ("wait", "collate", "train", "publish", "checkpoint")
LEDGER_STATES = ("produced", "trained", "queued", "in_flight")
SENT = kinds(Welcome, Refusal, Credit, Snapshot, Drain)
RECEIVED = kinds(Hello, Trajectory, Gradient, SnapshotWanted, Report, Evaluation, Goodbye)


class LearnerMetrics(ServiceMetrics):
    """All that `/metrics` of the learner shows."""

    def __init__(self, *, clock: Clock = time.monotonic) -> None:
        """Everything at zero, or unknown where zero would be a claim."""
        super().__init__("learner")
        self._declare_training(clock)
        self._declare_queue()
        self._declare_link()
        self._declare_results()
        self._declare_storage()

    def _declare_training(self, clock: Clock) -> None:
        self.env_steps_trained = self._counter(
            "env_steps_trained", "Env steps trained on, each once however many epochs it took. Not what was received or dropped."
        )
        self.env_frames_trained = self._counter(
            "env_frames_trained", "Emulator frames behind the env steps trained on: steps times the frame skip."
        )
        self.training = self._gauge(
            "training", "1 while the run trains, else 0: not while it starts, lets its peers go, or has ended and is still asked."
        )
        self.updates = self._counter(
            "updates", "Learner updates: batches trained on. Not optimizer steps, of which each has several."
        )
        self.phases = self._phases(*PHASES, clock=clock)
        self.policy_version = self._gauge("policy_version", "Newest published policy; 0 is the initial one.")
        self.policy_lag = self._histogram(
            "policy_lag_versions",
            "Newest version less the one that acted, for each experience message when it is trained on. Not for dropped ones.",
            buckets=POLICY_LAGS,
        )
        self.policy_lag_limit = self._gauge(
            "policy_lag_limit_versions", "Largest policy lag that is trained on, learner.max_policy_lag. What is older is stale."
        )
        self.training_metric = self._open_gauge(
            "training_metric",
            "Scalars of the last update, by the algorithm's names for them (loss parts, ...). Not averaged over updates.",
            label="name",
        )

    def _declare_queue(self) -> None:
        self.queue_depth = self._gauge(
            "queue_depth", "Experience messages admitted and not yet taken by the train loop. Not those on the wire."
        )
        self.queue_capacity = self._gauge(
            "queue_capacity",
            "Messages that connected or expected actors may have in the queue: credits times actors, or the depth if more.",
        )
        self.queue_seconds = self._counter(
            "queue_seconds",
            "Seconds that messages held a credit here, added up over messages: its rate is the mean depth of the queue.",
        )
        self.queue_env_steps = self._gauge(
            "queue_env_steps", "Env steps in the messages that wait in the queue, and in the batch that is being trained on."
        )
        self.ledger = self._gauges(
            "ledger_env_steps",
            "Env steps by where they are: produced = trained + queued + in flight + dropped. Whole run, resumes included.",
            label="state",
            values=LEDGER_STATES,
        )
        self.env_steps_dropped = self._counters(
            "env_steps_dropped",
            "Env steps that will never be trained on, by reason; what actors dropped themselves included. Whole run.",
            label="reason",
            values=DropReason,
        )

    def _declare_link(self) -> None:
        self.peers_connected = self._gauges(
            "peers_connected", "Peers that are welcomed and still speak. Not those that are silent past the limit.",
            label="role", values=ROLES,
        )  # fmt: skip
        self.messages_received = self._counters(
            "messages_received", "Messages that decoded, refused ones included. Not bytes that were no message.",
            label="kind", values=RECEIVED,
        )  # fmt: skip
        self.messages_sent = self._counters(
            "messages_sent", "Messages handed to the transport. Not those for which it had no room.", label="kind", values=SENT
        )
        self.messages_dropped = self._counters(
            "messages_dropped", "Messages of any kind that were refused, by reason. Lost ones count as gaps, once each.",
            label="reason", values=DropReason,
        )  # fmt: skip
        self.message_bytes_received = self._counter(
            "message_bytes_received", "Bytes of all frames received, undecodable ones included. Not the transport's own framing."
        )
        self.message_bytes_sent = self._counter(
            "message_bytes_sent", "Bytes of all frames handed to the transport. Not its own framing or retransmissions."
        )
        self.sequence_gaps = self._counter("sequence_gaps", "Sequence numbers that never came. Not duplicates.")
        self.reconnects = self._counter("reconnects", "Greetings of a peer that had been welcomed before, by any incarnation.")
        self.sockets_reopened = self._counter(
            "sockets_reopened", "Times that all connections were dropped since memory was short. Not the restarts of the learner."
        )
        self.messages_ignored = self._counter(
            "messages_ignored",
            "Messages discarded unread: their connection had sent over 256 without experience in a second. Not those refused.",
        )
        self.workers_evicted = self._counter(
            "workers_evicted", "Workers evicted because 16 messages in a row were refused. They may join again after a minute."
        )
        self.handshakes_failed = self._counters(
            "handshakes_failed",
            "Connections that came to nothing before their first message, by why. Not messages that were refused.",
            label="reason",
            values=Failure,
        )

    def _declare_results(self) -> None:
        self.episodes = self._counter(
            "episodes", "Episodes that ended inside experience trained on. Not the evaluator's, nor those in dropped experience."
        )
        self.episode_return_mean = self._gauge(
            "episode_return_mean", "Mean raw return of the last 100 episodes; NaN before the first. Not the evaluator's.",
            initial=UNKNOWN,
        )  # fmt: skip
        self.episode_length_mean = self._gauge(
            "episode_length_mean", "Mean length in env steps of the last 100 episodes; NaN before the first.", initial=UNKNOWN
        )
        self.evaluation_return_mean = self._gauges(
            "evaluation_return_mean", "Mean raw return of the last evaluation reported, by how it acted; NaN before the first.",
            label="mode", values=MODES, initial=UNKNOWN,
        )  # fmt: skip

    def _declare_storage(self) -> None:
        self.snapshot_bytes = self._gauge("snapshot_bytes", "Size of the parameters of the newest snapshot, header not included.")
        self.checkpoint_last_success = self._gauge(
            "checkpoint_last_success_timestamp_seconds",
            "Unix time of the last checkpoint that was written whole; 0 for none yet.",
        )
        self.checkpoint_interval = self._gauge(
            "checkpoint_interval_seconds", "Time between checkpoints, checkpoint.every_seconds. An update may make it longer."
        )
        self.checkpoint_failures = self._counter("checkpoint_failures", "Checkpoints that could not be written. The run goes on.")

    def refresh(self, figures: Figures) -> None:
        """Bring over what the I/O thread counts; called by each scrape."""
        self.queue_depth.set(figures.queue_depth)
        self.queue_capacity.set(figures.queue_capacity)
        advance(self.queue_seconds, figures.queue_seconds)
        self.queue_env_steps.set(figures.queue_env_steps)
        for state in LEDGER_STATES:
            self.ledger[state].set(figures.ledger[state])
        for reason in DropReason:
            advance(self.env_steps_dropped[reason], figures.ledger["dropped"][reason])
            advance(self.messages_dropped[reason], figures.messages_dropped[reason])
        for kind in RECEIVED:
            advance(self.messages_received[kind], figures.received[kind])
        for kind in SENT:
            advance(self.messages_sent[kind], figures.sent[kind])
        self.peers_connected["actor"].set(figures.actors)
        self.peers_connected["evaluator"].set(figures.evaluators)
        advance(self.message_bytes_received, figures.bytes_received)
        advance(self.message_bytes_sent, figures.bytes_sent)
        advance(self.sequence_gaps, figures.sequence_gaps)
        advance(self.reconnects, figures.reconnects)
        advance(self.sockets_reopened, figures.sockets_reopened)
        advance(self.messages_ignored, figures.messages_ignored)
        advance(self.workers_evicted, figures.evictions)
        for why in Failure:
            advance(self.handshakes_failed[why], figures.handshakes_failed[why])
