"""The env worker's root: build environments and loop from the policy server's Welcome. Imports no torch."""

from __future__ import annotations

from common.runtime.lifecycle import exit_on_signals

if __name__ == "__main__":
    exit_on_signals()  # before the imports, which take time

from common.config.run_config import EnvRunConfig
from common.observability.env_metrics import ENV_WORKER_METRICS, EnvWorkerStats
from common.runtime import process
from services import worker
from services.env_worker.loop import EnvWorkerLoop
from services.worker import WelcomedWorker


def main(argv: list[str] | None = None) -> int:
    """Run one env worker until a stop is requested or the run ends."""
    return worker.main("env-worker", argv, stats=EnvWorkerStats(), metrics=ENV_WORKER_METRICS, build=_loop)


def _loop(welcomed: WelcomedWorker[EnvRunConfig], stats: EnvWorkerStats) -> EnvWorkerLoop:
    environment = welcomed.environments()
    welcomed.link.check_environment(environment.spec)
    stats.frame_skip = environment.spec.frame_skip
    return EnvWorkerLoop(
        link=welcomed.link,
        environment=environment,
        stats=stats,
        stopping=lambda: welcomed.shutdown.requested,
        alive=welcomed.health.tick,
    )


if __name__ == "__main__":
    process.end_process(main())
