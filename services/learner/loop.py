"""The train loop: take a batch from the queue, let the algorithm train on it, publish, record, and know when to end.

It owns the algorithm and the run's record, and meets the network only through `Intake`. It never waits longer than
`WAIT_SECONDS`, so that signals, evaluations and time limits are seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from common.algorithms.api import Algorithm, Progress, Sample, SavesReplay, UpdateResult
from common.errors import DropReason, ResourceError
from common.models import snapshot
from common.runtime.checkpoints import Checkpoint
from common.runtime.health import Health
from common.runtime.tree import Settings
from common.units import Seconds
from common.wire.messages import ACTOR_STATE, Experience, Snapshot
from services.learner.accounts import AccountsFile
from services.learner.intake import Intake, Item
from services.learner.journal import Journal
from services.learner.lockstep import Lockstep
from services.learner.metrics import LearnerMetrics
from services.learner.record import RunRecord

WAIT_SECONDS: Seconds = 0.2
CURVE_SECONDS: Seconds = 1.0  # between two rows of the learning curve
END_SECONDS: Seconds = 120.0  # for a last evaluation, when a run ends by itself; half of it to play whole games, however long
STOP_SECONDS: Seconds = 4.0  # for the peers' goodbyes, when it is told to stop
SAVE_SECONDS: Seconds = 300.0  # a checkpoint, with what is new in a replay memory, that takes longer counts as hung
STEP_SECONDS: Seconds = 300.0  # a gradient step, with all that is done before the first, that takes longer counts as hung


class Learner:
    """The learner's loop. `run` returns why it ended."""

    def __init__(
        self,
        *,
        settings: Settings,
        algorithm: Algorithm,
        intake: Intake,
        record: RunRecord,
        journal: Journal,
        save: Callable[[Checkpoint], object],
        accounts: AccountsFile,
        metrics: LearnerMetrics,
        health: Health,
        stopping: Callable[[], bool],
        comes_back: bool = False,
        clock: Callable[[], Seconds],
        note: Callable[..., None],
    ) -> None:
        """`save` writes a checkpoint whole or not at all (ResourceError); `stopping` says that the process is told to end.

        Where it `comes_back` after that, by whoever started it, its peers are not sent home: they wait for the next learner.
        """
        self._settings = settings
        self._algorithm = algorithm
        self._intake = intake
        self._record = record
        self._journal = journal
        self._save_checkpoint = save
        self._accounts = accounts
        self._metrics = metrics
        self._health = health
        self._stopping = stopping
        self._comes_back = comes_back
        self._clock = clock
        self._note = note
        self._phases = metrics.phases
        self._layout = snapshot.Layout.of(algorithm.model).fingerprint
        self._fresh: list[Item] = []  # taken, young enough, not yet a full batch
        self._lockstep = Lockstep.of(settings)
        self._patience: Seconds = settings.learner.batch_seconds or math.inf
        self._curve_at: Seconds = -math.inf
        self._saved_at = clock()
        metrics.policy_lag_limit.set(settings.learner.max_policy_lag)
        metrics.checkpoint_interval.set(settings.checkpoint.every_seconds)

    def run(self) -> str:
        """Train until the target, a budget or a stop; then let the peers go, save, and return the reason."""
        self._publish()
        self._record.phase = "training"
        self._metrics.training.set(1)
        if self._lockstep:
            known = {"actors": self._lockstep.actors, "trajectories_per_update": self._settings.batch}
            self._note("lockstep", **known, broken=self._record.lockstep_broken or "no")
        reason = ""
        while not reason:
            self._phases.enter("wait")
            self._health.tick()
            self._take()
            if self._batch_is_due():
                self._train()
            self._record.tick(self._clock())
            self._accounts.update()
            self._take_evaluations()
            reason = "stopped" if self._stopping() else self._record.over(self._clock())
            if not reason and self._clock() - self._saved_at >= self._settings.checkpoint.every_seconds:
                self._save()
        self._end(reason)
        return reason

    # --- a batch ---

    def _take(self) -> None:
        """Fill the batch; what has become too old meanwhile is refused, and counted."""
        items = self._taken()
        newest, limit = self._record.version, self._settings.learner.max_policy_lag
        stale = [item for item in items if newest - item.experience.version > limit]
        self._intake.settle(stale, DropReason.STALE)
        self._fresh += [item for item in items if newest - item.experience.version <= limit]

    def _taken(self) -> list[Item]:
        if self._lockstep is None:
            return self._intake.take(self._settings.learner.batch - len(self._fresh), WAIT_SECONDS, patience=self._patience)
        items = self._intake.take_round(self._lockstep.choose, WAIT_SECONDS)
        self._break_lockstep(self._lockstep.broken(items, self._record.version))
        return items

    def _batch_is_due(self) -> bool:
        """Whether the batch is full, or its first message has waited for the others long enough."""
        fresh = self._fresh
        if self._lockstep:
            return len(fresh) > 0  # a round comes whole; what was stale in it will not be replaced
        late = len(fresh) > 0 and self._clock() - fresh[0].arrived_at >= self._patience
        return late or len(fresh) >= self._settings.learner.batch

    def _train(self) -> None:
        items, self._fresh = self._fresh, []
        self._health.tick(doing="trains", within=STEP_SECONDS)
        for item in items:
            lag = max(0, self._record.version - item.experience.version)
            self._record.lag.add(lag, item.experience.env_steps)
            self._metrics.policy_lag.observe(lag)
        self._phases.enter("collate")
        samples = self._samples(items)
        batch = self._algorithm.collate(samples)
        self._phases.enter("train")
        progress = Progress(
            env_steps=self._record.env_steps,
            env_steps_planned=self._settings.target.env_steps,
            version=self._record.version,
        )
        result = self._algorithm.update(batch, progress, self._interrupted)
        self._record.trained(env_steps=sum(sample.env_steps for sample in samples), metrics=result.metrics)
        self._record.version += 1
        self._publish()
        self._intake.settle(items)
        self._write(samples, result)

    def _samples(self, items: Sequence[Item]) -> list[Sample]:
        """Return the messages as the algorithm gets them: arrays, and their order in time."""
        if self._lockstep:
            streams: list[tuple[Hashable, int]] = list(self._lockstep.streams(items, self._record.version))
        else:
            streams = [((item.peer.name, item.peer.incarnation), item.experience.seq) for item in items]
        return [_sample(item.experience, peer, seq) for item, (peer, seq) in zip(items, streams, strict=True)]

    def _break_lockstep(self, why: str) -> None:
        """The run goes on, and says once and in its summary that it cannot be repeated; "": nothing happened."""
        if self._lockstep and why and not self._record.lockstep_broken:
            self._record.lockstep_broken = why
            self._note("lockstep_broken", why=why)

    def _interrupted(self) -> bool:
        """Return whether to stop; asked before each gradient step, so that a long update delays no stop, budget or health probe.

        In lockstep an update is always finished: half of one would be an update that no other run makes.
        """
        self._health.tick(doing="trains", within=STEP_SECONDS)
        return not self._lockstep and (self._stopping() or bool(self._record.over(self._clock())))

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
        self._metrics.policy_version.set(self._record.version)
        self._metrics.snapshot_bytes.set(parameters.nbytes)

    # --- records ---

    def _write(self, samples: list[Sample], result: UpdateResult) -> None:
        record, metrics, now = self._record, self._metrics, self._clock()
        returns = np.concatenate([sample.arrays["episode_return"] for sample in samples]).tolist()
        lengths = np.concatenate([sample.arrays["episode_length"] for sample in samples]).tolist()
        record.ended(returns, lengths, now)
        metrics.updates.inc()
        metrics.env_steps_trained.inc(sum(sample.env_steps for sample in samples))
        metrics.env_frames_trained.inc(sum(sample.env_steps for sample in samples) * record.frame_skip)
        metrics.episodes.inc(len(returns))
        metrics.episode_return_mean.set(record.mean_return)
        metrics.episode_length_mean.set(record.mean_length)
        for name, value in result.metrics.items():
            metrics.training_metric.labels(name).set(value)
        scalars = {f"train/{name}": value for name, value in result.metrics.items()}
        scalars |= {"episode/return_mean100": record.mean_return, "episode/length_mean100": record.mean_length}
        scalars["throughput/frames_per_second"] = record.rates.last_10s * record.frame_skip
        scalars["throughput/policy_lag"] = float(np.mean([record.version - 1 - sample.version for sample in samples]))
        if returns:
            scalars["episode/return"] = float(np.mean(returns))
        self._journal.scalars(record.env_steps, scalars)
        if now - self._curve_at >= CURVE_SECONDS:
            self._curve_at = now
            self._row()

    def _row(self, evaluation: float | None = None) -> None:
        record = self._record
        self._journal.curve(
            wall_seconds=self._clock() - record.started_at,
            env_steps=record.env_steps,
            mean=record.mean_return,
            evaluation=evaluation,
        )

    def _take_evaluations(self) -> None:
        for evaluation in self._intake.take_evaluations():
            result = self._record.evaluated(evaluation)
            self._metrics.evaluation_return_mean[evaluation.mode].set(result["mean"])
            self._journal.scalars(self._record.env_steps, {f"evaluation/return_{evaluation.mode}": result["mean"]})
            if evaluation.mode == "greedy":
                self._row(evaluation=result["mean"])
            self._note("evaluated", **result)

    # --- ends ---

    def _save(self) -> ResourceError | None:
        """Write a checkpoint; returns why it could not be written."""
        self._phases.enter("checkpoint")
        self._health.tick(doing="saves", within=SAVE_SECONDS)
        self._saved_at = self._clock()
        try:
            self._save_checkpoint(self._checkpoint())
            self._accounts.remove()
        except ResourceError as error:  # a full disk costs the checkpoint, not the run
            self._metrics.checkpoint_failures.inc()
            self._note("checkpoint_failed", detail=str(error))
            return error
        self._metrics.checkpoint_last_success.set_to_current_time()
        return None

    def _checkpoint(self) -> Checkpoint:
        algorithm = self._algorithm
        replay: dict[str, Any] = {}
        if self._settings.checkpoint.replay and isinstance(algorithm, SavesReplay):
            replay = {"replay": algorithm.replay_state(), "segments": algorithm.replay_segments()}
        return Checkpoint(
            run_id=self._record.run_id,
            version=self._record.version,
            env_steps=self._record.env_steps,
            architecture=self._layout,
            counters={"record": self._record.state_dict(self._clock()), "session": self._intake.session_state()},
            state=algorithm.state_dict(),
            **replay,
        )

    def _end(self, reason: str) -> None:
        """Let the peers go, account for what is left, save everything."""
        stopped = reason == "stopped"
        self._metrics.training.set(0)
        self._record.parameters_sha256 = snapshot.digest(self._algorithm.model)
        self._intake.settle(self._fresh, DropReason.RUN_ENDED)
        if stopped and self._comes_back:
            self._intake.measure()  # what is queued comes again, to the next learner
        else:
            self._send_home(reason, stopped=stopped)
        self._take_evaluations()
        self._record.phase = "stopping"
        self._row()
        lost = self._save()
        if stopped:  # a run that resumes from this checkpoint is reproducible again
            self._break_lockstep("stopped on request, not by the run's own settings")
        self._journal.summary(self._record.summary(self._intake.figures, self._clock()))
        if stopped and lost is not None:
            raise lost  # whoever asked us to stop must not believe that the work is saved
        if not stopped:
            self._record.finish(self._clock())
        self._phases.stop()

    def _send_home(self, reason: str, *, stopped: bool) -> None:
        """Drain the peers (an evaluator plays the final policy first), and close the accounts."""
        self._record.phase = "stopping" if stopped else "evaluating"
        seconds = STOP_SECONDS if stopped else END_SECONDS
        self._intake.drain(reason, seconds)
        self._phases.enter("wait")
        self._intake.wait_for_goodbyes(seconds, alive=self._health.tick, hurry=lambda: not stopped and self._stopping())
        self._intake.finish()


def _sample(message: Experience, peer: Hashable, seq: int) -> Sample:
    arrays = {name: array for name, array in message.arrays.items() if name != ACTOR_STATE}
    return Sample(peer=peer, seq=seq, version=message.version, env_steps=message.env_steps, arrays=arrays)
