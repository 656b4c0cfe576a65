"""The actor's root: build environment, policy and loop as the learner's Welcome says; all else is every peer's."""

from __future__ import annotations

from common.runtime.shutdown import exit_on_signals

if __name__ == "__main__":
    exit_on_signals()  # before the imports, which take seconds

from common.algorithms.registry import rollout_schema, shipment
from common.envs.make import make
from common.runtime import root
from common.service import peer
from common.service.peer import BUILD_SECONDS, Peer
from common.wire.messages import ACTOR_STATE
from services.actor.loop import Actor
from services.actor.metrics import ActorMetrics
from services.actor.rollout import Rollout
from services.actor.settings import parse
from services.actor.setup import Setup, begin

NICENESS = 5  # where they share a machine the learner goes first: it is one process, and all wait for its next policy


def main(argv: list[str] | None = None) -> int:
    """Run one actor until it is told to stop or the run ends."""
    metrics = ActorMetrics()
    return peer.main(
        "actor", argv, parse=parse, niceness=NICENESS, metrics=metrics, build=lambda welcomed: _actor(welcomed, metrics)
    )


def _actor(welcomed: Peer, metrics: ActorMetrics) -> Actor:
    run, link = welcomed.run, welcomed.link

    def build() -> Setup:
        environment = make(run.env)
        size = {"length": run.rollout.length, "num_envs": environment.num_envs}
        return Setup(
            environment=environment,
            policy=welcomed.policy(environment, precision=run.acting_precision, training=True),
            rollout=Rollout(
                rollout_schema(run.algorithm, env=environment.spec, **size), environment.reset(welcomed.seed("environment"))
            ),
        )

    def restart() -> Setup:
        welcomed.health.tick(doing="builds its environments", within=BUILD_SECONDS)
        return begin(build, welcomed.welcome)

    lockstep = any(spec.name == ACTOR_STATE for spec in welcomed.welcome.schema)
    setup = restart()
    env = setup.environment.spec
    ships = shipment(run.algorithm, model=run.model, env=env, length=run.rollout.length, num_envs=setup.environment.num_envs)
    actor = Actor(
        link=link,
        setup=setup,
        restart=restart if lockstep else None,
        ships=ships.message,
        phases=metrics.phases,
        stopping=lambda: welcomed.shutdown.requested,
        alive=welcomed.health.tick,
        observe_lag=metrics.policy_lag.observe,
    )
    metrics.on_scrape = lambda: metrics.refresh(actor, link, env.frame_skip)
    return actor


if __name__ == "__main__":
    root.end_process(main())
