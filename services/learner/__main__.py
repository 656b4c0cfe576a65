"""The learner's root: read settings, build everything, run the loop, return an exit code."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch

from common.algorithms.api import Algorithm
from common.algorithms.registry import build_algorithm, shipment
from common.algorithms.shipment import Shipment
from common.envs.make import example_frames, spec_of
from common.envs.spec import EnvSpec
from common.errors import ConfigError
from common.models.snapshot import Layout
from common.runtime import checkpoints, config, logs, root, run_directory
from common.runtime.health import Health
from common.runtime.http import HttpServer
from common.runtime.run_directory import RunDirectory
from common.runtime.seeds import derive
from common.runtime.shutdown import Shutdown, on_signals
from common.runtime.tree import RunConfig, Settings
from common.session.events import Note
from common.session.learner_side import LearnerSide
from common.session.roster import Terms
from common.transport.zmq import ZmqLearner
from common.units import Seconds
from services.learner.intake import Intake
from services.learner.journal import Journal
from services.learner.loop import Learner
from services.learner.metrics import LearnerMetrics
from services.learner.record import RunRecord
from services.learner.settings import Invocation, parse

GRACE_SECONDS: Seconds = 15.0
_log = logs.EventLog(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run the learner until the run ends or it is told to stop."""
    words = sys.argv[1:] if argv is None else argv
    return root.run(lambda: _serve(words), program="rookery learner", debug="--debug" in words)


def _serve(words: list[str]) -> int:
    invocation = _identified(parse(words, os.environ))
    settings = invocation.settings
    logs.configure("learner", level=settings.log.level, form=settings.log.format, debug=invocation.debug)
    root.set_torch_threads(settings.learner.torch_threads)
    env = spec_of(settings.env)
    seed = partial(derive, settings.run.seed, role="learner")
    algorithm = build_algorithm(settings.algorithm, model=settings.model, env=env, seed=seed(purpose="model"))
    shutdown, health, metrics = Shutdown(), Health(), LearnerMetrics()
    # Both ports are taken before anything is written: a port in use must leave no trace. Until then there is little to show.
    pages: dict[str, Callable[[], Any]] = {"/metrics": metrics.render, "/status": lambda: {"phase": "starting"}}
    with (
        closing(ZmqLearner(settings.learner.bind)) as transport,  # a socket left open would hold up the exit
        on_signals(shutdown, grace=GRACE_SECONDS),
        HttpServer(
            host=settings.metrics.host,
            port=settings.metrics.port,
            metrics=lambda: pages["/metrics"](),
            health=health,
            json_routes={"/status": lambda: pages["/status"]()},
        ) as http,
    ):
        directory = _directory(invocation, words)
        record, session = _state(invocation, directory, algorithm, env)
        intake = Intake(transport=transport, session=session, clock=time.monotonic, note=_note)

        def page() -> bytes:
            metrics.refresh(intake.figures)
            return metrics.render()

        pages |= {"/metrics": page, "/status": lambda: record.status(intake.figures, time.monotonic())}
        with closing(Journal(directory, on_loss=_record_lost)) as journal, closing(intake):
            learner = Learner(
                settings=settings,
                algorithm=algorithm,
                intake=intake,
                record=record,
                journal=journal,
                save=partial(checkpoints.save, directory.checkpoints, keep=settings.checkpoint.keep),
                metrics=metrics,
                health=health,
                stopping=lambda: shutdown.requested,
                clock=time.monotonic,
                note=_log.info,
            )
            intake.start()
            if settings.model.normalize_observation and record.updates == 0:
                # Peers are welcomed from here on: they build their environments, which takes longer, while we look at ours.
                frames = example_frames(settings.env, seed=seed(purpose="environment"))
                algorithm.calibrate(torch.from_numpy(frames))
            health.ready()
            _log.info("learner_started", run=record.run_id, endpoint=transport.endpoint, metrics=http.url, run_dir=directory.path)
            reason = learner.run()
    _log.info("learner_ended", reason=reason, env_steps=record.env_steps, mean100=record.mean_return, solved=record.solved)
    return 0


def _identified(invocation: Invocation) -> Invocation:
    """Give a new run its id before anything is written, so that its own config.yaml tells it to a resumed learner."""
    settings = invocation.settings
    if settings.run.id:
        return invocation
    run_id = f"{settings.run.preset or 'run'}-{secrets.token_hex(4)}"
    named = settings.model_copy(update={"run": settings.run.model_copy(update={"id": run_id})})
    return replace(invocation, settings=named)


def _state(invocation: Invocation, directory: RunDirectory, algorithm: Algorithm, env: EnvSpec) -> tuple[RunRecord, LearnerSide]:
    """The run's record and session: new, or as the newest good checkpoint left them, and the algorithm with them."""
    settings, checkpoint = invocation.settings, None
    if invocation.resume:
        warn = partial(_log.warning, "checkpoint_skipped")
        architecture = Layout.of(algorithm.model).fingerprint
        checkpoint = checkpoints.load_newest(
            directory.checkpoints, architecture=architecture, warn=lambda detail: warn(detail=detail)
        )
    run_id = checkpoint.run_id if checkpoint else settings.run.id  # peers that outlived the learner know this one
    record = RunRecord(
        settings=settings, run_id=run_id, frame_skip=env.frame_skip, started_at=_run_began(directory, resumed=invocation.resume)
    )
    ships = shipment(
        settings.algorithm, model=settings.model, env=env, length=settings.rollout.length, num_envs=settings.env.num_envs
    )
    session = LearnerSide(_terms(settings, env, ships, run_id), check=ships.check)
    if checkpoint:
        algorithm.load_state_dict(checkpoint.state)
        record.load_state_dict(checkpoint.counters["record"], time.monotonic())
        session.load_state_dict(checkpoint.counters["session"])
        _log.info("resumed", version=record.version, env_steps=record.env_steps)
    return record, session


def _directory(invocation: Invocation, words: list[str]) -> RunDirectory:
    """The run directory: made by who starts us, or found again, or new."""
    settings, path = invocation.settings, invocation.run_dir
    if path is None and invocation.resume:
        raise ConfigError("no run to resume", found="--resume alone", wanted="the run's directory", fix="set --run-dir to it")
    if path is not None and (
        invocation.resume or (RunDirectory(path).config.is_file() and not RunDirectory(path).learning_curve_csv.exists())
    ):
        return run_directory.reopen(path)
    if path is None:
        path = run_directory.default_path(preset=settings.run.preset, seed=settings.run.seed, now=datetime.now(UTC).astimezone())
    return run_directory.create(path, config=config.as_yaml(settings), command=["rookery", "learner", *words])


def _run_began(directory: RunDirectory, *, resumed: bool) -> Seconds:
    """When the run directory was made, on the monotonic clock: starting up is part of the run's time, lying idle is not."""
    if resumed:
        return time.monotonic()
    age = time.time() - directory.command.stat().st_mtime
    return time.monotonic() - max(0.0, age)


def _terms(settings: Settings, env: EnvSpec, ships: Shipment, run_id: str) -> Terms:
    return Terms(
        run=run_id,
        config=RunConfig.of(settings, run_id=run_id).to_json(),
        env_signature=env.signature,
        schema=ships.schema,
        credits=settings.learner.credits,
        batch=settings.learner.batch,
        max_actors=settings.learner.max_actors,
    )


def _record_lost(error: OSError) -> None:
    _log.warning("records_lost", error=error, consequence="the run goes on; its curve and events have holes")


def _note(note: Note) -> None:
    (_log.warning if note.warning else _log.info)(note.event, **note.fields)


if __name__ == "__main__":
    sys.exit(main())
