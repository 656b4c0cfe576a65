"""Metrics of the actor and of the evaluator, and the state that they are read from."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.errors import DropReason
from common.observability.cpu_limit import CpuLimit, cpu_limit_metrics
from common.observability.metrics import UNKNOWN, CountAndSum, Metric, Phases, build_info, declared, kinds, mean, run_info
from common.protocol.messages import (
    MODES,
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
from common.units import EnvSteps, Seconds

ACTOR_PHASES = ("env", "act", "experience", "encode", "credit_wait", "snapshot")
ACTOR_COMPUTING = ("act", "experience", "encode")
"""Phases in which an actor's loop needs a core all the time; an environment may wait for a simulator of its own."""
EVALUATOR_PHASES = ("env", "act", "snapshot", "idle")
ACTOR_SENT = kinds(Hello, Trajectory, Gradient, SnapshotWanted, Report, Goodbye)
EVALUATOR_SENT = kinds(Hello, SnapshotWanted, Report, Evaluation, Goodbye)
RECEIVED = kinds(Welcome, Refusal, Credit, Snapshot, Drain)
EPISODES_KEPT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStats:
    """Counters of a worker's connection at one moment."""

    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)
    reconnects: int = 0
    connected: bool = False
    unacknowledged: int = 0
    window: int = 0
    unacknowledged_seconds: Seconds = 0.0


@dataclass(slots=True, kw_only=True)
class WorkerStats:
    """Counters that actors and evaluators have alike. The loop alone writes them; any thread may read."""

    phases: Phases
    run: tuple[str, ...] = ()  # labels of the run
    policy_lag: CountAndSum = field(default_factory=CountAndSum)
    link: LinkStats = field(default_factory=LinkStats)
    env_steps: EnvSteps = 0
    frame_skip: int = 1
    episodes: int = 0
    version: int = -1


@dataclass(slots=True, kw_only=True)
class ActorStats(WorkerStats):
    """Counters of an actor."""

    phases: Phases = field(default_factory=lambda: Phases(ACTOR_PHASES))
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=EPISODES_KEPT))
    dropped: Counter[str] = field(default_factory=Counter)
    cpu_limit: Callable[[], CpuLimit | None] = lambda: None


@dataclass(slots=True, kw_only=True)
class EvaluatorStats(WorkerStats):
    """Counters of an evaluator."""

    phases: Phases = field(default_factory=lambda: Phases(EVALUATOR_PHASES))
    evaluations: int = 0
    playing: int = 0  # episodes of the running evaluation that have not ended
    return_means: dict[str, float] = field(default_factory=dict)  # newest mean return by mode


def connection_metrics(
    role: str, sent: Sequence[str], received: Sequence[str] = RECEIVED, *, server: str = "learner"
) -> tuple[Metric[Any], Metric[Any], Metric[Any], Metric[Any]]:
    """Return the metrics of a worker's connection, `link` of its state; `sent`, `received`: kinds of message that may cross."""
    name = role.replace("_", " ")
    return (
        Metric(
            f"rookery_{role}_messages_sent_total",
            "Messages handed to the transport, re-sends included. Excludes those that it had no room for.",
            read=lambda stats: stats.link.sent,
            labels={"kind": sent},
        ),
        Metric(
            f"rookery_{role}_messages_received_total",
            "Messages that were decoded. Excludes bytes that are no message.",
            read=lambda stats: stats.link.received,
            labels={"kind": received},
        ),
        Metric(
            f"rookery_{role}_reconnects_total",
            f"Welcomes after the first: the {server} was lost and found again.",
            read=lambda stats: stats.link.reconnects,
        ),
        Metric(
            f"rookery_{role}_connected",
            f"1 while a {server} has welcomed this {name} and answers, else 0.",
            read=lambda stats: stats.link.connected,
        ),
    )


ActorMetric: type[Metric[ActorStats]] = Metric
EvaluatorMetric: type[Metric[EvaluatorStats]] = Metric

# --- actor ---

ACTOR_ENV_STEPS = ActorMetric(
    "rookery_actor_env_steps_total",
    "Env steps of this actor, sent or not. Excludes reset rows.",
    read=lambda stats: stats.env_steps,
)
ACTOR_ENV_FRAMES = ActorMetric(
    "rookery_actor_env_frames_total",
    "Emulator frames of those env steps: env steps times the frame skip.",
    read=lambda stats: stats.env_steps * stats.frame_skip,
)
ACTOR_EPISODES = ActorMetric(
    "rookery_actor_episodes_total",
    "Episodes that terminated or were truncated. Excludes those that the exit of the actor cut short.",
    read=lambda stats: stats.episodes,
)
ACTOR_EPISODE_RETURN_MEAN = ActorMetric(
    "rookery_actor_episode_return_mean",
    "Mean raw return of the last 100 episodes of this actor; NaN before the first.",
    read=lambda stats: mean(stats.returns),
)
ACTOR_PHASE_SECONDS = ActorMetric(
    "rookery_actor_phase_seconds_total",
    "Seconds of the actor's loop by phase, each second in one phase, the running one included. Phase experience computes what is "
    "sent of a rollout, such as gradients.",
    read=lambda stats: stats.phases.seconds(),
    labels={"phase": ACTOR_PHASES},
)
ACTOR_COMPUTING_CPU_SECONDS = ActorMetric(
    "rookery_actor_computing_cpu_seconds_total",
    "CPU seconds of the thread of the actor's loop in its phases act, experience and encode. Divided by the seconds of these "
    "phases it is the share of a core that the loop gets while it computes. Excludes the environment and other threads.",
    read=lambda stats: stats.phases.cpu_seconds(ACTOR_COMPUTING),
)
ACTOR_CPU_LIMIT_CORES, ACTOR_CPU_LIMIT_PERIODS = cpu_limit_metrics("actor")
ACTOR_POLICY_VERSION = ActorMetric(
    "rookery_actor_policy_version",
    "Version of the policy that acts; -1 before the first.",
    read=lambda stats: stats.version,
)
ACTOR_QUEUE_DEPTH = ActorMetric(
    "rookery_actor_queue_depth",
    "Experience messages sent and not acknowledged. Excludes the rollout that is being collected.",
    read=lambda stats: stats.link.unacknowledged,
)
ACTOR_QUEUE_CAPACITY = ActorMetric(
    "rookery_actor_queue_capacity",
    "Credits: the most experience messages that may be unacknowledged.",
    read=lambda stats: stats.link.window,
)
ACTOR_UNACKNOWLEDGED_SECONDS = ActorMetric(
    "rookery_actor_unacknowledged_seconds_total",
    "Seconds that experience messages were unacknowledged, summed over messages. Its rate is their mean number; divided by "
    "the rate of messages sent it is the mean time of one message.",
    read=lambda stats: stats.link.unacknowledged_seconds,
)
ACTOR_POLICY_LAG = ActorMetric(
    "rookery_actor_policy_lag_versions",
    "Newest version known to this actor less the one that acted, when a message is first sent. Excludes re-sends; the metric "
    "of the learner has the lag that training saw.",
    read=lambda stats: stats.policy_lag,
    summary=True,
)
ACTOR_ENV_STEPS_DROPPED = ActorMetric(
    "rookery_actor_env_steps_dropped_total",
    "Env steps that this actor dropped. Excludes those that the learner refused or dropped.",
    read=lambda stats: stats.dropped,
    labels={"reason": DropReason},
)
ACTOR_MESSAGES_SENT, ACTOR_MESSAGES_RECEIVED, ACTOR_RECONNECTS, ACTOR_CONNECTED = connection_metrics("actor", ACTOR_SENT)

# --- evaluator ---

EVALUATOR_ENV_STEPS = EvaluatorMetric(
    "rookery_evaluator_env_steps_total",
    "Env steps played in evaluations. They are never trained on and are in no ledger.",
    read=lambda stats: stats.env_steps,
)
EVALUATOR_ENV_FRAMES = EvaluatorMetric(
    "rookery_evaluator_env_frames_total",
    "Emulator frames of those env steps: env steps times the frame skip.",
    read=lambda stats: stats.env_steps * stats.frame_skip,
)
EVALUATOR_EPISODES = EvaluatorMetric(
    "rookery_evaluator_episodes_total",
    "Episodes played to their end. Excludes those that an exit cut short.",
    read=lambda stats: stats.episodes,
)
EVALUATOR_EPISODES_PLAYING = EvaluatorMetric(
    "rookery_evaluator_episodes_playing",
    "Episodes of the running evaluation that have not ended; 0 between evaluations.",
    read=lambda stats: stats.playing,
)
EVALUATOR_EPISODE_RETURN_MEAN = EvaluatorMetric(
    "rookery_evaluator_episode_return_mean",
    "Mean raw return of the last complete evaluation; NaN before the first.",
    read=lambda stats: stats.return_means,
    labels={"mode": MODES},
    absent=UNKNOWN,
)
EVALUATOR_PHASE_SECONDS = EvaluatorMetric(
    "rookery_evaluator_phase_seconds_total",
    "Seconds of the evaluator's loop by phase, each second in one phase, the running one included.",
    read=lambda stats: stats.phases.seconds(),
    labels={"phase": EVALUATOR_PHASES},
)
EVALUATOR_POLICY_VERSION = EvaluatorMetric(
    "rookery_evaluator_policy_version",
    "Version under evaluation, or last evaluated; -1 before the first.",
    read=lambda stats: stats.version,
)
EVALUATOR_POLICY_LAG = EvaluatorMetric(
    "rookery_evaluator_policy_lag_versions",
    "Newest version known to this evaluator less the one evaluated, when an evaluation ends.",
    read=lambda stats: stats.policy_lag,
    summary=True,
)
EVALUATIONS = EvaluatorMetric(
    "rookery_evaluator_evaluations_total",
    "Complete evaluations, of either mode. Excludes those that an exit cut short.",
    read=lambda stats: stats.evaluations,
)
EVALUATOR_MESSAGES_SENT, EVALUATOR_MESSAGES_RECEIVED, EVALUATOR_RECONNECTS, EVALUATOR_CONNECTED = connection_metrics(
    "evaluator", EVALUATOR_SENT
)

ACTOR_METRICS = build_info("actor"), run_info(), *declared(globals(), "actor")
EVALUATOR_METRICS = build_info("evaluator"), run_info(), *declared(globals(), "evaluator")
