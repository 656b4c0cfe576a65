"""Metrics of the policy server, besides those of an actor, and of the env worker, and the state that they are read from."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from common.errors import HandshakeFailure
from common.observability.metrics import Metric, Phases, build_info, declared, kinds, run_info
from common.observability.worker_metrics import ACTOR_METRICS, ActorStats, LinkStats, connection_metrics
from common.protocol.messages import Act, Credit, Drain, Goodbye, Hello, Observe, Refusal, Report, Welcome
from common.units import EnvSteps, Seconds

ENV_WORKER_PHASES = ("env", "encode", "wait")
ENV_WORKER_SENT = kinds(Hello, Observe, Report, Goodbye)
ENV_WORKER_RECEIVED = POLICY_SERVER_SENT = kinds(Welcome, Refusal, Credit, Act, Drain)


@dataclass(slots=True, kw_only=True)
class PolicyServerStats(ActorStats):
    """Counters of a policy server: those of an actor, and those of its env workers. Its loop alone writes them."""

    env_workers: int = 0
    rows_waiting: int = 0
    steps: int = 0
    wait_seconds: Seconds = 0.0
    missing_rows: int = 0
    env_workers_lost: int = 0
    refused: int = 0
    ignored: int = 0
    handshakes_failed: Counter[str] = field(default_factory=Counter)
    env_sent: Counter[str] = field(default_factory=Counter)  # messages to env workers by kind


@dataclass(slots=True, kw_only=True)
class EnvWorkerStats:
    """Counters of an env worker. Its loop alone writes them; any thread may read."""

    phases: Phases = field(default_factory=lambda: Phases(ENV_WORKER_PHASES))
    run: tuple[str, ...] = ()  # labels of the run
    link: LinkStats = field(default_factory=LinkStats)
    env_steps: EnvSteps = 0
    frame_skip: int = 1
    resets: int = 0


PolicyServerMetric: type[Metric[PolicyServerStats]] = Metric
EnvWorkerMetric: type[Metric[EnvWorkerStats]] = Metric

# --- policy server ---

ENV_WORKERS = PolicyServerMetric(
    "rookery_policy_server_env_workers",
    "Slots that an env worker holds. Below policy_server.workers the rows of the other slots are missing.",
    read=lambda stats: stats.env_workers,
)
ROWS_WAITING = PolicyServerMetric(
    "rookery_policy_server_rows_waiting",
    "Environments that were sent an action and have not answered, ten times a second at most.",
    read=lambda stats: stats.rows_waiting,
)
STEPS = PolicyServerMetric(
    "rookery_policy_server_steps_total",
    "Rows of rollouts, each of all environments, for which the policy acted once.",
    read=lambda stats: stats.steps,
)
WAIT_SECONDS = PolicyServerMetric(
    "rookery_policy_server_wait_seconds_total",
    "Seconds from sending actions until the row was complete or the step timeout was over. Divided by the steps it is the "
    "wait of one step, in which the policy does not act.",
    read=lambda stats: stats.wait_seconds,
)
MISSING_ROWS = PolicyServerMetric(
    "rookery_policy_server_missing_rows_total",
    "Rows of single environments that no env worker brought, because it was late, lost or not there yet. They are invalid and in "
    "no ledger.",
    read=lambda stats: stats.missing_rows,
)
ENV_WORKERS_LOST = PolicyServerMetric(
    "rookery_policy_server_env_workers_lost_total",
    "Env workers that lost their slot without a Goodbye: connection closed, or silent.",
    read=lambda stats: stats.env_workers_lost,
)
MESSAGES_REFUSED = PolicyServerMetric(
    "rookery_policy_server_messages_refused_total",
    "Messages of env workers that could not be decoded, or had unusable arrays.",
    read=lambda stats: stats.refused,
)
MESSAGES_IGNORED = PolicyServerMetric(
    "rookery_policy_server_messages_ignored_total",
    "Messages discarded unread because their connection had sent over 256 without observations within a second. Excludes refused "
    "messages.",
    read=lambda stats: stats.ignored,
)
HANDSHAKES_FAILED = PolicyServerMetric(
    "rookery_policy_server_handshakes_failed_total",
    "Connections of env workers that failed before their first message, by the reasons of the same metric of the learner.",
    read=lambda stats: stats.handshakes_failed,
    labels={"reason": HandshakeFailure},
)
POLICY_SERVER_MESSAGES_SENT = PolicyServerMetric(
    "rookery_policy_server_messages_sent_total",
    "Messages to env workers that were handed to the transport.",
    read=lambda stats: stats.env_sent,
    labels={"kind": POLICY_SERVER_SENT},
)

# --- env worker ---

ENV_WORKER_ENV_STEPS = EnvWorkerMetric(
    "rookery_env_worker_env_steps_total",
    "Env steps of this env worker. Excludes reset rows; includes steps whose answer came too late for the policy server.",
    read=lambda stats: stats.env_steps,
)
ENV_WORKER_ENV_FRAMES = EnvWorkerMetric(
    "rookery_env_worker_env_frames_total",
    "Emulator frames of those env steps: env steps times the frame skip.",
    read=lambda stats: stats.env_steps * stats.frame_skip,
)
ENV_WORKER_RESETS = EnvWorkerMetric(
    "rookery_env_worker_resets_total",
    "Times that the policy server let all environments of this env worker begin anew: at the start, and after missing rows.",
    read=lambda stats: stats.resets,
)
ENV_WORKER_PHASE_SECONDS = EnvWorkerMetric(
    "rookery_env_worker_phase_seconds_total",
    "Seconds of the env worker's loop by phase, each second in one phase, the running one included. In wait it has no action.",
    read=lambda stats: stats.phases.seconds(),
    labels={"phase": ENV_WORKER_PHASES},
)
ENV_WORKER_MESSAGES_SENT, ENV_WORKER_MESSAGES_RECEIVED, ENV_WORKER_RECONNECTS, ENV_WORKER_CONNECTED = connection_metrics(
    "env_worker", ENV_WORKER_SENT, ENV_WORKER_RECEIVED, server="policy server"
)

OWN_POLICY_SERVER_METRICS = declared(globals(), "policy_server")
POLICY_SERVER_METRICS = (*ACTOR_METRICS, *OWN_POLICY_SERVER_METRICS)
ENV_WORKER_METRICS = build_info("env_worker"), run_info(), *declared(globals(), "env_worker")
