"""Results of updates, evaluations and the whole run, entered in the record, the metrics and the journal.

With several ranks the record counts what all of them trained on, the metrics what this one did, and so does the policy lag until
the summary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from common.algorithms.api import UpdateResult
from common.algorithms.measures import NONFINITE_STEPS
from common.envs.leaves import action_mask
from common.envs.spec import EnvSpec
from common.observability import logs
from common.observability.checks.experience import REPLAY_INCOMPLETE
from common.observability.learner_stats import IntakeStats, LearnerStats
from common.protocol.events import Evaluated, Experience, LogEvent
from common.protocol.ledger import sum_counts
from common.units import EnvSteps, Seconds
from services.learner.journal import Journal
from services.learner.ranks import Agreement, Decision
from services.learner.rates import PolicyLag
from services.learner.record import RunRecord

EPISODES = ("episode_return", "episode_length")
CURVE_SECONDS: Seconds = 1.0  # between two rows of the learning curve, at most ...
CURVE_SHARE = 0.005  # ... and of the budget of env steps, so that the curve of a fast run has as many points

_log = logs.EventLog(__name__)


@dataclass(slots=True, kw_only=True)
class Results:
    """Writer of `record` and `stats`, and of the journal. The thread of the train loop owns it."""

    record: RunRecord
    stats: LearnerStats
    journal: Journal
    agreement: Agreement | None  # with the other ranks; None: there are none
    clock: Callable[[], Seconds]
    masked: EnvSpec | None = None  # the environment, where its actions are masked
    _curve_at: Seconds = -math.inf
    _curve_env_steps: EnvSteps = 0
    _curve_updates: int = -1  # of the newest row
    _replay_shrinks: bool = False

    def __post_init__(self) -> None:
        stats, settings = self.stats, self.record.settings
        if self.agreement:
            stats.all_reduce_seconds = self.agreement.group.sum_seconds
        stats.policy_lag_limit = settings.learner.max_policy_lag
        stats.frame_skip = self.record.frame_skip
        stats.env_steps_planned = settings.target.env_steps
        if settings.target.mean100 is not None:
            stats.target_return = settings.target.mean100
        if settings.target.evaluation is not None:
            stats.target_evaluation = settings.target.evaluation
        if last := self.record.last_evaluation:  # of before a resume; the next one may be minutes away
            stats.evaluation_return_means[last["mode"]] = last["mean"]

    def taken(self, items: Sequence[Experience]) -> None:
        """Count the policy lag of messages that are trained on next."""
        for item in items:
            lag = max(0, self.record.version - item.version)
            self.record.lag.add(lag, item.env_steps)
            self.stats.policy_lag.observe(lag)

    def updated(
        self, samples: Sequence[Experience], result: UpdateResult, decision: Decision, *, open_actors: Collection[str]
    ) -> None:
        """Enter an update, after its policy was published: its metrics, and the episodes that ended in `samples`.

        `open_actors`: names of the actors with an open account.
        """
        record, stats, now = self.record, self.stats, self.clock()
        returns, lengths = ([value for sample in samples for value in sample.arrays[name].tolist()] for name in EPISODES)
        stats.episodes += len(returns)
        coverage = record.coverage.add(samples, open_actors)
        if self.agreement:
            returns, lengths, coverage = self.agreement.episodes(returns, lengths, coverage, decision.episodes)
        record.ended(returns, lengths, now, coverage)
        stats.updates += 1
        stats.nonfinite_steps += int(result.metrics.get(NONFINITE_STEPS, 0))
        stats.env_steps_trained += sum(sample.env_steps for sample in samples)
        stats.episode_return_mean = record.mean_return
        stats.episode_return_mean_episodes = len(record.returns)
        stats.environments_unfinished = record.unfinished
        stats.episodes_before_leaving = record.before_leaving
        stats.episode_length_mean = record.mean_length
        metrics = {**record.training, **self._allowed_actions(samples)}
        stats.training_metrics = {**stats.training_metrics, **metrics}
        self._check_replay(result)
        means = {f"train/{name}": value for name, value in metrics.items()}
        if samples:
            means["throughput/policy_lag"] = float(np.mean([record.version - 1 - sample.version for sample in samples]))
        newest = {"episode/return_mean100": record.mean_return, "episode/length_mean100": record.mean_length}
        newest = newest if record.covered else {}
        record.measure(now)
        if rate := record.rates.last_10s:  # unknown before the second update
            newest["throughput/frames_per_second"] = rate * record.frame_skip
        self.journal.update(record.env_steps, means=means, newest=newest, returns=returns)
        grown = record.env_steps - self._curve_env_steps >= record.settings.target.env_steps * CURVE_SHARE
        if now - self._curve_at >= CURVE_SECONDS or grown:
            self._curve_at, self._curve_env_steps = now, record.env_steps
            self.add_curve_row()

    def _allowed_actions(self, samples: Sequence[Experience]) -> dict[str, float]:
        """Return the share of allowed choices over the env steps of a batch; nothing without masks, or for gradients."""
        if not self.masked:
            return {}
        arrays = [sample.arrays for sample in samples if "obs" in sample.arrays]
        first = self.masked.frame_stack - 1  # row of o_0: those before are images of its stack
        masks = [action_mask(self.masked, each["obs"][first:-1])[each["valid"]] for each in arrays]
        rows = np.concatenate(masks) if masks else np.empty(0)
        return {"allowed_actions": float(rows.mean())} if rows.size else {}

    def _check_replay(self, result: UpdateResult) -> None:
        """Warn where environments that the replay memory is not laid out for begin to take the room of its rows."""
        share = result.metrics.get("replay_incomplete", 0.0)
        if (shrinks := REPLAY_INCOMPLETE.passed(share)) and not self._replay_shrinks:
            fields = {"incomplete": round(share, 2), "fix": "set actor.count to all actors that join"}
            _log.log_event(LogEvent(event="replay_shrinks", fields=fields, warning=True))
        self._replay_shrinks = shrinks

    def evaluated(self, evaluated: Evaluated) -> float:
        """Enter an evaluation, of which a greedy one has a row in the learning curve; return its mean return.

        It is entered at the env steps of the policy that was played, which is older than the newest one by the time of the
        evaluation; at those of the newest one where the session does not know that policy any more.
        """
        evaluation, played = evaluated.message, evaluated.snapshot
        env_steps = played.env_steps if played else self.record.env_steps
        result = self.record.evaluated(evaluation, self.clock(), env_steps=env_steps)
        mean: float = result["mean"]
        self.stats.evaluation_return_means[evaluation.mode] = self.record.evaluations[evaluation.mode]
        self.journal.evaluation(env_steps, mode=evaluation.mode, mean=mean)
        if evaluation.mode == "greedy":
            elapsed = self.clock() - self.record.started_at
            self.journal.curve(wall_seconds=elapsed, env_steps=env_steps, mean=math.nan, evaluation=mean)
        _log.info("evaluated", **result)
        return mean

    def break_lockstep(self, why: str) -> None:
        """Log once, and note in the summary, that a run in lockstep cannot be repeated, and go on; "": nothing happened."""
        if self.record.settings.lockstep and why and not self.record.lockstep_broken:
            self.record.lockstep_broken = why
            _log.info("lockstep_broken", why=why)

    def add_curve_row(self) -> None:
        """Add a row to the learning curve, as of now, unless the newest one is of the same update.

        It has no mean return before each environment has ended an episode: that of short episodes would stand for the policy.
        """
        record = self.record
        if record.updates == self._curve_updates:
            return
        self._curve_updates = record.updates
        mean = record.mean_return if record.covered else math.nan
        self.journal.curve(wall_seconds=self.clock() - record.started_at, env_steps=record.env_steps, mean=mean)

    def stop_progress(self, *, done: bool) -> None:
        """End the rate and the estimate of the time left with the training; `done`: by itself, so that nothing is missing."""
        self.record.stop_progress(done=done)
        self.stats.seconds_left, self.stats.frames_per_second = None, 0.0

    def summarise(self, stats: IntakeStats, *, complete: bool) -> None:
        """Write summary.json, with the ledgers of all ranks; a stopped run is not `complete`."""
        summary = self.record.summary(stats, self.clock())
        if self.agreement:
            summary["ledgers"] = self.agreement.group.gather_json(summary["ledger"])  # of each rank
            summary["ledger"] = sum_counts(summary["ledgers"])
            lags = self.agreement.group.gather_json(asdict(self.record.lag))
            summary["policy_lag"] = PolicyLag.of_ranks(PolicyLag(**lag) for lag in lags).as_dict()
        self.journal.summary(summary, complete=complete)
