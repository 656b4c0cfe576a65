"""The actor's root: build environments, policy and loop from the learner's Welcome. The rest is in `services.worker`."""

from __future__ import annotations

from common.runtime.lifecycle import begin_process

if __name__ == "__main__":
    begin_process()

from common.config.run_config import RunConfig
from common.observability.worker_metrics import ACTOR_METRICS, ActorStats
from common.protocol.messages import ACTOR_STATE
from common.runtime import process
from common.runtime.machine import cpu_limit
from services import worker
from services.acting.incarnation import Incarnation, begin_incarnation, build_incarnation, message_type_of
from services.acting.loop import ActorLoop
from services.acting.policy import policy_of
from services.worker import WelcomedWorker


def main(argv: list[str] | None = None) -> int:
    """Run one actor until a stop is requested or the run ends."""
    return worker.main("actor", argv, stats=ActorStats(cpu_limit=cpu_limit), metrics=ACTOR_METRICS, build=_loop)


def _loop(welcomed: WelcomedWorker[RunConfig], stats: ActorStats) -> ActorLoop:
    def build() -> Incarnation:
        environment = welcomed.environments()
        policy = policy_of(welcomed, environment.spec, num_envs=environment.num_envs, training=True)
        return build_incarnation(welcomed, environment, policy)

    def restart() -> Incarnation:
        with process.build_limit():
            return begin_incarnation(build, welcomed.welcome)

    lockstep = any(spec.name == ACTOR_STATE for spec in welcomed.welcome.schema)
    incarnation = begin_incarnation(build, welcomed.welcome)  # the caller limits the time
    stats.frame_skip = incarnation.environment.spec.frame_skip
    return ActorLoop(
        link=welcomed.link,
        incarnation=incarnation,
        restart=restart if lockstep else None,
        message_type=message_type_of(welcomed.run, incarnation.environment),
        stats=stats,
        stopping=lambda: welcomed.shutdown.requested,
        alive=welcomed.health.tick,
    )


if __name__ == "__main__":
    process.end_process(main())
