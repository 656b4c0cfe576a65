"""The evaluator's root: read settings, build everything, run the loop, return an exit code."""

from __future__ import annotations

import os
import socket
import sys
import time
from contextlib import closing
from functools import partial
from importlib.metadata import version

from common.algorithms.api import Place
from common.algorithms.registry import build_policy
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
from services.evaluator.loop import Evaluator
from services.evaluator.metrics import EvaluatorMetrics
from services.evaluator.settings import parse
from services.evaluator.throttle import Throttle

GRACE_SECONDS: Seconds = 5.0
_log = logs.EventLog(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run one evaluator until it is told to stop or the run ends."""
    words = sys.argv[1:] if argv is None else argv
    return root.run(lambda: _serve(words), program="rookery evaluator", debug="--debug" in words)


def _serve(words: list[str]) -> int:
    invocation = parse(words, os.environ)
    settings = invocation.settings
    logs.configure("evaluator", level=settings.log.level, form=settings.log.format, debug=invocation.debug)
    root.yield_cpu()
    root.set_torch_threads(settings.evaluator.torch_threads)
    shutdown, health, metrics = Shutdown(), Health(), EvaluatorMetrics()
    pages = [metrics.render]  # replaced once there is a loop to ask
    with (
        closing(ZmqPeer(settings.evaluator.learner)) as transport,  # a socket left open would hold up the exit
        on_signals(shutdown, grace=GRACE_SECONDS),
        HttpServer(host=settings.metrics.host, port=settings.metrics.port, metrics=lambda: pages[-1](), health=health) as http,
    ):
        _log.info("evaluator_started", learner=settings.evaluator.learner, metrics=http.url)
        link = _link(settings, transport)
        while link.welcome is None:
            link.service(0.1)
            health.tick(doing="waits for the learner")
            if shutdown.requested or link.drain:
                link.close(shutdown.reason)
                return 0
        evaluator, frame_skip = _evaluator(settings, link, metrics, health, shutdown)

        def page() -> bytes:
            metrics.refresh(evaluator, link, frame_skip)
            return metrics.render()

        pages.append(page)
        health.ready()
        reason = evaluator.run()
        link.close(reason)
        _log.info("evaluator_ended", reason=reason, evaluations=evaluator.counts.evaluations)
    return 0


def _link(settings: Settings, transport: ZmqPeer) -> Link:
    name = settings.evaluator.name or f"evaluator-{socket.gethostname()}-{os.getpid()}"
    identity = Identity(role="evaluator", name=name, incarnation=time.time_ns(), software=version("rookery"))
    return Link(transport=transport, session=ActorSide(identity), clock=time.monotonic, note=_note)


def _evaluator(
    settings: Settings, link: Link, metrics: EvaluatorMetrics, health: Health, shutdown: Shutdown
) -> tuple[Evaluator, int]:
    """Build environments and policy as the Welcome says."""
    welcome = link.welcome
    assert welcome is not None
    run = RunConfig.from_json(welcome.config)
    environment = make(run.env, num_envs=settings.evaluator.episodes)
    link.check_environment(environment.spec)
    seed = partial(derive, run.seed, role="evaluator", index=welcome.index, generation=welcome.generation)
    policy = build_policy(
        run.algorithm,
        model=run.model,
        env=environment.spec,
        precision="fp32",
        seed=seed(purpose="policy"),
        place=Place(index=welcome.index, peers=1, num_envs=environment.num_envs, training=False),
    )
    link.layout = policy.layout
    evaluator = Evaluator(
        link=link,
        environment=environment,
        policy=policy,
        seed=seed(purpose="environment"),
        every_seconds=settings.evaluator.every_seconds,
        rest=Throttle(
            share=settings.evaluator.cpu_share,
            cores=os.cpu_count() or 1,
            cpu=time.process_time,
            clock=time.monotonic,
            sleep=shutdown.wait,
        ),
        phases=metrics.phases,
        stopping=lambda: shutdown.requested,
        alive=health.tick,
        clock=time.monotonic,
        observe_lag=metrics.policy_lag.observe,
    )
    return evaluator, environment.spec.frame_skip


def _note(note: Note) -> None:
    (_log.warning if note.warning else _log.info)(note.event, **note.fields)


if __name__ == "__main__":
    sys.exit(main())
