"""The metrics of an evaluator. `docs/metrics.md` explains each; a test holds the two together."""

from __future__ import annotations

import time

from common.runtime.metrics import POLICY_LAGS, UNKNOWN, Clock, ServiceMetrics, advance, kinds
from common.session.actor_side import State
from common.transport.link import Link
from common.wire.messages import (
    MODES,
    Credit,
    Drain,
    Evaluation,
    Goodbye,
    Hello,
    Refusal,
    Report,
    Snapshot,
    SnapshotWanted,
    Welcome,
)
from services.evaluator.loop import Evaluator

PHASES = ("env", "act", "snapshot", "idle")
SENT = kinds(Hello, SnapshotWanted, Report, Evaluation, Goodbye)
RECEIVED = kinds(Welcome, Refusal, Credit, Snapshot, Drain)


class EvaluatorMetrics(ServiceMetrics):
    """All that `/metrics` of an evaluator shows. It has no queue: an evaluation is sent when it ends."""

    def __init__(self, *, clock: Clock = time.monotonic) -> None:
        """Everything at zero, or unknown where zero would be a claim."""
        super().__init__("evaluator")
        self.env_steps = self._counter("env_steps", "Env steps played in evaluations. No reset rows; never trained on.")
        self.env_frames = self._counter("env_frames", "Emulator frames played: env steps times the frame skip. No reset rows.")
        self.episodes = self._counter("episodes", "Episodes played to their end. Not those that an exit cut short.")
        self.episode_return_mean = self._gauges(
            "episode_return_mean",
            "Mean raw return of the last complete evaluation in this mode; NaN before the first.",
            label="mode",
            values=MODES,
            initial=UNKNOWN,
        )
        self.phases = self._phases(
            "Seconds of the evaluator's loop by what it did, each second in one phase; the I/O thread's time is not counted.",
            names=PHASES,
            clock=clock,
        )
        self.policy_version = self._gauge(
            "policy_version", "Version of the policy under evaluation, or last evaluated; -1 before the first.", initial=-1
        )
        self.policy_lag = self._histogram(
            "policy_lag_versions",
            "Newest version known here less the one evaluated, when an evaluation ends. Not those that an exit cut short.",
            buckets=POLICY_LAGS,
        )
        self.evaluations = self._counter("evaluations", "Complete evaluations, of either mode. Not those that an exit cut short.")
        self.messages_sent = self._counters(
            "messages_sent", "Messages handed to the transport. Not those for which it had no room.", label="kind", values=SENT
        )
        self.messages_received = self._counters(
            "messages_received", "Messages that decoded. Not bytes that were no message.", label="kind", values=RECEIVED
        )
        self.reconnects = self._counter("reconnects", "Welcomes after the first: the learner was lost and came back.")
        self.connected = self._gauge("connected", "1 while welcomed by a learner that still answers, else 0.")

    def refresh(self, evaluator: Evaluator, link: Link, frame_skip: int) -> None:
        """Bring over what the loop counts; called by each scrape."""
        counts = evaluator.counts
        advance(self.env_steps, counts.env_steps)
        advance(self.env_frames, counts.env_steps * frame_skip)
        advance(self.episodes, counts.episodes)
        advance(self.evaluations, counts.evaluations)
        for mode, mean in counts.mean.items():
            self.episode_return_mean[mode].set(mean)
        self.policy_version.set(evaluator.version)
        for kind, counter in self.messages_sent.items():
            advance(counter, link.sent[kind])
        for kind, counter in self.messages_received.items():
            advance(counter, link.received[kind])
        advance(self.reconnects, link.session.reconnects)
        self.connected.set(link.session.state is State.WELCOME)
