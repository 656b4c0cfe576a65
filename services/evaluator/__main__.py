"""The evaluator's root: build environments, policy and loop as the learner's Welcome says; all else is every peer's."""

from __future__ import annotations

from common.runtime.shutdown import exit_on_signals

if __name__ == "__main__":
    exit_on_signals()  # before the imports, which take seconds

import os
import time

from common.envs.make import make
from common.runtime import root
from common.service import peer
from common.service.peer import Peer
from services.evaluator.loop import Evaluator
from services.evaluator.metrics import EvaluatorMetrics
from services.evaluator.settings import parse, playing
from services.evaluator.throttle import Throttle

NICENESS = 10  # training does not wait for a score, so that all others go first


def main(argv: list[str] | None = None) -> int:
    """Run one evaluator until it is told to stop or the run ends."""
    metrics = EvaluatorMetrics()
    return peer.main(
        "evaluator", argv, parse=parse, niceness=NICENESS, metrics=metrics, build=lambda welcomed: _evaluator(welcomed, metrics)
    )


def _evaluator(welcomed: Peer, metrics: EvaluatorMetrics) -> Evaluator:
    link, shutdown = welcomed.link, welcomed.shutdown
    how = playing(welcomed.invocation.loaded, welcomed.run)
    environment = make(welcomed.run.env, num_envs=how.episodes)
    evaluator = Evaluator(
        link=link,
        environment=environment,
        policy=welcomed.policy(environment, precision="fp32", training=False),
        seed=welcomed.seed("environment"),
        every_seconds=how.every_seconds,
        rest=Throttle(
            share=how.cpu_share, cores=os.cpu_count() or 1, cpu=time.process_time, clock=time.monotonic, sleep=shutdown.wait
        ),
        phases=metrics.phases,
        stopping=lambda: shutdown.requested,
        alive=welcomed.health.tick,
        clock=time.monotonic,
        observe_lag=metrics.policy_lag.observe,
    )
    metrics.on_scrape = lambda: metrics.refresh(evaluator, link, environment.spec.frame_skip)
    return evaluator


if __name__ == "__main__":
    root.end_process(main())
