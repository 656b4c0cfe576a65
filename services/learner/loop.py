"""The train loop: take a batch from the queue, let the algorithm train on it, publish, record, and decide when to end.

It owns the algorithm and the run's record, and reaches the network only through `Intake`. Alone it never waits longer
than `WAIT_SECONDS`, so that signals, evaluations and time limits are seen. As one of several ranks it decides with the others
(`agreement`), for which it waits up to their time limit; its record counts what all of them trained on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from common.algorithms.api import Algorithm, ObservesExperience, RunProgress, SavesReplay, UpdateResult
from common.errors import DropReason, ResourceError
from common.models import snapshot
from common.observability import logs
from common.observability.learner_metrics import LearnerStats
from common.protocol.events import Experience
from common.protocol.messages import Snapshot
from common.runtime.checkpoint_files import Checkpoint
from common.runtime.lifecycle import Health
from common.units import Seconds
from services.learner.agreement import REASONS, Agreement, Decision, Vote, sum_ledgers
from services.learner.best import better_policy, facts_of
from services.learner.intake import Intake
from services.learner.journal import Journal
from services.learner.lockstep import Lockstep
from services.learner.record import RunRecord

WAIT_SECONDS: Seconds = 0.2
EPISODES = ("episode_return", "episode_length")
CURVE_SECONDS: Seconds = 1.0  # between two rows of the learning curve
END_SECONDS: Seconds = 120.0  # for a last evaluation, when a run ends by itself; half of it to play whole games, however long
STOP_SECONDS: Seconds = 4.0  # for the workers' goodbyes, when a stop is requested
SAVE_SECONDS: Seconds = 300.0  # a checkpoint, with what is new in a replay memory, that takes longer counts as hung
RANKS_SECONDS: Seconds = 75.0  # for another rank: longer than `common.runtime.ranks.TIMEOUT`, which ends the wait
COMPARED_UPDATES = 100  # between two comparisons of the weights of all ranks
BARRIER_SECONDS: Seconds = 0.1  # between two questions whether the other ranks are done
STEP_SECONDS: Seconds = 300.0  # a gradient step, with all that is done before the first, that takes longer counts as hung

_log = logs.EventLog(__name__)


class TrainLoop:
    """Loop of the learner, in the thread that calls `run`."""

    def __init__(
        self,
        *,
        algorithm: Algorithm,
        intake: Intake,
        record: RunRecord,
        journal: Journal,
        save: Callable[[Checkpoint], object],
        save_best: Callable[[Checkpoint], object],
        stats: LearnerStats,
        health: Health,
        stopping: Callable[[], bool],
        will_restart: bool = False,
        agreement: Agreement | None = None,
        clock: Callable[[], Seconds],
    ) -> None:
        """`save` writes a checkpoint whole or not at all (ResourceError), `save_best` one of the best policy.

        `stopping` returns whether a stop is requested.

        Where the process `will_restart` after a stop, its workers are not drained: they wait for the next learner. `agreement`:
        with the other ranks; None: there are none.
        """
        self._agreement = agreement
        self._updated_at = clock()
        self._ready_since: Seconds | None = None  # for the other ranks; None: this one is not ready
        self._algorithm = algorithm
        self._intake = intake
        self._record = record
        self._settings = record.settings
        self._journal = journal
        self._save_checkpoint = save
        self._save_best = save_best
        self._stats = stats
        self._phases = stats.phases
        self._health = health
        self._stopping = stopping
        self._will_restart = will_restart
        self._clock = clock
        self._layout = snapshot.ParameterLayout.of(algorithm.model).fingerprint
        self._lockstep = Lockstep.of(self._settings)
        self._patience: Seconds = self._settings.learner.batch_seconds or math.inf
        self._fresh: list[Experience] = []  # taken, young enough, not yet a full batch
        self._curve_at: Seconds = -math.inf
        self._saved_at = clock()
        stats.ranks = self._settings.learner.ranks
        stats.policy_lag_limit = self._settings.learner.max_policy_lag
        stats.checkpoint_interval = self._settings.checkpoint.every_seconds
        stats.frame_skip = record.frame_skip
        target = self._settings.target
        stats.env_steps_planned = target.env_steps
        if target.mean100 is not None:
            stats.target_return = target.mean100
        if target.evaluation is not None:
            stats.target_evaluation = target.evaluation

    def run(self) -> str:
        """Train until the target, a budget or a stop; then drain the workers, save, and return the reason."""
        self._publish()
        self._record.phase = "training"
        self._stats.training = True
        if self._lockstep:
            _log.info(
                "lockstep",
                actors=self._lockstep.actors,
                trajectories_per_update=self._settings.batch,
                broken=self._record.lockstep_broken or "no",
            )
        reason = ""
        while not reason:
            self._phases.enter("wait")
            if self._agreement:
                self._health.tick(doing="waits for the other ranks", within=RANKS_SECONDS)
            else:
                self._health.tick()
            self._take()
            decision = self._decide()
            if decision.train:
                self._train(decision)
            self._record.tick(self._clock())
            self._take_evaluations()
            reason = decision.reason if self._agreement else self._reason()
            if not reason and (decision.save if self._agreement else self._save_is_due()):
                self._save()
        self._end(reason)
        return reason

    def _reason(self) -> str:
        """Return why the run ends now; "" while it does not."""
        return "stopped" if self._stopping() else self._record.over(self._clock())

    def _save_is_due(self) -> bool:
        return self._clock() - self._saved_at >= self._settings.checkpoint.every_seconds

    def _decide(self) -> Decision:
        """Return whether to train now; with several ranks also why the run ends and whether to save, as all of them decide."""
        if self._agreement is None:
            return Decision(train=self._batch_is_due())
        compared = self._record.version % COMPARED_UPDATES == 1
        weights = int(snapshot.digest(self._algorithm.model)[:12], 16) if compared else 0
        ready, now = self._is_ready(), self._clock()
        began = now if self._ready_since is None else self._ready_since
        decision = self._agreement.decide(
            Vote(
                ready=ready,
                messages=len(self._fresh),
                env_steps=sum(item.env_steps for item in self._fresh),
                episodes=sum(len(item.arrays["episode_return"]) for item in self._fresh),
                reason=REASONS.index(self._reason()),
                save=self._save_is_due(),
                weights=weights,
            )
        )
        now = self._clock()
        self._stats.ranks_wait_seconds += now - began if ready else 0.0
        self._ready_since = now if ready and not decision.train else None
        return decision

    def _is_ready(self) -> bool:
        """Return whether the other ranks need not wait for this one: its batch is due, it waits too long, or it has no actors."""
        if self._batch_is_due():
            return True
        if self._lockstep:
            return False
        if self._clock() - self._updated_at >= self._patience:
            self._admit(self._intake.take(self._settings.learner.batch - len(self._fresh), 0.0, patience=0.0))
            return True
        return self._intake.stats.actors == 0

    # --- a batch ---

    def _take(self) -> None:
        """Fill the batch; experience that became too old in the queue is dropped, and counted."""
        self._admit(self._taken())

    def _admit(self, items: Sequence[Experience]) -> None:
        newest, limit = self._record.version, self._settings.learner.max_policy_lag
        stale = [item for item in items if newest - item.version > limit]
        self._intake.complete(stale, DropReason.STALE)
        self._fresh += [item for item in items if newest - item.version <= limit]

    def _taken(self) -> list[Experience]:
        if self._lockstep is None:
            return self._intake.take(self._settings.learner.batch - len(self._fresh), WAIT_SECONDS, patience=self._patience)
        items = self._intake.take_round(self._lockstep.choose, WAIT_SECONDS)
        self._break_lockstep(self._lockstep.broken(items, self._record.version))
        return items

    def _break_lockstep(self, why: str) -> None:
        """Log once, and note in the summary, that the run cannot be repeated, and go on; "": nothing happened."""
        if self._lockstep and why and not self._record.lockstep_broken:
            self._record.lockstep_broken = why
            _log.info("lockstep_broken", why=why)

    def _batch_is_due(self) -> bool:
        """Return whether the batch is full, or its first message has waited for the others long enough."""
        fresh = self._fresh
        if self._lockstep:
            return len(fresh) > 0  # a round comes whole; its stale messages are not replaced
        late = len(fresh) > 0 and self._clock() - fresh[0].arrived_at >= self._patience
        return late or len(fresh) >= self._settings.learner.batch

    def _train(self, decision: Decision) -> None:
        items, self._fresh = self._fresh, []
        self._health.tick(doing="trains", within=STEP_SECONDS)
        for item in items:
            lag = max(0, self._record.version - item.version)
            self._record.lag.add(lag, item.env_steps)
            self._stats.policy_lag.observe(lag)
        self._phases.enter("collate")
        samples = self._lockstep.streams(items, self._record.version) if self._lockstep else items
        batch = self._algorithm.collate(samples)
        self._phases.enter("train")
        progress = RunProgress(
            env_steps=self._record.env_steps,
            env_steps_planned=self._settings.target.env_steps,
            version=self._record.version,
        )
        result = self._algorithm.update(batch, progress, self._interrupted)
        if isinstance(self._algorithm, ObservesExperience):  # not before: the batch was acted under the present normalisation
            self._algorithm.observe(samples)
        env_steps = decision.env_steps if self._agreement else sum(sample.env_steps for sample in samples)
        self._record.trained(env_steps=env_steps, metrics=result.metrics)
        self._record.version += 1
        self._publish()
        self._intake.complete(items)
        self._record_update(samples, result, decision)
        self._updated_at = self._clock()

    def _interrupted(self) -> bool:
        """Return whether to stop. Called before each gradient step, so that a long update delays no stop, budget or probe.

        In lockstep, and with several ranks, an update is always finished: half of one would be an update that no other run, or
        no other rank, makes.
        """
        self._health.tick(doing="trains", within=STEP_SECONDS)
        return not (self._lockstep or self._agreement) and (self._stopping() or bool(self._record.over(self._clock())))

    def _publish(self) -> None:
        self._phases.enter("publish")
        precision = self._settings.learner.snapshot_precision
        parameters = snapshot.flatten(self._algorithm.model, precision)
        self._intake.publish(
            Snapshot(
                version=self._record.version,
                env_steps=self._record.env_steps,
                precision=precision,
                layout=self._layout,
                arrays={"parameters": parameters},
            )
        )
        self._stats.policy_version = self._record.version
        self._stats.snapshot_bytes = parameters.nbytes

    # --- records ---

    def _record_update(self, samples: Sequence[Experience], result: UpdateResult, decision: Decision) -> None:
        record, stats, now = self._record, self._stats, self._clock()
        returns, lengths = ([value for sample in samples for value in sample.arrays[name].tolist()] for name in EPISODES)
        stats.episodes += len(returns)
        if self._agreement:
            stats.all_reduce_seconds = self._agreement.all_reduce_seconds
            returns, lengths = self._agreement.episodes(returns, lengths, decision.episodes)
        record.ended(returns, lengths, now)
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
        self._journal.update(record.env_steps, means=means, newest=newest, returns=returns)
        if now - self._curve_at >= CURVE_SECONDS:
            self._curve_at = now
            self._add_curve_row()

    def _add_curve_row(self, evaluation: float | None = None) -> None:
        record = self._record
        self._journal.curve(
            wall_seconds=self._clock() - record.started_at,
            env_steps=record.env_steps,
            mean=record.mean_return,
            evaluation=evaluation,
        )

    def _take_evaluations(self) -> None:
        for evaluated in self._intake.take_evaluations():
            evaluation = evaluated.message
            result = self._record.evaluated(evaluation, self._clock())
            self._stats.evaluation_return_means[evaluation.mode] = result["mean"]
            self._journal.evaluation(self._record.env_steps, mode=evaluation.mode, mean=result["mean"])
            if evaluation.mode == "greedy":
                self._add_curve_row(evaluation=result["mean"])
            _log.info("evaluated", **result)
            best = better_policy(evaluated, self._record.best, run_id=self._record.run_id)
            if best is not None and self._write(partial(self._save_best, best)) is None:
                self._record.best = facts_of(best)

    # --- ends ---

    def _save(self) -> ResourceError | None:
        """Write a checkpoint; return the error where it could not be written."""
        self._saved_at = self._clock()
        if self._agreement:
            error = self._save_with_ranks(self._agreement)
        else:
            error = self._write(lambda: self._save_checkpoint(self._checkpoint()))
        if error is None:
            self._stats.checkpoint_last_success = time.time()
        return error

    def _save_with_ranks(self, agreement: Agreement) -> ResourceError | None:
        """Write the checkpoint of this rank, that of rank 0 last: where it is there, all are. Return an error of any rank."""
        checkpoint = self._checkpoint()
        error = self._write(lambda: self._save_checkpoint(checkpoint)) if agreement.rank else None
        if not agreement.all(done=error is None):
            return error or ResourceError("the checkpoint of another rank was not written", fix="its log says why")
        return error if agreement.rank else self._write(lambda: self._save_checkpoint(checkpoint))

    def _write(self, save: Callable[[], object]) -> ResourceError | None:
        self._phases.enter("checkpoint")
        self._health.tick(doing="saves", within=SAVE_SECONDS)
        try:
            save()
        except ResourceError as error:  # a full disk costs the checkpoint, not the run
            self._stats.checkpoint_failures += 1
            _log.info("checkpoint_failed", detail=str(error))
            return error
        return None

    def _checkpoint(self) -> Checkpoint:
        algorithm = self._algorithm
        replay: dict[str, Any] = {}
        if self._settings.checkpoint.replay and isinstance(algorithm, SavesReplay):
            replay = {"replay": algorithm.replay_state(), "segments": algorithm.replay_segments()}
        counters: dict[str, Any] = {
            "record": self._record.state_dict(self._clock()),
            "session": self._intake.session_state(),
        }
        if self._agreement:
            counters["ledgers"] = self._agreement.ledgers(counters["session"]["ledger"])
        return Checkpoint(
            run_id=self._record.run_id,
            version=self._record.version,
            env_steps=self._record.env_steps,
            architecture=self._layout,
            counters=counters,
            state=algorithm.state_dict(),
            **replay,
        )

    def _end(self, reason: str) -> None:
        """Drain the workers, account for the rest of the queue, save everything."""
        stopped = reason == "stopped"
        self._stats.training = False
        self._stats.ended = not (stopped and self._will_restart)
        self._record.parameters_sha256 = snapshot.digest(self._algorithm.model)
        self._intake.complete(self._fresh, DropReason.RUN_ENDED)
        if stopped and self._will_restart:
            self._intake.update_stats()  # the actors send the queue's messages again, to the next learner
        else:
            self._drain_workers(reason, stopped=stopped)
        self._wait_for_ranks()
        self._take_evaluations()
        self._record.phase = "stopping"
        self._add_curve_row()
        lost = self._save()
        if stopped:  # a run that resumes from this checkpoint is reproducible again
            self._break_lockstep("stopped on request, not by the run's own settings")
        summary = self._record.summary(self._intake.stats, self._clock())
        if self._agreement:
            summary["ledgers"] = self._agreement.ledgers(summary["ledger"])  # of each rank
            summary["ledger"] = sum_ledgers(summary["ledgers"])
        self._journal.summary(summary, complete=not stopped)
        if stopped and lost is not None:
            raise lost  # an exit code of 0 after a stop means that the work is saved
        if not stopped:
            self._record.finish(self._clock())
        self._phases.stop()

    def _drain_workers(self, reason: str, *, stopped: bool) -> None:
        """Send the workers the end of the run (an evaluator plays the final policy first), and close the accounts."""
        self._record.phase = "stopping" if stopped else "evaluating"
        seconds = STOP_SECONDS if stopped else END_SECONDS
        self._intake.drain(reason, seconds)
        self._phases.enter("wait")
        self._intake.wait_for_goodbyes(seconds, alive=self._still_draining, abort=lambda: not stopped and self._stopping())
        self._intake.finish()

    def _still_draining(self) -> None:
        self._health.tick()
        if self._agreement:
            self._agreement.all(done=False)

    def _wait_for_ranks(self) -> None:
        """Wait until the workers of every rank have left: the ranks write their last checkpoint together."""
        while self._agreement and not self._agreement.all(done=True):
            self._health.tick()
            time.sleep(BARRIER_SECONDS)
