"""The train loop: take a batch from the queue, let the algorithm train on it, publish, record, and decide when to end.

It owns the algorithm, and reaches the network only through `Intake`. Alone it never waits longer than `WAIT_SECONDS`, so that
signals, evaluations and time limits are seen. As one of several ranks it decides with the others (`agreement`), for which it
waits up to their time limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.algorithms.api import Algorithm, ObservesExperience, RunProgress
from common.errors import DropReason
from common.models import snapshot
from common.observability import logs
from common.observability.health import Health
from common.protocol.events import Evaluated, Experience
from common.protocol.messages import Snapshot
from common.runtime.process_group import TIMEOUT
from common.units import Seconds
from services.learner.intake import HUNG_SECONDS, Intake
from services.learner.lockstep import Lockstep
from services.learner.ranks import REASONS, Decision, Vote
from services.learner.results import Results
from services.learner.saving import RunCheckpoints

WAIT_SECONDS: Seconds = 0.2
COMPARED_UPDATES = 100  # between two comparisons of the weights of all ranks
END_SECONDS: Seconds = 120.0  # for a last evaluation, when a run ends by itself; half of it to play whole games, however long
STOP_SECONDS: Seconds = 4.0  # for the workers' goodbyes, when a stop is requested
RANKS_SECONDS: Seconds = TIMEOUT + 15.0  # for another rank: `TIMEOUT` ends the wait
BARRIER_SECONDS: Seconds = 0.1  # between two questions whether the other ranks are done
STEP_SECONDS: Seconds = 300.0  # a gradient step, with all that is done before the first, that takes longer counts as hung

_log = logs.EventLog(__name__)


@dataclass(kw_only=True)
class TrainLoop:
    """Loop of the learner, in the thread that calls `run`, until the workers have left and everything is saved."""

    algorithm: Algorithm
    intake: Intake
    results: Results
    checkpoints: RunCheckpoints
    health: Health
    stopping: Callable[[], bool]
    will_restart: bool  # after a stop: then workers are not drained, because they wait for the next learner

    def __post_init__(self) -> None:
        self._record, self._stats = self.results.record, self.results.stats
        self._settings, self._phases = self._record.settings, self._stats.phases
        self._agreement, self._clock = self.results.agreement, self.results.clock
        self._layout = snapshot.ParameterLayout.of(self.algorithm.model).fingerprint
        self._lockstep = Lockstep.of(self._settings)
        self._patience: Seconds = self._settings.learner.batch_seconds or math.inf
        self._fresh: list[Experience] = []  # taken, young enough, not yet a full batch
        self._updated_at = self._clock()
        self._ready_since: Seconds | None = None  # for the other ranks; None: this one is not ready
        self._idle = False  # whether no rank had experience at the last vote

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
                self.health.tick(doing="waits for the other ranks", within=RANKS_SECONDS)
            else:
                self.health.tick()
            self._admit(self._taken())
            evaluations = self.intake.take_evaluations()
            decision = self._decide(evaluated=bool(evaluations))
            if decision.train:
                self._train(decision)
            self._record.tick(self._clock())
            self._stats.seconds_left = self._record.progress.seconds_left
            self._stats.frames_per_second = self._record.rates.last_10s * self._record.frame_skip
            self._record_evaluations(evaluations)
            if decision.evaluated:
                self.checkpoints.wait_for_ranks()
            reason = decision.reason if self._agreement else self._reason()
            if not reason and (decision.save if self._agreement else self.checkpoints.due):
                self.checkpoints.save()
        self._end(reason)
        self._record_evaluations(self.intake.take_evaluations())
        self._save(reason)
        return reason

    def _reason(self) -> str:
        return "stopped" if self.stopping() else self._record.over(self._clock())

    def _decide(self, *, evaluated: bool) -> Decision:
        """Return whether to train now; with several ranks also why the run ends and whether to save, as all of them decide."""
        if self._agreement is None:
            return Decision(train=self._batch_is_due())
        compared = self._record.version % COMPARED_UPDATES == 1
        weights = int(snapshot.digest(self.algorithm.model)[:12], 16) if compared else 0
        late = not self._lockstep and self._clock() - self._updated_at >= self._patience  # too late to wait for a full batch
        if late and not self._batch_is_due():
            self._admit(self.intake.take(self._settings.learner.batch - len(self._fresh), 0.0, patience=0.0))
        alone = not self._lockstep and self.intake.stats.actors == 0
        ready, now = late or alone or self._batch_is_due(), self._clock()
        began = now if self._ready_since is None else self._ready_since
        decision = self._agreement.decide(
            Vote(
                ready=ready,  # the others need not wait for this rank
                messages=len(self._fresh),
                env_steps=sum(item.env_steps for item in self._fresh),
                episodes=sum(len(item.arrays["episode_return"]) for item in self._fresh),
                reason=REASONS.index(self._reason()),
                save=self.checkpoints.due,
                weights=weights,
                evaluated=evaluated,
            )
        )
        now = self._clock()
        self._stats.ranks_wait_seconds += now - began if ready else 0.0
        self._ready_since = now if ready and not decision.train else None
        self._idle = decision.idle
        return decision

    # --- a batch ---

    def _admit(self, items: Sequence[Experience]) -> None:
        """Add messages to the batch; experience that became too old in the queue is dropped, and counted."""
        newest, limit = self._record.version, self._settings.learner.max_policy_lag
        stale = [item for item in items if newest - item.version > limit]
        self.intake.complete(stale, DropReason.STALE)
        self._fresh += [item for item in items if newest - item.version <= limit]

    def _taken(self) -> list[Experience]:
        if self._lockstep is None:
            missing = self._settings.learner.batch - len(self._fresh)
            return self.intake.take(missing, self._longest_wait(), patience=self._patience)
        items = self.intake.take_round(self._lockstep.choose, WAIT_SECONDS)
        self.results.break_lockstep(self._lockstep.broken(items, self._record.version))
        return items

    def _longest_wait(self) -> Seconds:
        """Return how long to wait for a batch: of several ranks, one that is ready without it waits for the others in the vote.

        Where no rank has experience, all wait here, because votes would otherwise follow each other without a pause.
        """
        if self._agreement is None or self._idle:
            return WAIT_SECONDS
        if self.intake.stats.actors == 0:
            return 0.0
        return min(WAIT_SECONDS, max(0.0, self._updated_at + self._patience - self._clock()))

    def _batch_is_due(self) -> bool:
        """Return whether the batch is full, or its first message has waited for the others long enough."""
        fresh = self._fresh
        if self._lockstep:
            return len(fresh) > 0  # a round comes whole; its stale messages are not replaced
        late = len(fresh) > 0 and self._clock() - fresh[0].arrived_at >= self._patience
        return late or len(fresh) >= self._settings.learner.batch

    def _train(self, decision: Decision) -> None:
        items, self._fresh = self._fresh, []
        self.health.tick(doing="trains", within=STEP_SECONDS)
        self.results.taken(items)
        self._phases.enter("ingest")
        samples = self._lockstep.streams(items, self._record.version) if self._lockstep else items
        batch = self.algorithm.ingest(samples)
        self._phases.enter("train")
        progress = RunProgress(
            env_steps=self._record.env_steps,
            env_steps_planned=self._settings.target.env_steps,
            version=self._record.version,
        )
        result = self.algorithm.update(batch, progress, self._interrupted)
        if isinstance(self.algorithm, ObservesExperience):  # not before: the batch was acted under the present normalisation
            self.algorithm.observe(samples)
        env_steps = decision.env_steps if self._agreement else sum(sample.env_steps for sample in samples)
        self._record.trained(env_steps=env_steps, metrics=result.metrics)
        self._record.version += 1
        self._publish()
        self.intake.complete(items)
        self._phases.enter("record")
        self.results.updated(items, result, decision, open_actors=self.intake.stats.open_actors)
        self._updated_at = self._clock()

    def _interrupted(self) -> bool:
        """Return whether to stop. Called before each gradient step, so that a long update delays no stop, budget or probe.

        In lockstep, and with several ranks, an update is always finished: half of one would be an update that no other run, or
        no other rank, makes.
        """
        self.health.tick(doing="trains", within=STEP_SECONDS)
        return not (self._lockstep or self._agreement) and (self.stopping() or bool(self._record.over(self._clock())))

    def _publish(self) -> None:
        self._phases.enter("publish")
        precision = self._settings.learner.snapshot_precision
        parameters = snapshot.flatten(self.algorithm.model, precision)
        self.intake.publish(
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

    def _record_evaluations(self, evaluations: Sequence[Evaluated]) -> None:
        for evaluated in evaluations:
            mean = self.results.evaluated(evaluated)
            self.checkpoints.save_if_best(evaluated, mean=mean)

    # --- the end ---

    def _end(self, reason: str) -> None:
        """Send the workers the end of the run, unless the process restarts; drop the unfinished batch and the queue.

        Returns once the workers of all ranks have left: an evaluator plays the final policy first.
        """
        stopped = reason == "stopped"
        self.results.add_curve_row()  # now: the last evaluation may take minutes
        self.results.stop_progress(done=not stopped)
        self._stats.training = False
        self._stats.ended = not (stopped and self.will_restart)
        self._record.parameters_sha256 = snapshot.digest(self.algorithm.model)
        self.intake.complete(self._fresh, DropReason.RUN_ENDED)
        if stopped and self.will_restart:
            self._expect_slow_disk()
            self.intake.update_stats()  # the actors send the queue's messages again, to the next learner
        else:
            self._drain_workers(reason, stopped=stopped)
        while not self._all_ranks(done=True):  # the ranks write their last checkpoint together
            time.sleep(BARRIER_SECONDS)

    def _save(self, reason: str) -> None:
        """Write the last checkpoint, the curve and the summary. Raises `ResourceError` where a stopped run could not be saved."""
        stopped = reason == "stopped"
        self._record.phase = "stopping"
        lost = self.checkpoints.save()
        if stopped:  # a run that resumes from this checkpoint is reproducible again
            self.results.break_lockstep("stopped on request, not by the run's own settings")
        self.results.summarise(self.intake.stats, complete=not stopped)
        if stopped and lost is not None:
            raise lost  # an exit code of 0 after a stop means that the work is saved
        if not stopped:
            self._record.finish(self._clock())
        self._phases.stop()

    def _drain_workers(self, reason: str, *, stopped: bool) -> None:
        self._record.phase = "stopping" if stopped else "evaluating"
        seconds = STOP_SECONDS if stopped else END_SECONDS
        self.intake.drain(reason, seconds)
        self._phases.enter("wait")
        self.intake.wait_for_goodbyes(seconds, alive=self._still_draining, abort=lambda: not stopped and self.stopping())
        self._expect_slow_disk()
        self.intake.finish()

    def _expect_slow_disk(self) -> None:
        self.health.tick(doing="waits for the I/O thread", within=HUNG_SECONDS)

    def _still_draining(self) -> None:
        self._all_ranks(done=False)
        self.health.tick()

    def _all_ranks(self, *, done: bool) -> bool:
        """Return whether every rank is done; without other ranks, whether this one is."""
        if self._agreement is None:
            return done
        self.health.tick(doing="waits for the other ranks", within=RANKS_SECONDS)
        return self._agreement.all(done=done)
