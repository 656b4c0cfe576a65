"""The end of a run: its workers are drained, the rest of the queue is accounted for, and everything is saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from common.algorithms.api import Algorithm
from common.errors import DropReason
from common.models import snapshot
from common.observability.health import Health
from common.protocol.events import Experience
from common.runtime.process_group import TIMEOUT
from common.units import Seconds
from services.learner.agreement import Agreement
from services.learner.intake import Intake
from services.learner.results import Results
from services.learner.saving import RunCheckpoints

END_SECONDS: Seconds = 120.0  # for a last evaluation, when a run ends by itself; half of it to play whole games, however long
STOP_SECONDS: Seconds = 4.0  # for the workers' goodbyes, when a stop is requested
RANKS_SECONDS: Seconds = TIMEOUT + 15.0  # for another rank: `TIMEOUT` ends the wait
BARRIER_SECONDS: Seconds = 0.1  # between two questions whether the other ranks are done


class RunEnd:
    """Called by the train loop after its last update, in its thread: `drain`, then `finish`."""

    def __init__(
        self,
        *,
        algorithm: Algorithm,
        intake: Intake,
        results: Results,
        checkpoints: RunCheckpoints,
        health: Health,
        stopping: Callable[[], bool],
        will_restart: bool = False,
        agreement: Agreement | None = None,
        clock: Callable[[], Seconds],
    ) -> None:
        """Where the process `will_restart` after a stop, its workers are not drained: they wait for the next learner."""
        self._algorithm = algorithm
        self._intake = intake
        self._results = results
        self._record, self._stats = results.record, results.stats
        self._checkpoints = checkpoints
        self._health = health
        self._stopping = stopping
        self._will_restart = will_restart
        self._agreement = agreement
        self._clock = clock

    def drain(self, reason: str, unfinished: Sequence[Experience]) -> None:
        """Send the workers the end of the run, unless the process restarts; drop the `unfinished` batch and the queue.

        Returns once the workers of all ranks have left: an evaluator plays the final policy first.
        """
        stopped = reason == "stopped"
        self._stats.training = False
        self._stats.ended = not (stopped and self._will_restart)
        self._record.parameters_sha256 = snapshot.digest(self._algorithm.model)
        self._intake.complete(unfinished, DropReason.RUN_ENDED)
        if stopped and self._will_restart:
            self._intake.update_stats()  # the actors send the queue's messages again, to the next learner
        else:
            self._drain_workers(reason, stopped=stopped)
        self._wait_for_ranks()

    def finish(self, reason: str) -> None:
        """Write the last checkpoint, the curve and the summary. Raises `ResourceError` where a stopped run could not be saved."""
        stopped = reason == "stopped"
        self._record.phase = "stopping"
        self._results.add_curve_row()
        lost = self._checkpoints.save()
        if stopped:  # a run that resumes from this checkpoint is reproducible again
            self._results.break_lockstep("stopped on request, not by the run's own settings")
        self._results.summarise(self._intake.stats, complete=not stopped)
        if stopped and lost is not None:
            raise lost  # an exit code of 0 after a stop means that the work is saved
        if not stopped:
            self._record.finish(self._clock())
        self._stats.phases.stop()

    def _drain_workers(self, reason: str, *, stopped: bool) -> None:
        self._record.phase = "stopping" if stopped else "evaluating"
        seconds = STOP_SECONDS if stopped else END_SECONDS
        self._intake.drain(reason, seconds)
        self._stats.phases.enter("wait")
        self._intake.wait_for_goodbyes(seconds, alive=self._still_draining, abort=lambda: not stopped and self._stopping())
        self._intake.finish()

    def _still_draining(self) -> None:
        if self._agreement:
            self._health.tick(doing="waits for the other ranks", within=RANKS_SECONDS)
            self._agreement.all(done=False)
        self._health.tick()

    def _wait_for_ranks(self) -> None:
        """Wait until the workers of every rank have left: the ranks write their last checkpoint together."""
        while self._agreement:
            self._health.tick(doing="waits for the other ranks", within=RANKS_SECONDS)
            if self._agreement.all(done=True):
                return
            time.sleep(BARRIER_SECONDS)
