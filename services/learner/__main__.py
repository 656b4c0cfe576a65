"""The learner's root: read the settings, build every part in order, run the train loop, return an exit code."""

from __future__ import annotations

from common.runtime.lifecycle import exit_on_signals

if __name__ == "__main__":
    exit_on_signals()  # before the imports, which take seconds

import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from common.algorithms.api import Algorithm
from common.algorithms.ranks import ALONE
from common.config.schema import Settings
from common.envs.make import example_frames, spec_of
from common.envs.spec import EnvSpec
from common.observability import logs
from common.observability.http import HttpServer
from common.observability.learner_metrics import METRICS, LearnerStats
from common.observability.metrics import Exporter, run_labels
from common.runtime import process
from common.runtime.checkpoints import CheckpointStore
from common.runtime.lifecycle import Health, Shutdown, on_signals
from common.runtime.machine import cpu_limit
from common.runtime.process import derive_seed
from common.runtime.ranks import ProcessGroup
from common.runtime.run_directory import RunDirectory, held
from common.runtime.store import check_new
from common.tracking.remote import check_tracking
from common.transport.curve import LearnerKeys
from common.transport.zmq import ZmqLearner
from common.units import Seconds
from services.build_limit import build_limit
from services.learner.accounts import AccountsFile
from services.learner.agreement import Agreement
from services.learner.intake import Intake
from services.learner.journal import Journal, open_trackers, tracked_run
from services.learner.loop import TrainLoop
from services.learner.ranks import join_ranks, open_rank_directory
from services.learner.record import RunRecord
from services.learner.startup import (
    STOPPED_JOB,
    Invocation,
    build_run_algorithm,
    existing_run,
    open_directory,
    open_state,
    parse,
    with_run_id,
    write_config,
)
from services.learner.uploads import END_SECONDS, STOP_SECONDS, open_uploads

EXAMPLES_SECONDS: Seconds = 300.0  # for example frames: a simulator may take its time

_log = logs.EventLog(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run the learner until the run ends or a stop is requested; return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    return process.run(lambda: _serve(argv), program="rookery learner", debug="--debug" in argv)


def _serve(argv: list[str]) -> int:
    invocation = parse(argv, os.environ)
    settings = invocation.settings
    if settings.learner.ranks == 1:
        return _train(with_run_id(invocation), argv)
    logs.configure("learner", level=settings.log.level, form=settings.log.format, debug=invocation.debug)
    process.set_torch_threads(settings.learner.torch_threads)  # before the first operation of torch
    with join_ranks(invocation, os.environ) as joined:
        return _train(joined.invocation, argv, group=joined.group, local_rank=joined.local_rank)


def _train(invocation: Invocation, argv: list[str], *, group: ProcessGroup | None = None, local_rank: int = 0) -> int:
    """Run the learner, or one of its ranks."""
    settings, rank = invocation.settings, group.index if group else 0
    logs.configure("learner", level=settings.log.level, form=settings.log.format, debug=invocation.debug, run_id=settings.run.id)
    process.set_torch_threads(settings.learner.torch_threads)
    process.allow_descriptors()
    check_tracking(settings.run.tracking, os.environ)
    keys = LearnerKeys.of(settings.learner.keys)
    env = _describe_environment(settings)
    seed = partial(derive_seed, settings.run.seed, role="learner")
    algorithm = build_run_algorithm(settings, env, seed=seed("model"), ranks=group or ALONE, local_rank=local_rank)
    shutdown, health, stats = Shutdown(), Health(), LearnerStats(cpu_limit=cpu_limit)
    metrics = Exporter(METRICS, lambda: stats)
    status: Callable[[], Any] = partial(dict, phase="starting")  # replaced once there is a record
    with ExitStack() as resources:
        resources.enter_context(on_signals(shutdown))
        existing = resources.enter_context(existing_run(invocation, argv)) if rank == 0 else None
        http = resources.enter_context(
            HttpServer(
                host=settings.metrics.host,
                port=settings.metrics.port,
                metrics=metrics.render,
                health=health,
                json_routes={"/status": lambda: status()},
            )
        )

        def bind() -> ZmqLearner:
            return resources.enter_context(closing(ZmqLearner(settings.learner.bind, keys=keys)))

        # A new run binds before it writes anything: a port in use must leave no trace. An existing run, whose other ranks know
        # it by `resume`, loads its checkpoint first, which may take minutes, because nothing guards the memory of a bound socket
        # before the intake thread runs.
        if existing is None:
            check_new(settings.run.store, invocation.run_dir)
        transport = None if existing or (rank and invocation.resume) else bind()
        directory = _open_directory(invocation, argv, existing, group)
        if existing is None:
            resources.enter_context(held(directory, inherited=invocation.run_lock if rank == 0 else None))
        # A rank that writes before rank 0 keeps the one before, from which all continue where rank 0 does not get to it.
        checkpoints = CheckpointStore(directory.checkpoints, keep=settings.checkpoint.keep + (rank > 0))
        record, session = open_state(invocation, directory, algorithm=algorithm, env=env, store=checkpoints, group=group)
        stats.run = _name_run(settings, record.run_id)
        transport = transport or bind()
        write_config(invocation, directory)
        uploads = resources.enter_context(closing(open_uploads(settings, directory)))
        journal = resources.enter_context(closing(_open_journal(record, directory)))
        accounts = AccountsFile(directory.accounts, run_id=record.run_id, clock=time.monotonic, on_loss=_accounts_lost)
        intake = Intake(transport=transport, session=session, clock=time.monotonic, note=_log.note, accounts=accounts)
        resources.enter_context(closing(intake))
        metrics.source = lambda: replace(
            stats, intake=intake.stats, uploads=uploads.stats, tracking_points_dropped=journal.points_dropped
        )
        status = partial(_status, record, intake)
        loop = TrainLoop(
            algorithm=algorithm,
            intake=intake,
            record=record,
            journal=journal,
            save=uploads.after(checkpoints.save),
            save_best=uploads.after(checkpoints.save_best),
            stats=stats,
            health=health,
            stopping=lambda: shutdown.requested,
            will_restart=invocation.linger or invocation.job,
            agreement=Agreement(group) if group else None,
            clock=time.monotonic,
        )
        intake.start()
        if settings.model.normalize_observation and record.updates == 0 and not settings.run.init:
            # Workers are welcomed from here on: they build their environments, which takes longer, meanwhile.
            health.tick(doing="plays for example frames", within=EXAMPLES_SECONDS)
            _calibrate(algorithm, example_frames(settings.env, seed=seed("environment")), group)
        health.ready()
        _warn_if_insecure(settings, transport.endpoint)
        _log.info(
            "learner_started",
            run=record.run_id,
            endpoint=transport.endpoint,
            metrics=http.url,
            run_dir=directory.path,
            keys=settings.learner.keys or "none",
        )
        reason = loop.run()
        journal.close()
        uploads.close(STOP_SECONDS if reason == "stopped" else END_SECONDS)
        _log.info("learner_ended", reason=reason, env_steps=record.env_steps, mean100=record.mean_return, solved=record.solved)
        if invocation.linger and (shutdown.requested or reason != "stopped"):  # else another rank stops, and needs a new process
            process.linger(shutdown, health, check=intake.check)
    return STOPPED_JOB if invocation.job and reason == "stopped" else 0


def _open_directory(
    invocation: Invocation, argv: list[str], existing: RunDirectory | None, group: ProcessGroup | None
) -> RunDirectory:
    """Return the run directory, or the folder of this rank in it. Raises `ConfigError` or `ResourceError`."""
    if group is None:
        return existing or open_directory(invocation, argv)
    return open_rank_directory(group, None if group.index else existing or open_directory(invocation, argv))


def _calibrate(algorithm: Algorithm, frames: np.ndarray, group: ProcessGroup | None) -> None:
    """Begin the normalisation of observations with example frames, on all ranks with those of rank 0."""
    own = torch.from_numpy(frames)
    algorithm.calibrate(group.gather(own)[0] if group else own)


def _describe_environment(settings: Settings) -> EnvSpec:
    with build_limit():
        return spec_of(settings.env)


def _name_run(settings: Settings, run_id: str) -> tuple[str, ...]:
    """Add the id of the run, which may be that of a checkpoint, to the log; return the labels of the run for the metrics."""
    logs.belong_to(run_id)
    env, algorithm = settings.env.entry_point or settings.env.id, settings.algorithm.name
    return run_labels(run_id=run_id, env=env, algorithm=algorithm, seed=settings.run.seed)


def _open_journal(record: RunRecord, directory: RunDirectory) -> Journal:
    """Return the journal of the run, with its trackers started."""
    settings = record.settings
    run = tracked_run(settings, run_id=record.run_id, folder=directory.path)
    return Journal(
        directory,
        env_steps=record.env_steps,
        on_loss=_records_lost,
        on_recovery=_records_resumed,
        run=run,
        tensorboard="tensorboard" in settings.run.tracking,
        trackers=open_trackers(settings, run),
    )


def _status(record: RunRecord, intake: Intake) -> dict[str, Any]:
    return record.status(intake.stats, time.monotonic())


def _warn_if_insecure(settings: Settings, endpoint: str) -> None:
    if settings.learner.insecure and not settings.learner.keys:
        _log.warning("insecure", endpoint=endpoint, consequence="any process that reaches it may connect, and read along")


def _accounts_lost(error: Exception) -> None:
    _log.warning(
        "accounts_lost", error=error, consequence="if it is killed, what it trained on since its checkpoint is not counted"
    )


def _records_lost(error: OSError) -> None:
    _log.warning("records_lost", error=error, consequence="the run goes on; its curve and events have holes")


def _records_resumed() -> None:
    _log.info("records_resumed")


if __name__ == "__main__":
    process.end_process(main())
