"""The learner's root: read settings, build everything, run the loop, return an exit code."""

from __future__ import annotations

from common.runtime.shutdown import exit_on_signals

if __name__ == "__main__":
    exit_on_signals()  # before the imports, which take seconds

import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common.envs.make import example_frames, spec_of
from common.runtime import checkpoints, logs, root
from common.runtime.health import Health
from common.runtime.http import HttpServer
from common.runtime.run_directory import held
from common.runtime.seeds import derive
from common.runtime.segments import SegmentFiles
from common.runtime.shutdown import Shutdown, on_signals
from common.runtime.tree import Settings
from common.transport.curve import LearnerKeys
from common.transport.zmq import ZmqLearner
from common.units import Seconds
from services.learner.accounts import AccountsFile
from services.learner.begin import build, identified, open_directory, open_state, write_config
from services.learner.intake import Intake
from services.learner.journal import Journal
from services.learner.loop import Learner
from services.learner.metrics import LearnerMetrics
from services.learner.partner import partnered
from services.learner.settings import parse

LOOK_SECONDS: Seconds = 300.0  # for example frames: a simulator may take its time

_log = logs.EventLog(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run the learner until the run ends or it is told to stop."""
    words = sys.argv[1:] if argv is None else argv
    return root.run(lambda: _serve(words), program="rookery learner", debug="--debug" in words)


def _serve(words: list[str]) -> int:
    invocation = identified(parse(words, os.environ))
    settings = invocation.settings
    logs.configure("learner", level=settings.log.level, form=settings.log.format, debug=invocation.debug)
    root.set_torch_threads(settings.learner.torch_threads)
    root.allow_descriptors()
    keys = LearnerKeys.of(settings.learner.keys)
    env = spec_of(settings.env)
    seed = partial(derive, settings.run.seed, role="learner")
    algorithm = build(settings, env, seed=seed("model"))
    shutdown, health, metrics = Shutdown(), Health(), LearnerMetrics()
    status: list[Callable[[], Any]] = [lambda: {"phase": "starting"}]  # replaced once there is a record to ask
    # Both ports are taken before anything is written: a port in use must leave no trace.
    with (
        closing(ZmqLearner(settings.learner.bind, keys=keys)) as transport,  # a socket left open would hold up the exit
        on_signals(shutdown),
        HttpServer(
            host=settings.metrics.host,
            port=settings.metrics.port,
            metrics=metrics.render,
            health=health,
            json_routes={"/status": lambda: status[-1]()},
        ) as http,
        ExitStack() as until_the_end,
    ):
        directory = open_directory(invocation, words)
        until_the_end.enter_context(held(directory, inherited=invocation.run_lock))
        segment_files = SegmentFiles(directory.checkpoints)
        record, session = open_state(invocation, directory, algorithm=algorithm, env=env, segment_files=segment_files)
        write_config(invocation, directory)
        intake = Intake(transport=transport, session=session, clock=time.monotonic, note=_log.note)
        metrics.on_scrape = lambda: metrics.refresh(intake.figures)
        status.append(lambda: record.status(intake.figures, time.monotonic()))
        records = Journal(directory, env_steps=record.env_steps, on_loss=_records_lost, on_recovery=_records_resumed)
        with closing(records) as journal, closing(intake):
            learner = Learner(
                settings=settings,
                algorithm=algorithm,
                intake=intake,
                record=record,
                journal=journal,
                save=partial(checkpoints.save, directory.checkpoints, keep=settings.checkpoint.keep, segment_files=segment_files),
                accounts=AccountsFile(
                    directory.accounts,
                    run_id=record.run_id,
                    state=intake.accounts,
                    clock=time.monotonic,
                    on_loss=_accounts_lost,
                ),
                metrics=metrics,
                health=health,
                stopping=lambda: shutdown.requested,
                comes_back=invocation.linger,
                clock=time.monotonic,
                note=_log.info,
            )
            until_the_end.enter_context(partnered(algorithm))
            intake.start()
            if settings.model.normalize_observation and record.updates == 0:
                # Peers are welcomed from here on: they build their environments, which takes longer, while we look at ours.
                health.tick(doing="looks at its environment", within=LOOK_SECONDS)
                algorithm.calibrate(torch.from_numpy(example_frames(settings.env, seed=seed("environment"))))
            health.ready()
            _tell_start(settings, run=record.run_id, endpoint=transport.endpoint, metrics=http.url, run_dir=directory.path)
            reason = learner.run()
            _log.info(
                "learner_ended", reason=reason, env_steps=record.env_steps, mean100=record.mean_return, solved=record.solved
            )
            if invocation.linger:
                root.linger(shutdown, health, look=intake.check)
    return 0


def _tell_start(settings: Settings, *, run: str, endpoint: str, metrics: str, run_dir: Path) -> None:
    keys = settings.learner.keys
    if settings.learner.insecure and not keys:
        _log.warning("insecure", endpoint=endpoint, consequence="whoever reaches it may connect, and read along")
    _log.info("learner_started", run=run, endpoint=endpoint, metrics=metrics, run_dir=run_dir, keys=keys or "none")


def _accounts_lost(error: Exception) -> None:
    _log.warning(
        "accounts_lost", error=error, consequence="if it is killed, what it trained on since its checkpoint is not counted"
    )


def _records_lost(error: OSError) -> None:
    _log.warning("records_lost", error=error, consequence="the run goes on; its curve and events have holes")


def _records_resumed() -> None:
    _log.info("records_resumed")


if __name__ == "__main__":
    root.end_process(main())
