"""The evaluator's root: build environments, policy and loop from the learner's Welcome. The rest is in `services.worker`."""

from __future__ import annotations

from common.runtime.lifecycle import exit_on_signals

if __name__ == "__main__":
    exit_on_signals()  # before the imports, which take seconds

import time

from common.config.layers import DEFAULT
from common.config.load import LoadedSettings
from common.config.run_config import RunConfig
from common.config.schema import EvaluationSettings
from common.observability.worker_metrics import EVALUATOR_METRICS, EvaluatorStats
from common.runtime import process
from common.runtime.machine import cores
from services import worker
from services.acting.policy import policy_of
from services.evaluator.loop import EvaluatorLoop, Throttle
from services.worker import WelcomedWorker


def main(argv: list[str] | None = None) -> int:
    """Run one evaluator until a stop is requested or the run ends."""
    return worker.main("evaluator", argv, stats=EvaluatorStats(), metrics=EVALUATOR_METRICS, build=_loop)


def _loop(welcomed: WelcomedWorker[RunConfig], stats: EvaluatorStats) -> EvaluatorLoop:
    link, shutdown = welcomed.link, welcomed.shutdown
    settings = evaluation_settings(welcomed.invocation.loaded, welcomed.run)
    environment = welcomed.environments(num_envs=settings.episodes)
    stats.frame_skip = environment.spec.frame_skip
    return EvaluatorLoop(
        link=link,
        environment=environment,
        policy=policy_of(welcomed, environment.spec, num_envs=environment.num_envs, precision="fp32", training=False),
        seed=welcomed.seed("environment"),
        every_seconds=settings.every_seconds,
        rest=Throttle(share=settings.cpu_share, cores=cores(), cpu=time.process_time, clock=time.monotonic, sleep=shutdown.wait),
        stats=stats,
        stopping=lambda: shutdown.requested,
        alive=welcomed.health.tick,
        clock=time.monotonic,
    )


def evaluation_settings(own: LoadedSettings, run: RunConfig) -> EvaluationSettings:
    """Return the run's evaluation settings, overridden by those that were set for this process."""
    overridden = {
        name: getattr(own.settings.evaluator, name)
        for name in EvaluationSettings.model_fields
        if own.provenance[f"evaluator.{name}"] != DEFAULT
    }
    return run.evaluation.model_copy(update=overridden)


if __name__ == "__main__":
    process.end_process(main())
