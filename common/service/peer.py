"""The root of a peer of the learner, as far as all peers are alike: from the command line to the exit code.

Actor and evaluator differ in what they play, with which settings, and what they count. How they read their command line, find the
learner, build the policy that its Welcome describes, answer signals and HTTP, and leave, is here and nowhere else.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from typing import Protocol

from common.algorithms.api import Place, Policy
from common.algorithms.registry import build_policy
from common.envs.make import VectorEnvironment
from common.models import arithmetic
from common.models.spec import Precision
from common.runtime import arguments, logs, root
from common.runtime.arguments import Invocation
from common.runtime.health import Health
from common.runtime.http import HttpServer
from common.runtime.metrics import ServiceMetrics
from common.runtime.seeds import Purpose, derive
from common.runtime.shutdown import Shutdown, on_signals
from common.runtime.tree import PeerSettings, RunConfig
from common.service.allowed_code import read_run
from common.session.actor_side import ActorSide, Identity
from common.transport.curve import PeerKeys
from common.transport.link import Link
from common.transport.zmq import ZmqPeer
from common.units import Seconds
from common.wire.messages import Welcome

WAIT_SECONDS: Seconds = 0.1
TELL_SECONDS: Seconds = 10.0  # between two lines of who waits for a learner
BUILD_SECONDS: Seconds = 300.0  # for the environments and the policy: a simulator may take its time
_log = logs.EventLog(__name__)


class Loop(Protocol):
    """What a peer does once it is welcomed."""

    def run(self) -> str:
        """Do it until there is a reason to stop, and return the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A peer that was welcomed: what its loop is built from."""

    invocation: Invocation
    role: str
    link: Link
    run: RunConfig
    shutdown: Shutdown
    health: Health

    @property
    def welcome(self) -> Welcome:
        """Return the newest Welcome."""
        assert self.link.welcome is not None
        return self.link.welcome

    def seed(self, purpose: Purpose) -> int:
        """Return the seed of one of the random streams of the place that the newest Welcome gives."""
        return derive(self.run.seed, purpose, role=self.role, index=self.welcome.index, generation=self.welcome.generation)

    def policy(self, environment: VectorEnvironment, *, precision: Precision, training: bool) -> Policy:
        """The run's policy for the environment built here, `training` or to be judged.

        Raises `ConfigError` where that is not the learner's environment.
        """
        self.link.check_environment(environment.spec)
        if arithmetic.native(precision, arithmetic.CPU) != precision:
            _log.info("no_bfloat16", setting="actor.precision", device="cpu", precision="fp32")
        policy = build_policy(
            self.run.algorithm,
            model=self.run.model,
            env=environment.spec,
            precision=precision,
            seed=self.seed("policy"),
            place=Place(index=self.welcome.index, peers=self.run.actors, num_envs=environment.num_envs, training=training),
        )
        self.link.layout = policy.layout
        return policy


def parse(role: str, what: str, words: Sequence[str], environ: Mapping[str, str]) -> Invocation:
    """Read a peer's command line; `what` it does is for --help.

    Raises `ConfigError`; argparse itself exits with 2 for an unknown option.
    """
    parser = arguments.parser(role, what, f"rookery {role} --learner tcp://127.0.0.1:5700")
    parser.add_argument("--learner", metavar="tcp://HOST:PORT", help=f"address of the learner ({role}.learner)")
    parser.add_argument("--keys", metavar="DIR", help=f"folder of keys, where the learner wants them ({role}.keys)")
    parser.add_argument("--insecure", action="store_true", help=f"join another machine's learner without keys ({role}.insecure)")
    parser.add_argument(
        "--allow-code",
        action="append",
        metavar="PACKAGE",
        help=f"let the learner's configuration name code of this package; may be repeated ({role}.allow_code)",
    )
    parser.add_argument("--name", help=f"unique in the run, stable over restarts ({role}.name)")
    parsed = parser.parse_intermixed_args(words)
    named = {
        f"{role}.learner": parsed.learner,
        f"{role}.keys": parsed.keys,
        f"{role}.insecure": "true" if parsed.insecure else None,
        f"{role}.allow_code": json.dumps(parsed.allow_code) if parsed.allow_code else None,
        f"{role}.name": parsed.name,
    }
    return Invocation(loaded=arguments.load(parsed, named, environ), linger=parsed.linger, debug=parsed.debug)


def main(
    role: str,
    argv: Sequence[str] | None,
    *,
    parse: Callable[[Sequence[str], Mapping[str, str]], Invocation],
    niceness: int,
    metrics: ServiceMetrics,
    build: Callable[[Peer], Loop],
) -> int:
    """Run one peer until its loop ends, it is told to stop, or the run is over; returns the exit code.

    `build` is called once, when the learner has welcomed it. The process runs with `niceness` more than its parent.
    """
    words = sys.argv[1:] if argv is None else argv

    def serve() -> int:
        return _serve(role, parse(words, os.environ), niceness=niceness, metrics=metrics, build=build)

    return root.run(serve, program=f"rookery {role}", debug="--debug" in words)


def _serve(role: str, invocation: Invocation, *, niceness: int, metrics: ServiceMetrics, build: Callable[[Peer], Loop]) -> int:
    settings = invocation.settings
    own: PeerSettings = getattr(settings, role)
    logs.configure(role, level=settings.log.level, form=settings.log.format, debug=invocation.debug)
    root.yield_cpu(niceness)
    root.set_torch_threads(own.torch_threads)
    shutdown, health = Shutdown(), Health()
    with (
        closing(ZmqPeer(own.learner, keys=PeerKeys.of(own.keys))) as transport,  # a socket left open would hold up the exit
        on_signals(shutdown),
        HttpServer(host=settings.metrics.host, port=settings.metrics.port, metrics=metrics.render, health=health) as http,
    ):
        _log.info(f"{role}_started", learner=own.learner, metrics=http.url)
        if own.insecure and not own.keys:
            _log.warning("insecure", learner=own.learner, consequence="any process that answers there is taken for the learner")
        session = ActorSide(_identity(role, own.name))
        link = Link(transport=transport, session=session, clock=time.monotonic, note=_log.note)
        welcome = _welcomed(link, own.learner, shutdown, health)
        reason = link.drain.reason if link.drain else shutdown.reason
        if welcome is not None:
            run = read_run(welcome.config, role=role, settings=settings)
            peer = Peer(invocation=invocation, role=role, link=link, run=run, shutdown=shutdown, health=health)
            health.tick(doing="builds its environments", within=BUILD_SECONDS)
            loop = build(peer)
            health.ready(unless=lambda: "" if link.joined or link.drain else f"no learner at {own.learner}")
            reason = loop.run()
        link.close(reason)
        _log.info(f"{role}_ended", reason=reason)
        if invocation.linger:
            root.linger(shutdown, health)
    return 0


def _identity(role: str, name: str) -> Identity:
    known = name or f"{role}-{socket.gethostname()}-{os.getpid()}"
    return Identity(role=role, name=known, incarnation=time.time_ns(), software=version("rookery"))


def _welcomed(link: Link, address: str, shutdown: Shutdown, health: Health) -> Welcome | None:
    """Greet until the learner answers, however long that takes; None where it is time to leave before that."""
    told_at = time.monotonic()
    while link.welcome is None:
        if time.monotonic() - told_at >= TELL_SECONDS:
            told_at = time.monotonic()
            _log.warning("no_learner_yet", learner=address, consequence="this peer waits for it")
        link.service(WAIT_SECONDS)
        health.tick(doing="waits for the learner")
        if shutdown.requested or link.drain:
            return None
    return link.welcome
