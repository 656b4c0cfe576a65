"""Counters of a learner, in which its threads count and from which its metrics are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from common.observability.cpu_limit import CpuLimit
from common.observability.metrics import UNKNOWN, CountAndSum, Phases
from common.protocol.ledger import Ledger
from common.units import EnvSteps, Seconds, Version

PHASES = ("wait", "ingest", "train", "publish", "record", "checkpoint")
LEDGER_STATES = ("produced", "trained", "queued", "in_flight")


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeStats:
    """Counters of the learner's I/O thread at one moment: for metrics, status and summary. Replaced, never changed."""

    ledger: dict[str, Any] = field(default_factory=lambda: Ledger().as_dict())
    queue_depth: int = 0
    queue_capacity: int = 0
    queue_seconds: Seconds = 0.0
    actors: int = 0
    open_actors: frozenset[str] = frozenset()  # names, of those with an open account
    evaluators: int = 0
    messages_dropped: Counter[str] = field(default_factory=Counter)
    reconnects: int = 0
    evictions: int = 0
    handshakes_failed: Counter[str] = field(default_factory=Counter)
    sockets_reopened: int = 0
    messages_ignored: int = 0
    received: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    bytes_received: int = 0
    bytes_sent: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """`fraction` in [0, 1] of the way to the nearer end of the run; `seconds_left` is None where it cannot be estimated."""

    fraction: float = 0.0
    seconds_left: Seconds | None = None


@dataclass(frozen=True, slots=True)
class UploadStats:
    """Uploads to the store of the run at one moment. Replaced, never changed."""

    failures: int = 0
    last_success: Seconds = UNKNOWN  # Unix time; 0 before the first, NaN without a store


@dataclass(slots=True, kw_only=True)
class LearnerStats:
    """Counters of the train loop, which alone writes them, since this process began; and the newest of its I/O thread."""

    phases: Phases = field(default_factory=lambda: Phases(PHASES))
    policy_lag: CountAndSum = field(default_factory=CountAndSum)
    intake: IntakeStats = field(default_factory=IntakeStats)
    run: tuple[str, ...] = ()  # labels of the run
    training: bool = False
    ended: bool = False
    updates: int = 0
    nonfinite_steps: int = 0  # gradient steps left out
    env_steps_trained: EnvSteps = 0
    frame_skip: int = 1
    frames_per_second: float = 0.0  # of all ranks
    policy_version: Version = 0
    policy_lag_limit: int = 0
    ranks: int = 1
    ranks_wait_seconds: Seconds = 0.0
    all_reduce_seconds: Callable[[], Seconds] = lambda: 0.0  # the running one included
    training_metrics: Mapping[str, float] = field(default_factory=dict)  # replaced, never changed
    episodes: int = 0
    episode_return_mean: float = UNKNOWN
    episode_return_mean_episodes: int = 0
    environments_unfinished: int = 0
    episodes_before_leaving: int = 0
    episode_length_mean: float = UNKNOWN
    env_steps_planned: EnvSteps = 0
    seconds_left: Seconds | None = None  # until the run ends, as estimated
    target_return: float = UNKNOWN
    target_evaluation: float = UNKNOWN
    evaluation_return_means: dict[str, float] = field(default_factory=dict)
    snapshot_bytes: int = 0
    checkpoint_last_success: Seconds = 0.0  # Unix time
    checkpoint_interval: Seconds = 0.0
    checkpoint_failures: int = 0
    tracking_points_dropped: Mapping[str, int] = field(default_factory=dict)  # by tracker; replaced, never changed
    uploads: UploadStats = UploadStats()
    cpu_limit: Callable[[], CpuLimit | None] = lambda: None
