"""The learner's root: read the settings, build every part in order, run the train loop, return an exit code."""

from __future__ import annotations

from common.runtime.lifecycle import begin_process

if __name__ == "__main__":
    begin_process()

import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from common.algorithms.api import Algorithm
from common.algorithms.ranks import ALONE
from common.envs.spec import EnvSpec
from common.envs.trial import example_frames, trial
from common.errors import ResourceError
from common.observability import logs
from common.observability.health import Health
from common.observability.http import HttpServer
from common.observability.learner_metrics import METRICS
from common.observability.learner_stats import PHASES, LearnerStats
from common.observability.metrics import Exporter, Phases, run_labels
from common.protocol.learner_side import LearnerSide
from common.runtime import process
from common.runtime.checkpoint_files import Checkpoint
from common.runtime.checkpoints import CheckpointStore
from common.runtime.copies import check_new
from common.runtime.lifecycle import Shutdown, on_signals
from common.runtime.machine import cpu_limit
from common.runtime.process import derive_seed
from common.runtime.process_group import ProcessGroup
from common.runtime.run_directory import RunDirectory, held
from common.tracking.remote import check_tracking
from common.transport.curve import ServerKeys
from common.transport.zmq import ZmqServer
from common.units import Seconds
from services.learner.accounts import AccountsFile
from services.learner.intake import Intake
from services.learner.journal import TRACKERS_END_SECONDS, TRACKERS_STOP_SECONDS, Journal, open_trackers, tracked_run
from services.learner.loop import TrainLoop
from services.learner.ranks import Agreement, Joined, check_same_data, join_ranks, open_rank_directory
from services.learner.record import RunRecord
from services.learner.results import Results
from services.learner.resume import open_state
from services.learner.saving import RunCheckpoints
from services.learner.startup import (
    STOPPED_JOB,
    Invocation,
    build_run_algorithm,
    existing_run,
    open_directory,
    parse,
    require_own,
    restore_config,
    with_run_id,
    write_config,
)
from services.learner.uploads import END_SECONDS, STOP_SECONDS, Uploads, open_uploads

EXAMPLES_SECONDS: Seconds = 300.0  # for example observations: a simulator may take its time
LOAD_SECONDS: Seconds = 600.0  # for a checkpoint with a large replay memory, on a slow disk

_log = logs.EventLog(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run the learner until the run ends or a stop is requested; return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    return process.run(lambda: _serve(argv), program="rookery learner", debug="--debug" in argv)


def _serve(argv: list[str]) -> int:
    invocation = parse(argv, os.environ)
    settings = invocation.settings
    logs.configure("learner", level=settings.log.level, form=settings.log.format, debug=invocation.debug)
    process.set_torch_threads(settings.learner.torch_threads)  # before the first operation of torch
    try:
        if settings.learner.ranks == 1:
            return _train(with_run_id(invocation), argv)
        with join_ranks(invocation, os.environ) as joined:
            return _train(joined.invocation, argv, joined)
    except torch.OutOfMemoryError as error:
        found = ". ".join(str(error).split(". ")[:3])  # what was asked for, and what is free; then come hints for programmers
        fix = "use smaller minibatches or a smaller network, or end what else uses the GPU"
        raise ResourceError("the memory of the GPU does not suffice", found=found, fix=fix) from error


def _train(invocation: Invocation, argv: list[str], joined: Joined | None = None) -> int:
    group = joined.group if joined else None
    settings = invocation.settings
    logs.belong_to(settings.run.id)
    process.allow_descriptors()
    check_tracking(settings.run.tracking, os.environ)
    keys = ServerKeys.of(settings.learner.keys)
    with process.build_limit(), trial(settings.env) as environment:
        env = environment.spec
    if environment.offers_masks:
        _log.warning("action_mask_not_used", consequence="the policy also chooses actions that it forbids")
    if environment.unheeded:
        _log.warning("settings_without_effect", env=environment.unheeded)
    seed = derive_seed(settings.run.seed, "model", role="learner")
    local = {"local_rank": joined.local_rank, "local_ranks": joined.local_ranks} if joined else {}
    algorithm = build_run_algorithm(settings, env, seed=seed, ranks=group or ALONE, **local)
    with ExitStack() as resources:
        root = _Root(invocation=invocation, argv=argv, keys=keys, env=env, algorithm=algorithm, group=group, resources=resources)
        reason = root.run()
    return STOPPED_JOB if invocation.job and reason == "stopped" else 0


class _Run(NamedTuple):
    """A run that this learner has begun, or continues."""

    directory: RunDirectory  # of this rank
    store: CheckpointStore
    record: RunRecord
    session: LearnerSide
    transport: ZmqServer


@dataclass(slots=True, kw_only=True)
class _Root:
    """One learner process, or one of its ranks, from its lock and ports to its end. `resources` closes what it opens."""

    invocation: Invocation
    argv: list[str]
    keys: ServerKeys | None
    env: EnvSpec
    algorithm: Algorithm
    group: ProcessGroup | None
    resources: ExitStack
    shutdown: Shutdown = field(default_factory=Shutdown)
    health: Health = field(default_factory=Health)
    stats: LearnerStats = field(default_factory=lambda: LearnerStats(cpu_limit=cpu_limit))
    status: Callable[[], Any] = lambda: {"phase": "starting"}  # replaced once there is a record

    @property
    def rank(self) -> int:
        return self.group.index if self.group else 0

    def run(self) -> str:
        """Train until the run ends or a stop is requested, and linger where that is asked for; return the reason of the end."""
        settings, opened = self.invocation.settings, self.resources.enter_context
        opened(on_signals(self.shutdown))
        existing = existing_run(self.invocation, self.argv) if self.rank == 0 else None
        if existing:  # before any port is bound, which the learner of a run in progress needs when it restarts
            opened(held(existing, inherited=self.invocation.run_lock))
        self.stats.ranks = settings.learner.ranks
        if settings.learner.device == "cuda":  # backward passes run in other threads, for which that of the loop waits
            self.stats.phases = Phases(PHASES, cpu_clock=lambda: time.process_time)
        metrics = Exporter(METRICS, lambda: self.stats, self.health)
        http = opened(
            HttpServer(
                host=settings.metrics.host,
                port=settings.metrics.port,
                metrics=metrics.render,
                health=self.health,
                json_routes={"/status": lambda: self.status()},
            )
        )
        self.health.tick(doing="opens its run, and loads its checkpoint", within=LOAD_SECONDS)
        run = self.open_run(existing)
        record = run.record
        uploads = opened(closing(open_uploads(settings, run.directory)))
        journal = opened(closing(_open_journal(record, run.directory)))
        accounts = AccountsFile(run.directory.accounts, run_id=record.run_id, clock=time.monotonic)
        intake = Intake(
            transport=run.transport,
            session=run.session,
            clock=time.monotonic,
            log_event=_log.log_event,
            accounts=accounts,
            health=self.health,
        )
        opened(closing(intake))
        metrics.source = lambda: replace(
            self.stats, intake=intake.stats, uploads=uploads.stats, tracking_points_dropped=journal.points_dropped
        )
        self.status = lambda: record.status(intake.stats, time.monotonic())
        agreement = Agreement(self.group) if self.group else None
        masked = self.env if self.env.action_mask else None
        results = Results(
            record=record, stats=self.stats, journal=journal, agreement=agreement, clock=time.monotonic, masked=masked
        )
        checkpoints = self.build_checkpoints(run, intake, results, uploads)
        loop = self.build_loop(intake, results, checkpoints)
        intake.start()
        self.calibrate(record)
        self.health.ready()
        self.log_start(run, metrics_url=http.url)
        reason = loop.run()
        stopped = reason == "stopped"
        copy = self.close_copies(journal, uploads, stopped=stopped)
        if lost := [part for part in (*journal.lost, checkpoints.lost, copy) if part]:
            _log.warning("results_incomplete", detail="; ".join(lost))
        _log.info("learner_ended", reason=reason, env_steps=record.env_steps, mean100=record.mean_return, solved=record.solved)
        other_rank_stops = stopped and not self.shutdown.requested  # a new process must take this one's place
        if self.invocation.linger and not other_rank_stops:
            process.linger(self.shutdown, self.health, check=intake.check)
        return reason

    def log_start(self, run: _Run, *, metrics_url: str) -> None:
        settings = self.invocation.settings
        for note in () if self.invocation.config_named else self.invocation.loaded.notes:  # `rookery train` shows them
            _log.warning("settings", note=note)
        if settings.learner.insecure and not settings.learner.keys:
            consequence = "any process that reaches it may connect, and read along"
            _log.warning("insecure", endpoint=run.transport.endpoint, consequence=consequence)
        _log.info(
            "learner_started",
            run=run.record.run_id,
            endpoint=run.transport.endpoint,
            metrics=metrics_url,
            run_dir=run.directory.path,
            keys=settings.learner.keys or "none",
            worker_keys=", ".join(self.keys.allowed) if self.keys else "none",
        )

    def close_copies(self, journal: Journal, uploads: Uploads, *, stopped: bool) -> str:
        """Send trackers and store what is left, in the time of such an end; return what the store lacks, "" for nothing."""
        deadline = time.monotonic() + (STOP_SECONDS if stopped else END_SECONDS)
        journal.close(TRACKERS_STOP_SECONDS if stopped else TRACKERS_END_SECONDS)
        uploaded = uploads.close(deadline - time.monotonic())
        return "" if uploaded else f"the copy of the run in {self.invocation.settings.run.store} is older than the run"

    def open_run(self, existing: RunDirectory | None) -> _Run:
        """Bind the port and open the run: the `existing` one, whose lock is held, or a new one.

        A new run binds before it writes anything: a port in use must leave no trace. An existing run, whose other ranks know
        it by `resume`, loads its checkpoint first, which may take minutes, because nothing guards the memory of a bound socket
        before the intake thread runs.
        """
        invocation, settings, opened = self.invocation, self.invocation.settings, self.resources.enter_context
        bind = cache(lambda: opened(closing(ZmqServer(settings.learner.bind, keys=self.keys))))
        if existing is None:
            check_new(settings.run.store, invocation.run_dir)
        if not (existing or (self.rank and invocation.resume)):
            bind()
        directory = self.open_directory(existing)
        if existing is None:
            opened(held(directory, inherited=invocation.run_lock if self.rank == 0 else None))
        # A rank that writes before rank 0 keeps the one before, from which all continue where rank 0 does not get to it.
        keep, check = settings.checkpoint.keep + (self.rank > 0), partial(require_own, invocation, directory)
        store = CheckpointStore(directory.checkpoints, keep=keep, check=check)
        record, session = open_state(invocation, directory, algorithm=self.algorithm, env=self.env, store=store, group=self.group)
        if self.group:
            check_same_data(self.group, env=self.env, run_id=record.run_id, model=self.algorithm.model)
        logs.belong_to(record.run_id)  # of the checkpoint, where there is one
        algorithm, seed = settings.algorithm.name, settings.run.seed
        self.stats.run = run_labels(run_id=record.run_id, env=settings.env.name, algorithm=algorithm, seed=seed)
        transport = bind()
        write_config(invocation, directory)
        return _Run(directory, store, record, session, transport)

    def open_directory(self, existing: RunDirectory | None) -> RunDirectory:
        """Return the run directory, or the folder of this rank in it. Raises `ConfigError` or `ResourceError`."""
        if self.group is None:
            return existing or open_directory(self.invocation, self.argv)
        return open_rank_directory(self.group, None if self.rank else existing or open_directory(self.invocation, self.argv))

    def build_checkpoints(self, run: _Run, intake: Intake, results: Results, uploads: Uploads) -> RunCheckpoints:
        def save(checkpoint: Checkpoint) -> None:
            run.store.save(checkpoint)
            if not self.rank:
                restore_config(self.invocation, run.directory, self.resources)

        return RunCheckpoints(
            algorithm=self.algorithm,
            intake=intake,
            results=results,
            save_checkpoint=uploads.after(save),
            save_best=uploads.after(run.store.save_best),
            remove_later=run.store.remove_later,
            newest_saved=run.store.newest,
            health=self.health,
        )

    def build_loop(self, intake: Intake, results: Results, checkpoints: RunCheckpoints) -> TrainLoop:
        return TrainLoop(
            algorithm=self.algorithm,
            intake=intake,
            results=results,
            checkpoints=checkpoints,
            health=self.health,
            stopping=lambda: self.shutdown.requested,
            will_restart=self.invocation.linger or self.invocation.job,
        )

    def calibrate(self, record: RunRecord) -> None:
        """Begin the normalisation of observations of a new run with examples, on all ranks with those of rank 0.

        Workers are welcomed meanwhile: they build their environments, which takes longer.
        """
        settings = self.invocation.settings
        if not settings.model.normalize_observation or record.updates or settings.run.init:
            return
        self.health.tick(doing="collects example observations", within=EXAMPLES_SECONDS)
        seed = derive_seed(settings.run.seed, "environment", role="learner")
        own = torch.from_numpy(example_frames(settings.env, seed=seed))
        self.algorithm.calibrate(self.group.broadcast(own) if self.group else own)


def _open_journal(record: RunRecord, directory: RunDirectory) -> Journal:
    settings = record.settings
    run = tracked_run(settings, run_id=record.run_id, folder=directory.path)
    journal = Journal(
        directory,
        env_steps=record.env_steps,
        run=run,
        tensorboard="tensorboard" in settings.run.tracking,
        trackers=open_trackers(settings, run),
    )
    journal.settings_changed(record.settings_changed)
    if record.task_changed:
        with suppress(OSError):
            directory.summary.unlink(missing_ok=True)  # `rookery compare` would take its results for those of this environment
    return journal


if __name__ == "__main__":
    process.end_process(main())
