"""The metrics of an actor. `docs/metrics.md` explains each; a test holds the two together."""

from __future__ import annotations

import time

from common.errors import DropReason
from common.runtime.metrics import POLICY_LAGS, UNKNOWN, Clock, advance, kinds
from common.service.metrics import PeerMetrics
from common.transport.link import Link
from common.wire.messages import Goodbye, Gradient, Hello, Report, SnapshotWanted, Trajectory
from services.actor.loop import Actor

PHASES = ("env", "act", "experience", "encode", "credit_wait", "snapshot")
SENT = kinds(Hello, Trajectory, Gradient, SnapshotWanted, Report, Goodbye)


class ActorMetrics(PeerMetrics):
    """All that `/metrics` of an actor shows."""

    def __init__(self, *, clock: Clock = time.monotonic) -> None:
        """Everything at zero, or unknown where zero would be a claim."""
        super().__init__("actor")
        self.env_steps = self._counter("env_steps", "Env steps played. Reset rows are not steps and are not counted.")
        self.env_frames = self._counter("env_frames", "Emulator frames played: env steps times the frame skip. No reset rows.")
        self.episodes = self._counter("episodes", "Episodes that ended, by termination or truncation. Not those cut by our exit.")
        self.episode_return_mean = self._gauge(
            "episode_return_mean",
            "Mean raw return of the last 100 episodes of this actor; NaN before the first. Not clipped or scaled.",
            initial=UNKNOWN,
        )
        self.phases = self._phases(*PHASES, clock=clock)
        self.policy_version = self._gauge(
            "policy_version", "Version of the policy that acts now; -1 before the first.", initial=-1
        )
        self.queue_depth = self._gauge(
            "queue_depth", "Experience messages not yet acknowledged. Not the rollout being collected."
        )
        self.queue_capacity = self._gauge("queue_capacity", "Credits: the most experience messages that may be unacknowledged.")
        self.unacknowledged_seconds = self._counter(
            "unacknowledged_seconds",
            "Seconds without acknowledgement, added up over experience messages: its rate is how many are under way on average.",
        )
        self.policy_lag = self._histogram(
            "policy_lag_versions",
            "Newest version known here less the one that acted, for each experience message when it is first sent. No re-sends.",
            buckets=POLICY_LAGS,
        )
        self.env_steps_dropped = self._counters(
            "env_steps_dropped",
            "Env steps that this actor gave up or the learner refused, by reason. Not what the learner dropped later.",
            label="reason",
            values=DropReason,
        )
        self._declare_connection(SENT)

    def refresh(self, actor: Actor, link: Link, frame_skip: int) -> None:
        """Bring over what the loop counts; called by each scrape."""
        advance(self.env_steps, actor.env_steps)
        advance(self.env_frames, actor.env_steps * frame_skip)
        advance(self.episodes, actor.episodes)
        if actor.returns:
            self.episode_return_mean.set(sum(actor.returns) / len(actor.returns))
        self.policy_version.set(actor.version)
        self.queue_depth.set(link.session.unacknowledged)
        self.queue_capacity.set(link.session.credits)
        advance(self.unacknowledged_seconds, link.unacknowledged_seconds)
        for reason, counter in self.env_steps_dropped.items():
            advance(counter, actor.dropped[reason])
        self._refresh_connection(link)
