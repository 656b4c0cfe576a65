"""Results of updates, evaluations and the whole run, entered in the record, the metrics and the journal.

With several ranks the record counts what all of them trained on, the metrics what this one did.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from common.algorithms.api import UpdateResult
from common.observability import logs
from common.observability.learner_stats import IntakeStats, LearnerStats
from common.protocol.events import Experience
from common.protocol.ledger import sum_counts
from common.protocol.messages import Evaluation
from common.units import Seconds
from services.learner.coverage import NO_ACTORS, Coverage, EpisodeCoverage
from services.learner.journal import Journal
from services.learner.ranks import Agreement, Decision
from services.learner.record import RunRecord

EPISODES = ("episode_return", "episode_length")
CURVE_SECONDS: Seconds = 1.0  # between two rows of the learning curve

_log = logs.EventLog(__name__)


@dataclass(slots=True, kw_only=True)
class Results:
    """Writer of `record` and `stats`, and of the journal. The thread of the train loop owns it."""

    record: RunRecord
    stats: LearnerStats
    journal: Journal
    agreement: Agreement | None  # with the other ranks; None: there are none
    clock: Callable[[], Seconds]
    coverage: Coverage = NO_ACTORS  # of the actors of this rank
    _episode_coverage: EpisodeCoverage = field(init=False)
    _curve_at: Seconds = -math.inf

    def __post_init__(self) -> None:
        """Enter in the metrics what the settings decide."""
        stats, settings = self.stats, self.record.settings
        self._episode_coverage = EpisodeCoverage(settings.env.num_envs)
        stats.ranks = settings.learner.ranks
        if self.agreement:
            stats.all_reduce_seconds = self.agreement.group.sum_seconds
        stats.policy_lag_limit = settings.learner.max_policy_lag
        stats.frame_skip = self.record.frame_skip
        stats.env_steps_planned = settings.target.env_steps
        if settings.target.mean100 is not None:
            stats.target_return = settings.target.mean100
        if settings.target.evaluation is not None:
            stats.target_evaluation = settings.target.evaluation

    def taken(self, items: Sequence[Experience]) -> None:
        """Count the policy lag of messages that are trained on next."""
        for item in items:
            lag = max(0, self.record.version - item.version)
            self.record.lag.add(lag, item.env_steps)
            self.stats.policy_lag.observe(lag)

    def updated(self, samples: Sequence[Experience], result: UpdateResult, decision: Decision) -> None:
        """Enter an update, after its policy was published: its metrics, and the episodes that ended in `samples`."""
        record, stats, now = self.record, self.stats, self.clock()
        returns, lengths = ([value for sample in samples for value in sample.arrays[name].tolist()] for name in EPISODES)
        stats.episodes += len(returns)
        self.coverage = self._episode_coverage.add(samples, now)
        if self.agreement:
            returns, lengths = self.agreement.episodes(returns, lengths, decision.episodes)
        record.ended(returns, lengths, now, decision.coverage if self.agreement else self.coverage)
        stats.updates += 1
        stats.env_steps_trained += sum(sample.env_steps for sample in samples)
        stats.episode_return_mean = record.mean_return
        stats.episode_length_mean = record.mean_length
        stats.training_metrics = {**stats.training_metrics, **result.metrics}
        means = {f"train/{name}": value for name, value in result.metrics.items()}
        if samples:
            means["throughput/policy_lag"] = float(np.mean([record.version - 1 - sample.version for sample in samples]))
        newest = {"episode/return_mean100": record.mean_return, "episode/length_mean100": record.mean_length}
        newest["throughput/frames_per_second"] = record.rates.last_10s * record.frame_skip
        self.journal.update(record.env_steps, means=means, newest=newest, returns=returns)
        if now - self._curve_at >= CURVE_SECONDS:
            self._curve_at = now
            self.add_curve_row()

    def evaluated(self, evaluation: Evaluation) -> float:
        """Enter an evaluation, of which a greedy one has a row in the learning curve; return its mean return."""
        result = self.record.evaluated(evaluation, self.clock())
        mean: float = result["mean"]
        self.stats.evaluation_return_means[evaluation.mode] = mean
        self.journal.evaluation(self.record.env_steps, mode=evaluation.mode, mean=mean)
        if evaluation.mode == "greedy":
            self.add_curve_row(evaluation=mean)
        _log.info("evaluated", **result)
        return mean

    def break_lockstep(self, why: str) -> None:
        """Log once, and note in the summary, that a run in lockstep cannot be repeated, and go on; "": nothing happened."""
        if self.record.settings.lockstep and why and not self.record.lockstep_broken:
            self.record.lockstep_broken = why
            _log.info("lockstep_broken", why=why)

    def add_curve_row(self, evaluation: float | None = None) -> None:
        """Add a row to the learning curve, as of now."""
        record = self.record
        self.journal.curve(
            wall_seconds=self.clock() - record.started_at,
            env_steps=record.env_steps,
            mean=record.mean_return,
            evaluation=evaluation,
        )

    def summarise(self, stats: IntakeStats, *, complete: bool) -> None:
        """Write summary.json, with the ledgers of all ranks; a stopped run is not `complete`."""
        summary = self.record.summary(stats, self.clock())
        if self.agreement:
            summary["ledgers"] = self.agreement.group.gather_json(summary["ledger"])  # of each rank
            summary["ledger"] = sum_counts(summary["ledgers"])
        self.journal.summary(summary, complete=complete)
