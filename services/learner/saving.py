"""Checkpoints of the run: what one holds, when one is written, and how the state of a run is restored from it.

The best policy of a run, by the mean return of a greedy evaluation, has a checkpoint that holds the policy alone. A policy is
several versions old when its evaluation arrives: the session keeps the last snapshot that it sent to each evaluator, which is
the one that the evaluator plays, and hands it over with the evaluation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from common.algorithms.api import Algorithm, HasReplay, SavesReplay
from common.envs.spec import EnvSettings
from common.errors import ResourceError
from common.models.snapshot import ParameterLayout, to_tensor
from common.observability import logs
from common.observability.health import Health
from common.protocol.events import Evaluated
from common.protocol.learner_side import LearnerSide
from common.runtime.checkpoint_files import POLICY, Checkpoint
from common.runtime.checkpoints import STATE_SETTINGS, CheckpointStore, differing
from common.runtime.process_group import SLOW_TIMEOUT
from common.units import Seconds, Version
from services.learner.intake import Intake
from services.learner.ranks import Agreement
from services.learner.rates import PolicyLag
from services.learner.record import RunRecord
from services.learner.results import Results

SAVE_SECONDS: Seconds = 300.0  # a checkpoint, with what is new in a replay memory, that takes longer counts as hung
SLOW_RANKS_SECONDS: Seconds = SLOW_TIMEOUT + 15.0  # for a rank that saves: `SLOW_TIMEOUT` ends the wait

_log = logs.EventLog(__name__)


@dataclass(slots=True, kw_only=True)
class RunCheckpoints:
    """Writer of the checkpoints of a run that trains. The thread of the train loop owns it."""

    algorithm: Algorithm
    intake: Intake
    results: Results
    save_checkpoint: Callable[[Checkpoint], object]  # whole or not at all (ResourceError)
    save_best: Callable[[Checkpoint], object]  # the best policy, in the same way
    remove_later: Callable[[Version], object]  # checkpoints of this rank of later versions (ResourceError)
    newest_saved: Callable[[], Version]  # of the checkpoints of this rank; -1 without one
    health: Health
    lost: str = ""  # why the newest checkpoint was not written, where it was not
    _saved_at: Seconds = field(init=False)

    def __post_init__(self) -> None:
        self._saved_at = self.results.clock()
        self.results.stats.checkpoint_interval = self.results.record.settings.checkpoint.every_seconds

    @property
    def due(self) -> bool:
        """Return whether the newest checkpoint is old enough for the next one."""
        return self.results.clock() - self._saved_at >= self.results.record.settings.checkpoint.every_seconds

    def save(self) -> ResourceError | None:
        """Write a checkpoint; return the error where it could not be written."""
        self._saved_at, agreement = self.results.clock(), self.results.agreement
        if agreement:
            error = self._write(lambda: self._save_with_ranks(agreement))
        else:
            error = self._write(lambda: self.save_checkpoint(self._checkpoint()))
        self.lost = str(error or "")
        if error is None:
            self.results.stats.checkpoint_last_success = time.time()
        return error

    def save_if_best(self, evaluated: Evaluated, *, mean: float) -> None:
        """Write the checkpoint of the best policy where this evaluation, of the return `mean`, is the best one of the run."""
        best = better_policy(evaluated, self.results.record.best, mean=mean, run_id=self.results.record.run_id)
        if best is not None:
            best = replace(best, counters={**best.counters, STATE_SETTINGS: self.results.record.settings.state_settings})
            if self._write(partial(self.save_best, best)) is None:
                self.results.record.best = facts_of(best, self.results.record.settings.env)

    def wait_for_ranks(self) -> None:
        """Wait, as one of several ranks, for those that write the checkpoint of the best policy."""
        if self.results.agreement:
            self._work_together(self.results.agreement, _nothing)

    def _save_with_ranks(self, agreement: Agreement) -> None:
        """Write the checkpoints of all ranks, that of rank 0 last: where it is there, all are.

        Where it was not written, those of the others are removed: they would take the places of older ones that all have.
        """
        own: list[Checkpoint] = []

        def collect() -> Any:
            own.append(self._checkpoint())
            counters = own[0].counters
            return counters["session"]["ledger"], counters["record"]["lag"], self.newest_saved()

        def save() -> None:
            if agreement.group.index:
                self.remove_later(common)
            self.save_checkpoint(replace(own[0], counters={**own[0].counters, "ledgers": ledgers, "lags": lags}))

        collected = self._work_together(agreement, collect)
        ledgers, lags, newest = (list(each) for each in zip(*collected, strict=True))
        common = newest[0]
        self._work_together(agreement, save if agreement.group.index else _nothing)
        self._work_together(agreement, _nothing if agreement.group.index else save)

    def _work_together(self, agreement: Agreement, work: Callable[[], Any]) -> list[Any]:
        self.health.tick(doing="saves, or waits for a rank that saves", within=SLOW_RANKS_SECONDS)
        return agreement.together(work)

    def _write(self, save: Callable[[], object]) -> ResourceError | None:
        self.results.stats.phases.enter("checkpoint")
        self.health.tick(doing="saves", within=SAVE_SECONDS)
        try:
            save()
        except ResourceError as error:  # a full disk costs the checkpoint, not the run
            self.results.stats.checkpoint_failures += 1
            _log.warning("checkpoint_failed", detail=str(error))
            return error
        return None

    def _checkpoint(self) -> Checkpoint:
        algorithm = self.algorithm
        replay: dict[str, Any] = {}
        if self.results.record.settings.checkpoint.replay and isinstance(algorithm, SavesReplay):
            replay = {"replay": algorithm.replay_state(), "segments": algorithm.replay_segments()}
        counters: dict[str, Any] = {
            "record": self.results.record.state_dict(self.results.clock()),
            "session": self.intake.session_state(),
            STATE_SETTINGS: self.results.record.settings.state_settings,
        }
        return Checkpoint(
            run_id=self.results.record.run_id,
            version=self.results.record.version,
            env_steps=self.results.record.env_steps,
            architecture=ParameterLayout.of(algorithm.model).fingerprint,
            counters=counters,
            state=algorithm.state_dict(),
            **replay,
        )


def _nothing() -> None:
    """Return at once: the part of a rank that waits for the others."""


# --- the best policy ---


def better_policy(evaluated: Evaluated, best: Mapping[str, Any] | None, *, mean: float, run_id: str) -> Checkpoint | None:
    """Return the checkpoint of the evaluated policy where its `mean` greedy return is higher than that of `best`, else None.

    Of equal returns the newer policy wins: a few perfect episodes of an early one may be luck. The facts of the policy are in
    `counters["best"]`, as the record has them. None also where the session does not know the policy any more.
    """
    evaluation, played = evaluated.message, evaluated.snapshot
    if evaluation.mode != "greedy" or played is None:
        return None
    if best is not None and (mean, played.version) <= (best["mean"], best["version"]):
        return None
    episodes = len(evaluation.arrays["episode_return"])
    facts = {"version": played.version, "mean": mean, "episodes": episodes, "env_steps": played.env_steps}
    return Checkpoint(
        run_id=run_id,
        version=played.version,
        env_steps=played.env_steps,
        architecture=played.layout,
        counters={"best": facts},
        state={POLICY: to_tensor(played.arrays["parameters"])},
    )


def facts_of(checkpoint: Checkpoint | None, env: EnvSettings) -> dict[str, Any] | None:
    """Return the facts in a checkpoint of `better_policy`; None without one, and for one that played in another environment."""
    if checkpoint is None or env.task_changes(checkpoint.counters.get(STATE_SETTINGS, {}).get("env", {})):
        return None
    return dict(checkpoint.counters["best"])


# --- back ---


def restore_checkpoint(
    checkpoint: Checkpoint, *, algorithm: Algorithm, record: RunRecord, session: LearnerSide, store: CheckpointStore
) -> None:
    """Restore all three from `checkpoint`; the replay memory too, where the run's checkpoints hold it.

    One that was filled in another environment is not restored: its rewards and steps are of the other.
    """
    record.load_state_dict(checkpoint.counters["record"], time.monotonic())
    session.saved.load_state_dict(checkpoint.counters["session"])
    algorithm.load_state_dict(checkpoint.state)
    fits = record.settings.checkpoint.replay and not record.task_changed
    if isinstance(algorithm, SavesReplay) and fits and checkpoint.replay is not None:
        try:
            algorithm.load_replay_state(checkpoint.replay)
        except ResourceError as error:
            found, wanted = differing(checkpoint, record.settings.state_settings)
            raise ResourceError(error.fact, found=found or error.found, wanted=wanted or error.wanted, fix=error.fix) from error
        store.segment_files.read(checkpoint.files, algorithm.replay_segments())
    elif isinstance(algorithm, HasReplay):
        missing = "wanted checkpoint.replay=true"
        reason = f"which is of another environment: {record.task_changed}" if record.task_changed else missing
        _lose_memory(record, f"resumed without the replay memory, {reason}")


def restore_without_sessions(checkpoint: Checkpoint, *, algorithm: Algorithm, record: RunRecord, session: LearnerSide) -> None:
    """Restore weights, record, and ledgers and policy lag of all ranks from rank 0's checkpoint; the sessions of workers end.

    All replay memories begin empty: those of the other ranks are not in it, and their rate limits count all inserts.
    """
    record.load_state_dict(checkpoint.counters["record"], time.monotonic())
    record.begin_environments_anew()
    algorithm.load_state_dict(checkpoint.state)
    session.saved.load_ledgers(_ledgers_of(checkpoint))
    if lags := checkpoint.counters.get("lags"):  # a single rank saves none: the record's stays
        record.lag = PolicyLag.of_ranks(PolicyLag(*lag) for lag in lags)
    same = ranks_of(checkpoint) == record.settings.learner.ranks
    reason = "without a version of which every rank has a checkpoint" if same else "with another number of ranks"
    if isinstance(algorithm, HasReplay):
        _lose_memory(record, f"resumed {reason}")
    record.lockstep_broken = record.lockstep_broken or f"resumed {reason}"


def _lose_memory(record: RunRecord, reason: str) -> None:
    """Note that a resumed run fills its replay memory anew: the warm-up has no gradient steps, and older experience is gone.

    A run that is over needs none.
    """
    if record.env_steps and not record.over(time.monotonic()):
        _log.warning("replay_memory_lost", reason=reason, env_steps=record.env_steps)
        record.settings_changed.append({"env_steps": record.env_steps, "settings": ["replay memory filled anew"]})
    record.lockstep_broken = record.lockstep_broken or reason


def ranks_of(checkpoint: Checkpoint) -> int:
    """Return the number of ranks of the learner that wrote a checkpoint."""
    return len(_ledgers_of(checkpoint))


def _ledgers_of(checkpoint: Checkpoint) -> Sequence[Mapping[str, Any]]:
    ledgers: Sequence[Mapping[str, Any]] = checkpoint.counters.get("ledgers") or [checkpoint.counters["session"]["ledger"]]
    return ledgers
