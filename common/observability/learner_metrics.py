"""Metrics of the learner, read from `LearnerStats`."""

from __future__ import annotations

from common.errors import DropReason, HandshakeFailure
from common.observability.cpu_limit import cpu_limit_metrics
from common.observability.learner_stats import LEDGER_STATES, PHASES, LearnerStats
from common.observability.metrics import UNKNOWN, Metric, build_info, declared, run_info
from common.observability.worker_metrics import ACTOR_SENT, EVALUATOR_SENT
from common.observability.worker_metrics import RECEIVED as SENT
from common.protocol.messages import MODES, ROLES

RECEIVED = tuple(dict.fromkeys((*ACTOR_SENT, *EVALUATOR_SENT)))
"""Kinds of message that the learner receives; `SENT` are those that each of its workers may receive."""
COMPUTING = ("ingest", "train", "publish")
"""Phases in which the train loop needs a core all the time; in the others it waits for experience or for the disk."""

LearnerMetric: type[Metric[LearnerStats]] = Metric

BUILD_INFO, RUN_INFO = build_info("learner"), run_info()

# --- training ---

ENV_STEPS_TRAINED = LearnerMetric(
    "rookery_learner_env_steps_trained_total",
    "Env steps trained on, each once, however many epochs the algorithm makes of it. Excludes experience received or dropped.",
    read=lambda stats: stats.env_steps_trained,
)
ENV_FRAMES_TRAINED = LearnerMetric(
    "rookery_learner_env_frames_trained_total",
    "Emulator frames of the env steps trained on: env steps times the frame skip.",
    read=lambda stats: stats.env_steps_trained * stats.frame_skip,
)
ENV_FRAMES_RATE = LearnerMetric(
    "rookery_learner_env_frames_per_second",
    "Emulator frames that all ranks train on per second, from update to update over 10 s or more; 0 before the second update. "
    "For windows shorter than an update, in which the counter stands still or jumps.",
    read=lambda stats: stats.frames_per_second,
)
TRAINING = LearnerMetric(
    "rookery_learner_training",
    "1 while the run trains, else 0: while it starts, while its workers leave, and after its end. Alerts about a run need 1.",
    read=lambda stats: stats.training,
)
ENDED = LearnerMetric(
    "rookery_learner_ended",
    "1 from the moment the run ends by itself or on request, else 0; 0 also of a learner that an orchestrator starts again. "
    "LearnerDown is silent after a 1.",
    read=lambda stats: stats.ended,
)
UPDATES = LearnerMetric(
    "rookery_learner_updates_total",
    "Batches trained on. One update takes several optimizer steps, which are not counted.",
    read=lambda stats: stats.updates,
)
NONFINITE_STEPS = LearnerMetric(
    "rookery_learner_nonfinite_steps_total",
    "Gradient steps left out because the loss or the gradient was not finite. Each rank counts those of all.",
    read=lambda stats: stats.nonfinite_steps,
)
PHASE_SECONDS = LearnerMetric(
    "rookery_learner_phase_seconds_total",
    "Seconds of the train loop by phase, each second in one phase, the running one included. Excludes the I/O thread.",
    read=lambda stats: stats.phases.seconds(),
    labels={"phase": PHASES},
)
COMPUTING_CPU_SECONDS = LearnerMetric(
    "rookery_learner_computing_cpu_seconds_total",
    "CPU seconds of the thread of the train loop in its phases ingest, train and publish. Divided by the seconds of these "
    "phases it is the share of a core that the loop gets while it computes. On a GPU, where "
    "backward passes run in other threads, those of all threads of the process.",
    read=lambda stats: stats.phases.cpu_seconds(COMPUTING),
)
CPU_LIMIT_CORES, CPU_LIMIT_PERIODS = cpu_limit_metrics("learner")
POLICY_VERSION = LearnerMetric(
    "rookery_learner_policy_version",
    "Version of the newest published policy; 0 is the initial one.",
    read=lambda stats: stats.policy_version,
)
POLICY_LAG = LearnerMetric(
    "rookery_learner_policy_lag_versions",
    "Newest version less the one that acted, once for each experience message when it is trained on. Excludes dropped messages.",
    read=lambda stats: stats.policy_lag,
    summary=True,
)
POLICY_LAG_LIMIT = LearnerMetric(
    "rookery_learner_policy_lag_limit_versions",
    "Largest policy lag that is trained on (learner.max_policy_lag). Older experience is dropped as stale.",
    read=lambda stats: stats.policy_lag_limit,
)
RANKS = LearnerMetric(
    "rookery_learner_ranks",
    "Processes that train the network together (learner.ranks).",
    read=lambda stats: stats.ranks,
)
RANKS_WAIT_SECONDS = LearnerMetric(
    "rookery_learner_ranks_wait_seconds_total",
    "Seconds in which this rank was ready for an update and other ranks were not, part of the phase wait. A rank without actors "
    "is ready all the time. 0 with one rank.",
    read=lambda stats: stats.ranks_wait_seconds,
)
ALL_REDUCE_SECONDS = LearnerMetric(
    "rookery_learner_all_reduce_seconds_total",
    "Seconds in operations of all ranks, part of the phase train: the sums of gradients and of moments, with the time until "
    "the slowest rank takes part, the running one included. On a GPU the time to start them. 0 with one rank.",
    read=lambda stats: stats.all_reduce_seconds(),
)
TRAINING_METRIC = LearnerMetric(
    "rookery_learner_training_metric",
    "Loss parts, entropy and other scalars by the algorithm's names, each of the last update that had it. None before the first.",
    read=lambda stats: stats.training_metrics,
    labels={"name": ()},
)

# --- queue and ledger ---

QUEUE_DEPTH = LearnerMetric(
    "rookery_learner_queue_depth",
    "Experience messages admitted and not yet taken by the train loop. Excludes messages on the wire.",
    read=lambda stats: stats.intake.queue_depth,
)
QUEUE_CAPACITY = LearnerMetric(
    "rookery_learner_queue_capacity",
    "Messages that actors may have in the queue: credits times the actors that are connected or expected back (at least one); "
    "the depth if that is more, since messages of actors that left stay in the queue.",
    read=lambda stats: stats.intake.queue_capacity,
)
QUEUE_SECONDS = LearnerMetric(
    "rookery_learner_queue_seconds_total",
    "Seconds that messages held a credit at the learner, summed over messages and measured ten times a second. Its rate is the "
    "mean depth of the queue; in lockstep it includes the batch that is trained on.",
    read=lambda stats: stats.intake.queue_seconds,
)
LEDGER_ENV_STEPS = LearnerMetric(
    "rookery_learner_ledger_env_steps",
    "Env steps by state, whole run: produced = trained + queued + in flight + dropped. Excludes those not reported yet.",
    read=lambda stats: stats.intake.ledger,
    labels={"state": LEDGER_STATES},
)
ENV_STEPS_DROPPED = LearnerMetric(
    "rookery_learner_env_steps_dropped_total",
    "Env steps that will never be trained on, whole run. Includes those that actors dropped.",
    read=lambda stats: stats.intake.ledger["dropped"],
    labels={"reason": DropReason},
)

# --- connections ---

WORKERS_CONNECTED = LearnerMetric(
    "rookery_learner_workers_connected",
    "Workers that were welcomed and send heartbeats. Excludes connections without a welcome.",
    read=lambda stats: {"actor": stats.intake.actors, "evaluator": stats.intake.evaluators},
    labels={"role": ROLES},
)
MESSAGES_RECEIVED = LearnerMetric(
    "rookery_learner_messages_received_total",
    "Messages that were decoded, refused ones included. Excludes bytes that are no message.",
    read=lambda stats: stats.intake.received,
    labels={"kind": RECEIVED},
)
MESSAGES_SENT = LearnerMetric(
    "rookery_learner_messages_sent_total",
    "Messages handed to the transport. Excludes those that it had no room for.",
    read=lambda stats: stats.intake.sent,
    labels={"kind": SENT},
)
MESSAGES_DROPPED = LearnerMetric(
    "rookery_learner_messages_dropped_total",
    "Messages of any kind that were refused or dropped. A missing sequence number counts once, as a gap.",
    read=lambda stats: stats.intake.messages_dropped,
    labels={"reason": DropReason},
)
MESSAGE_BYTES_RECEIVED = LearnerMetric(
    "rookery_learner_message_bytes_received_total",
    "Bytes of all message parts received, undecodable messages included. Excludes the framing of the transport.",
    read=lambda stats: stats.intake.bytes_received,
)
MESSAGE_BYTES_SENT = LearnerMetric(
    "rookery_learner_message_bytes_sent_total",
    "Bytes of all message parts handed to the transport. Excludes its framing and retransmissions.",
    read=lambda stats: stats.intake.bytes_sent,
)
RECONNECTS = LearnerMetric(
    "rookery_learner_reconnects_total",
    "Connections of incarnations that had been welcomed before. Hellos repeated on one connection do not count.",
    read=lambda stats: stats.intake.reconnects,
)
SOCKETS_REOPENED = LearnerMetric(
    "rookery_learner_sockets_reopened_total",
    "Times that the learner closed all connections and bound its socket again because memory was short. Excludes restarts.",
    read=lambda stats: stats.intake.sockets_reopened,
)
MESSAGES_IGNORED = LearnerMetric(
    "rookery_learner_messages_ignored_total",
    "Messages discarded unread because their connection had sent over 256 without experience within a second. Excludes refused "
    "messages.",
    read=lambda stats: stats.intake.messages_ignored,
)
WORKERS_EVICTED = LearnerMetric(
    "rookery_learner_workers_evicted_total",
    "Workers evicted because 16 messages were refused, and no experience between them was accepted. "
    "They may join again after a minute.",
    read=lambda stats: stats.intake.evictions,
)
HANDSHAKES_FAILED = LearnerMetric(
    "rookery_learner_handshakes_failed_total",
    "Connections that failed before their first message: the worker's key is not allowed (key), it expects another learner's key "
    "(learner_key), one side has keys and the other none (mechanism), or the connection broke (broken). Each retry counts.",
    read=lambda stats: stats.intake.handshakes_failed,
    labels={"reason": HandshakeFailure},
)

# --- results ---

EPISODES = LearnerMetric(
    "rookery_learner_episodes_total",
    "Episodes that ended inside experience that this rank trained on. Excludes evaluations and dropped experience.",
    read=lambda stats: stats.episodes,
)
EPISODE_RETURN_MEAN = LearnerMetric(
    "rookery_learner_episode_return_mean",
    "Mean raw return of the last 100 of those episodes of all ranks, or of as many as there are environments (mean100); NaN "
    "before the first.",
    read=lambda stats: stats.episode_return_mean,
)
EPISODE_RETURN_MEAN_EPISODES = LearnerMetric(
    "rookery_learner_episode_return_mean_episodes",
    "Episodes of which mean100 is the mean. Below 100, the target does not count yet.",
    read=lambda stats: stats.episode_return_mean_episodes,
)
ENVIRONMENTS_UNFINISHED = LearnerMetric(
    "rookery_learner_environments_unfinished",
    "Environments that have ended no episode. Above 0, mean100 is one over short episodes, and the target does not count yet.",
    read=lambda stats: stats.environments_unfinished,
)
EPISODES_BEFORE_LEAVING = LearnerMetric(
    "rookery_learner_episodes_before_leaving",
    "Episodes in mean100 from before an actor left or restarted, or an env worker lost rows, in the middle of longer ones. "
    "Above 0, mean100 is one over short episodes, and the target does not count yet.",
    read=lambda stats: stats.episodes_before_leaving,
)
EPISODE_LENGTH_MEAN = LearnerMetric(
    "rookery_learner_episode_length_mean",
    "Mean length in env steps of the episodes of mean100; NaN before the first.",
    read=lambda stats: stats.episode_length_mean,
)
EVALUATION_RETURN_MEAN = LearnerMetric(
    "rookery_learner_evaluation_return_mean",
    "Mean raw return of the last evaluation reported; NaN before the first.",
    read=lambda stats: stats.evaluation_return_means,
    labels={"mode": MODES},
    absent=UNKNOWN,
)

ENV_STEPS_PLANNED = LearnerMetric(
    "rookery_learner_env_steps_planned",
    "Env step budget of the run (target.env_steps), resumes included.",
    read=lambda stats: stats.env_steps_planned,
)
TIME_LEFT = LearnerMetric(
    "rookery_learner_time_left_seconds",
    "Estimated seconds until the run reaches a budget or its target of mean100; NaN while they cannot be estimated.",
    read=lambda stats: UNKNOWN if stats.seconds_left is None else stats.seconds_left,
)
TARGET_RETURN = LearnerMetric(
    "rookery_learner_target_return",
    "Mean return of 100 episodes at which the run ends (target.mean100); NaN without such a target.",
    read=lambda stats: stats.target_return,
)
TARGET_EVALUATION = LearnerMetric(
    "rookery_learner_target_evaluation_return",
    "Mean return of a greedy evaluation at which the run ends (target.evaluation); NaN without such a target.",
    read=lambda stats: stats.target_evaluation,
)

# --- snapshots and checkpoints ---

SNAPSHOT_BYTES = LearnerMetric(
    "rookery_learner_snapshot_bytes",
    "Size of the parameters in the newest snapshot, without header.",
    read=lambda stats: stats.snapshot_bytes,
)
CHECKPOINT_LAST_SUCCESS = LearnerMetric(
    "rookery_learner_checkpoint_last_success_timestamp_seconds",
    "Unix time of the last complete checkpoint of this process; 0 before the first.",
    read=lambda stats: stats.checkpoint_last_success,
)
CHECKPOINT_INTERVAL = LearnerMetric(
    "rookery_learner_checkpoint_interval_seconds",
    "Seconds between checkpoints (checkpoint.every_seconds). A checkpoint waits for the update that runs.",
    read=lambda stats: stats.checkpoint_interval,
)
CHECKPOINT_FAILURES = LearnerMetric(
    "rookery_learner_checkpoint_failures_total",
    "Checkpoints that could not be written. The run continues without them.",
    read=lambda stats: stats.checkpoint_failures,
)
UPLOAD_FAILURES = LearnerMetric(
    "rookery_learner_upload_failures_total",
    "Uploads of the run to its store (run.store) that failed and are repeated. The run continues without them.",
    read=lambda stats: stats.uploads.failures,
)
UPLOAD_LAST_SUCCESS = LearnerMetric(
    "rookery_learner_upload_last_success_timestamp_seconds",
    "Unix time of the last complete upload to the store by this process; 0 before the first, NaN without a store.",
    read=lambda stats: stats.uploads.last_success,
)
TRACKING_POINTS_DROPPED = LearnerMetric(
    "rookery_learner_tracking_points_dropped_total",
    "Points of the curves that a tracker never got, because its server was unreachable for too long. Excludes points that wait.",
    read=lambda stats: stats.tracking_points_dropped,
    labels={"tracker": ()},
)

METRICS = BUILD_INFO, RUN_INFO, *declared(globals(), "learner")
