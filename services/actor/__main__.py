"""The actor's root: read settings, build everything, run the loop, return an exit code."""

from __future__ import annotations

import os
import socket
import sys
import time
from contextlib import closing
from functools import partial
from importlib.metadata import version

from common.algorithms.api import Place
from common.algorithms.registry import build_policy, rollout_schema, shipment
from common.envs.make import make
from common.runtime import logs, root
from common.runtime.health import Health
from common.runtime.http import HttpServer
from common.runtime.seeds import derive
from common.runtime.shutdown import Shutdown, on_signals
from common.runtime.tree import RunConfig, Settings
from common.session.actor_side import ActorSide, Identity
from common.session.events import Note
from common.transport.link import Link
from common.transport.zmq import ZmqPeer
from common.units import Seconds
from services.actor.loop import Actor
from services.actor.metrics import ActorMetrics
from services.actor.rollout import Rollout
from services.actor.settings import parse

GRACE_SECONDS: Seconds = 5.0
NICENESS = 5  # where they share a machine the learner goes first: it is one process, and all wait for its next policy
_log = logs.EventLog(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run one actor until it is told to stop or the run ends."""
    words = sys.argv[1:] if argv is None else argv
    return root.run(lambda: _serve(words), program="rookery actor", debug="--debug" in words)


def _serve(words: list[str]) -> int:
    invocation = parse(words, os.environ)
    settings = invocation.settings
    logs.configure("actor", level=settings.log.level, form=settings.log.format, debug=invocation.debug)
    root.yield_cpu(NICENESS)
    root.set_torch_threads(settings.actor.torch_threads)
    shutdown, health, metrics = Shutdown(), Health(), ActorMetrics()
    pages = [metrics.render]  # replaced once there is a loop to ask
    with (
        closing(ZmqPeer(settings.actor.learner)) as transport,  # a socket left open would hold up the exit
        on_signals(shutdown, grace=GRACE_SECONDS),
        HttpServer(host=settings.metrics.host, port=settings.metrics.port, metrics=lambda: pages[-1](), health=health) as http,
    ):
        _log.info("actor_started", learner=settings.actor.learner, metrics=http.url)
        link = _link(settings, transport)
        while link.welcome is None:
            link.service(0.1)
            health.tick(doing="waits for the learner")
            if shutdown.requested or link.drain:
                link.close(shutdown.reason)
                return 0
        actor, frame_skip = _actor(link, metrics, health, shutdown)

        def page() -> bytes:
            metrics.refresh(actor, link, frame_skip)
            return metrics.render()

        pages.append(page)
        health.ready()
        reason = actor.run()
        link.count(actor.env_steps, actor.dropped)
        link.close(reason)
        _log.info("actor_ended", reason=reason, env_steps=actor.env_steps)
    return 0


def _link(settings: Settings, transport: ZmqPeer) -> Link:
    name = settings.actor.name or f"{socket.gethostname()}-{os.getpid()}"
    identity = Identity(role="actor", name=name, incarnation=time.time_ns(), software=version("rookery"))
    return Link(transport=transport, session=ActorSide(identity), clock=time.monotonic, note=_note)


def _actor(link: Link, metrics: ActorMetrics, health: Health, shutdown: Shutdown) -> tuple[Actor, int]:
    """Build environment and policy as the Welcome says."""
    welcome = link.welcome
    assert welcome is not None
    run = RunConfig.from_json(welcome.config)
    environment = make(run.env)
    link.check_environment(environment.spec)
    seed = partial(derive, run.seed, role="actor", index=welcome.index, generation=welcome.generation)
    size = {"length": run.rollout.length, "num_envs": run.env.num_envs}
    policy = build_policy(
        run.algorithm,
        model=run.model,
        env=environment.spec,
        precision=run.acting_precision,
        seed=seed(purpose="policy"),
        place=Place(index=welcome.index, peers=run.actors, num_envs=run.env.num_envs),
    )
    schema = rollout_schema(run.algorithm, env=environment.spec, **size)
    link.layout = policy.layout
    actor = Actor(
        link=link,
        environment=environment,
        policy=policy,
        rollout=Rollout(schema, environment.reset(seed(purpose="environment"))),
        ships=shipment(run.algorithm, model=run.model, env=environment.spec, **size).message,
        phases=metrics.phases,
        stopping=lambda: shutdown.requested,
        alive=health.tick,
        observe_lag=metrics.policy_lag.observe,
    )
    return actor, environment.spec.frame_skip


def _note(note: Note) -> None:
    (_log.warning if note.warning else _log.info)(note.event, **note.fields)


if __name__ == "__main__":
    sys.exit(main())
