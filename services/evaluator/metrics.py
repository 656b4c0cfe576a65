"""The metrics of an evaluator. `docs/metrics.md` explains each; a test holds the two together."""

from __future__ import annotations

import time

from common.runtime.metrics import POLICY_LAGS, UNKNOWN, Clock, advance, kinds
from common.service.metrics import PeerMetrics
from common.transport.link import Link
from common.wire.messages import MODES, Evaluation, Goodbye, Hello, Report, SnapshotWanted
from services.evaluator.loop import Evaluator

PHASES = ("env", "act", "snapshot", "idle")
SENT = kinds(Hello, SnapshotWanted, Report, Evaluation, Goodbye)


class EvaluatorMetrics(PeerMetrics):
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
        self.phases = self._phases(*PHASES, clock=clock)
        self.policy_version = self._gauge(
            "policy_version", "Version of the policy under evaluation, or last evaluated; -1 before the first.", initial=-1
        )
        self.policy_lag = self._histogram(
            "policy_lag_versions",
            "Newest version known here less the one evaluated, when an evaluation ends. Not those that an exit cut short.",
            buckets=POLICY_LAGS,
        )
        self.evaluations = self._counter("evaluations", "Complete evaluations, of either mode. Not those that an exit cut short.")
        self._declare_connection(SENT)

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
        self._refresh_connection(link)
