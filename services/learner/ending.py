"""The end of a run: its workers are drained, the rest of the queue is accounted for, and everything is saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.algorithms.api import Algorithm
from common.errors import DropReason
from common.models import snapshot
from common.observability.health import Health
from common.protocol.events import Experience
from common.runtime.process_group import TIMEOUT
from common.units import Seconds
from services.learner.intake import HUNG_SECONDS, Intake
from services.learner.results import Results
from services.learner.saving import RunCheckpoints

END_SECONDS: Seconds = 120.0  # for a last evaluation, when a run ends by itself; half of it to play whole games, however long
STOP_SECONDS: Seconds = 4.0  # for the workers' goodbyes, when a stop is requested
RANKS_SECONDS: Seconds = TIMEOUT + 15.0  # for another rank: `TIMEOUT` ends the wait
BARRIER_SECONDS: Seconds = 0.1  # between two questions whether the other ranks are done


@dataclass(slots=True, kw_only=True)
class RunEnd:
    """Called by the train loop after its last update, in its thread: `drain`, then `finish`."""

    algorithm: Algorithm
    intake: Intake
    results: Results
    checkpoints: RunCheckpoints
    health: Health
    stopping: Callable[[], bool]
    will_restart: bool  # after a stop: then workers are not drained, because they wait for the next learner

    def drain(self, reason: str, unfinished: Sequence[Experience]) -> None:
        """Send the workers the end of the run, unless the process restarts; drop the `unfinished` batch and the queue.

        Returns once the workers of all ranks have left: an evaluator plays the final policy first.
        """
        stopped = reason == "stopped"
        self.results.add_curve_row()  # now: the last evaluation may take minutes
        self.results.stop_progress(done=not stopped)
        self.results.stats.training = False
        self.results.stats.ended = not (stopped and self.will_restart)
        self.results.record.parameters_sha256 = snapshot.digest(self.algorithm.model)
        self.intake.complete(unfinished, DropReason.RUN_ENDED)
        if stopped and self.will_restart:
            self._expect_slow_disk()
            self.intake.update_stats()  # the actors send the queue's messages again, to the next learner
        else:
            self._drain_workers(reason, stopped=stopped)
        while not self._all_ranks(done=True):  # the ranks write their last checkpoint together
            time.sleep(BARRIER_SECONDS)

    def finish(self, reason: str) -> None:
        """Write the last checkpoint, the curve and the summary. Raises `ResourceError` where a stopped run could not be saved."""
        stopped = reason == "stopped"
        self.results.record.phase = "stopping"
        lost = self.checkpoints.save()
        if stopped:  # a run that resumes from this checkpoint is reproducible again
            self.results.break_lockstep("stopped on request, not by the run's own settings")
        self.results.summarise(self.intake.stats, complete=not stopped)
        if stopped and lost is not None:
            raise lost  # an exit code of 0 after a stop means that the work is saved
        if not stopped:
            self.results.record.finish(self.results.clock())
        self.results.stats.phases.stop()

    def _drain_workers(self, reason: str, *, stopped: bool) -> None:
        self.results.record.phase = "stopping" if stopped else "evaluating"
        seconds = STOP_SECONDS if stopped else END_SECONDS
        self.intake.drain(reason, seconds)
        self.results.stats.phases.enter("wait")
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
        agreement = self.results.agreement
        if agreement is None:
            return done
        self.health.tick(doing="waits for the other ranks", within=RANKS_SECONDS)
        return agreement.all(done=done)
