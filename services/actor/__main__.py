"""The actor's root: build environments, policy and loop from the learner's Welcome. The rest is in `services.worker`."""

from __future__ import annotations

from common.runtime.lifecycle import exit_on_signals

if __name__ == "__main__":
    exit_on_signals()  # before the imports, which take seconds

from dataclasses import replace

from common.algorithms.registry import build_payload, rollout_schema
from common.config.run_config import RunConfig
from common.envs.make import make
from common.observability.metrics import Exporter
from common.observability.worker_metrics import ACTOR_METRICS, ActorStats
from common.protocol.messages import ACTOR_STATE
from common.runtime import process
from common.runtime.lifecycle import BUILD_SECONDS
from common.runtime.machine import cpu_limit
from services import worker
from services.acting import policy_of
from services.actor.loop import ActorLoop
from services.actor.parts import ActorParts, begin_incarnation
from services.actor.rollout import Rollout
from services.worker import WelcomedWorker


def main(argv: list[str] | None = None) -> int:
    """Run one actor until a stop is requested or the run ends."""
    stats = ActorStats(cpu_limit=cpu_limit)
    metrics = Exporter(ACTOR_METRICS, lambda: stats)

    def build(welcomed: WelcomedWorker[RunConfig]) -> ActorLoop:
        stats.run = welcomed.run_labels
        metrics.source = lambda: replace(stats, link=welcomed.link.stats())
        return _loop(welcomed, stats)

    return worker.main("actor", argv, metrics=metrics, build=build)


def _loop(welcomed: WelcomedWorker[RunConfig], stats: ActorStats) -> ActorLoop:
    run, link = welcomed.run, welcomed.link

    def build() -> ActorParts:
        environment = make(run.env)
        size = {"length": run.rollout.length, "num_envs": environment.num_envs}
        return ActorParts(
            environment=environment,
            policy=policy_of(welcomed, environment, precision=run.acting_precision, training=True),
            rollout=Rollout(
                rollout_schema(run.algorithm, env=environment.spec, **size), environment.reset(welcomed.seed("environment"))
            ),
        )

    def restart() -> ActorParts:
        welcomed.health.tick(doing="builds its environments", within=BUILD_SECONDS)
        return begin_incarnation(build, welcomed.welcome)

    lockstep = any(spec.name == ACTOR_STATE for spec in welcomed.welcome.schema)
    parts = restart()
    env = parts.environment.spec
    stats.frame_skip = env.frame_skip
    size = {"length": run.rollout.length, "num_envs": parts.environment.num_envs}
    payload = build_payload(run.algorithm, model=run.model, env=env, **size)
    return ActorLoop(
        link=link,
        parts=parts,
        restart=restart if lockstep else None,
        message_type=payload.message_type,
        stats=stats,
        stopping=lambda: welcomed.shutdown.requested,
        alive=welcomed.health.tick,
    )


if __name__ == "__main__":
    process.end_process(main())
