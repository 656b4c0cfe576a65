"""The root that all workers share: from the command line to the exit code, in the order in which it runs.

Actor, policy server, evaluator and env worker differ in their loops, their settings and their metrics. Their command line, the
handshake with their server, signals, HTTP, and the end of the process are the same, and are in this file. It imports no torch:
policies are in `services.acting`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any, Generic, Protocol, TypeVar

from common.config import arguments
from common.config.arguments import Invocation
from common.config.code_references import named_modules
from common.config.endpoint import parse_endpoints
from common.config.run_config import EnvRunConfig, RunConfig
from common.config.schema import Settings
from common.config.sections import ConnectedSettings
from common.envs.make import make
from common.envs.spec import EnvSettings
from common.envs.state import seed_generators
from common.envs.vector import VectorEnvironment
from common.errors import ConfigError, ResourceError, RunChangedError
from common.observability import logs
from common.observability.health import Health
from common.observability.http import HttpServer
from common.observability.metrics import Exporter, Metric, run_labels
from common.protocol.messages import ENV_WORKER, Welcome, server_of
from common.protocol.worker_side import Identity, WorkerSide
from common.runtime import process
from common.runtime.lifecycle import BUILD_SECONDS, Shutdown, on_signals
from common.runtime.process import Purpose, derive_seed
from common.transport.curve import WorkerKeys
from common.transport.link import Link
from common.transport.zmq import ZmqWorker
from common.units import Seconds
from services.allowed_code import read_run

WAIT_SECONDS: Seconds = 0.1
FIRST_WARNING_SECONDS: Seconds = 3.0  # before the first warning that no learner has answered
WARN_SECONDS: Seconds = 10.0  # between two of them
GREET_SECONDS: Seconds = 60.0  # between two looks for another run, of a worker that lingers
ANSWER_SECONDS: Seconds = 5.0  # for the answer to such a look

_log = logs.EventLog(__name__)


class Loop(Protocol):
    """Loop of a worker."""

    def run(self) -> str:
        """Run until there is a reason to stop, and return the reason."""


Run = TypeVar("Run", RunConfig, EnvRunConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class WelcomedWorker(Generic[Run]):
    """A worker that was welcomed: the parts from which its loop is built."""

    invocation: Invocation
    role: str
    link: Link
    run: Run
    shutdown: Shutdown
    health: Health
    resources: ExitStack  # closed when the loop has ended, or could not be built

    def environments(self, build: Callable[[EnvSettings], VectorEnvironment] = make) -> VectorEnvironment:
        """Call `build` for environments of the run in place of those that were built before, which are closed."""
        self.resources.close()
        self.health.tick(doing="builds its environments", within=BUILD_SECONDS)
        seed_generators(self.seed("environment"))  # an environment may draw from the global generators
        environment = build(self.run.env)
        self.resources.callback(process.close_environments, environment)
        return environment

    @property
    def welcome(self) -> Welcome:
        """Return the newest Welcome."""
        assert self.link.welcome is not None
        return self.link.welcome

    @property
    def run_labels(self) -> tuple[str, ...]:
        """Return the labels of the run for the metrics of this process."""
        run = self.run
        algorithm = run.algorithm if isinstance(run, EnvRunConfig) else run.algorithm.name
        return run_labels(run_id=run.run_id, env=run.env.name, algorithm=algorithm, seed=run.seed)

    def seed(self, purpose: Purpose) -> int:
        """Return the seed of one of the random streams of the slot that the newest Welcome gives."""
        run, welcome = self.run, self.welcome
        seed = run.environment_seed if isinstance(run, EnvRunConfig) else run.seed
        return derive_seed(seed, purpose, role=self.role, index=welcome.index, generation=welcome.generation)


@dataclass(frozen=True, slots=True)
class Service:
    """One kind of worker: its name on the command line, and its role towards its server, which also names its settings."""

    name: str
    role: str
    niceness: int  # more than its parent's
    task: str  # in its --help

    @property
    def server(self) -> str:
        """Return the process that it connects to, in messages."""
        return server_of(self.role)

    @property
    def server_key(self) -> str:
        """Return the same as the setting that has its address, and as a key of log lines."""
        return self.server.replace(" ", "_")


SERVICES = {
    service.name: service
    for service in (
        # The learner goes first where they share a machine: it is one process, and all wait for its next policy.
        Service("actor", "actor", 5, "Step environments with the learner's newest policy and send experience."),
        Service("policy-server", "actor", 5, "Act with the newest policy for environments of env workers, and send experience."),
        Service("env-worker", ENV_WORKER, 5, "Step environments for a policy server. Needs no torch."),
        # Training does not wait for a score: all others go first.
        Service("evaluator", "evaluator", 10, "Play whole episodes with the newest policy and report the returns."),
    )
}


def main(
    name: str,
    argv: Sequence[str] | None,
    *,
    stats: Any,
    metrics: Iterable[Metric[Any]],
    build: Callable[[WelcomedWorker[Any], Any], Loop],
) -> int:
    """Run one worker, a name in `SERVICES`, until its loop ends, a stop is requested, or the run is over; return the exit code.

    `metrics` are read from `stats`, a dataclass with `run` and `link`. `build` is called with a welcomed worker and its `stats`.
    """
    argv = sys.argv[1:] if argv is None else argv
    health = Health()
    exporter = Exporter(metrics, lambda: stats, health)

    def begin(welcomed: WelcomedWorker[Any]) -> Loop:
        stats.run = welcomed.run_labels
        exporter.source = lambda: replace(stats, link=welcomed.link.stats())
        return build(welcomed, stats)

    def serve() -> int:
        invocation = parse(name, argv, os.environ)
        process.allow_descriptors()
        return _Root(service=SERVICES[name], invocation=invocation, metrics=exporter, health=health, build=begin).serve()

    return process.run(serve, program=f"rookery {name}", debug="--debug" in argv)


def parse(name: str, argv: Sequence[str], environ: Mapping[str, str]) -> Invocation:
    """Read a worker's command line. Raises `ConfigError`; argparse itself exits with 2 for an unknown option."""
    role, title, section = SERVICES[name].role, SERVICES[name].server, SERVICES[name].server_key
    option, port = f"--{title.replace(' ', '-')}", 5800 if role == ENV_WORKER else 5700
    required = " --workers 2" if name == "policy-server" else ""
    parser = arguments.service_parser(name, SERVICES[name].task, f"rookery {name} {option} tcp://127.0.0.1:{port}{required}")
    parser.add_argument(option, metavar="tcp://HOST:PORT", help=f"address of the {title} ({role}.{section})")
    parser.add_argument("--keys", metavar="DIR", help=f"folder of keys, where the {title} requires them ({role}.keys)")
    parser.add_argument("--insecure", action="store_true", help=f"join another machine's {title} without keys ({role}.insecure)")
    parser.add_argument(
        "--allow-code",
        action="append",
        metavar="PACKAGE",
        help=f"let the {title}'s configuration name code of this package; may be repeated ({role}.allow_code)",
    )
    parser.add_argument("--name", help=f"unique in the run, stable over restarts ({role}.name)")
    if name == "policy-server":
        parser.add_argument("--bind", metavar="tcp://ADDRESS:PORT", help="where env workers connect (policy_server.bind)")
        parser.add_argument("--workers", metavar="N", help="number of env workers (policy_server.workers)")
    parsed = parser.parse_intermixed_args(argv)
    _require_own(name, parsed.overrides)
    options = {
        f"{role}.{section}": getattr(parsed, section),
        f"{role}.keys": parsed.keys,
        f"{role}.insecure": "true" if parsed.insecure else None,
        f"{role}.allow_code": json.dumps(parsed.allow_code) if parsed.allow_code else None,
        f"{role}.name": parsed.name,
        "evaluator.enabled": "true" if name == "evaluator" else None,  # the setting is for `rookery train`
    }
    if name == "policy-server":
        options |= {"policy_server.bind": parsed.bind, "policy_server.workers": parsed.workers}
    loaded = arguments.settings_from_arguments(parsed, options, environ)
    if name == "policy-server" and loaded.settings.policy_server.workers == 0:
        raise ConfigError("policy_server.workers", found=0, wanted="the number of its env workers", fix="add --workers N")
    return Invocation(loaded=loaded, linger=parsed.linger, debug=parsed.debug)


_SENT = {"run", *(RunConfig.model_fields.keys() & Settings.model_fields.keys()), "actor.count", "actor.precision"}


def _require_own(name: str, overrides: Iterable[str]) -> None:
    """Raise `ConfigError` for a setting of the command line that this worker does not read from it.

    Settings that name code are permissions: `services.allowed_code.read_run`.
    """
    own = [SERVICES[name].role, *(["policy_server"] if name == "policy-server" else []), "metrics", "log"]
    for override in overrides:
        key, given, value = override.partition("=")
        section = key.partition(".")[0]
        permits = key == "env.id" or (section in _SENT and any(named_modules([override])))
        sent = not {section, key}.isdisjoint(_SENT)
        if given and not permits and section in Settings.model_fields and (sent or section not in own):
            fact = f"{key} has no effect on this process: " + ("the learner sends it" if sent else "another one reads it")
            wanted = f"a setting of {', '.join(own[:-1])} or {own[-1]}"
            fix = f"set it for {'the learner' if sent else 'that process'}"
            raise ConfigError(fact, found=f"{value} (command line)", wanted=wanted, fix=fix)


@dataclass(kw_only=True)
class _Root:
    """One worker process, from its connection to its end."""

    service: Service
    invocation: Invocation
    metrics: Exporter[Any]
    health: Health
    build: Callable[[WelcomedWorker[Any]], Loop]
    shutdown: Shutdown = field(default_factory=Shutdown)
    resources: ExitStack = field(default_factory=ExitStack)  # of the loop

    def __post_init__(self) -> None:
        service = self.service
        self._own: ConnectedSettings = getattr(self.invocation.settings, service.role)
        self._name = self._own.name or f"{service.name}-{socket.gethostname()}-{os.getpid()}"
        servers, numbered = getattr(self._own, service.server_key), bool(self._own.name)
        self._address = rank_address(servers, role=service.role, name=self._name, numbered=numbered)
        self._where: dict[str, Any] = {service.server_key: self._address}

    def serve(self) -> int:
        service, settings, event = self.service, self.invocation.settings, self.service.name.replace("-", "_")
        logs.configure(event, level=settings.log.level, form=settings.log.format, debug=self.invocation.debug)
        os.nice(service.niceness)  # other processes go first; this cannot be undone
        with (
            # An open socket would delay the exit.
            closing(self._connect()) as transport,
            on_signals(self.shutdown),
            HttpServer(
                host=settings.metrics.host, port=settings.metrics.port, metrics=self.metrics.render, health=self.health
            ) as http,
            self.resources,
        ):
            _log.info(f"{event}_started", **self._where, metrics=http.url)
            if self._own.insecure and not self._own.keys:
                consequence = f"any process that answers there is taken for the {service.server}"
                _log.warning("insecure", **self._where, consequence=consequence)
            reason = None
            while reason is None:
                link, loop = self._build_loop(transport)
                reason = self._run(link, loop)
            link.close(reason)
            self.resources.close()  # after the Goodbye, for which the server waits
            _log.info(f"{event}_ended", reason=reason)
            if self.invocation.linger:
                until = "SIGTERM, or another run"
                process.linger(self.shutdown, self.health, seconds=GREET_SECONDS, check=self._finds_run, until=until)
        return 0

    def _connect(self) -> ZmqWorker:
        return ZmqWorker(self._address, keys=WorkerKeys.of(self._own.keys), server=self.service.server)

    def _finds_run(self) -> bool:
        """Return whether a run is under way at the address of the server.

        A new process has to join it, with code of its own. It also reports what is wrong, such as keys.
        """
        try:
            with closing(self._connect()) as transport:
                link, until = self._new_link(transport), time.monotonic() + ANSWER_SECONDS
                while not (link.received or self.shutdown.requested) and time.monotonic() < until:
                    link.service(WAIT_SECONDS)
                link.close("it has ended, and its successor joins")
                found = bool(link.received) and link.drain is None
        except ConfigError:
            found = True
        if found:
            _log.info("run_found", consequence="this process ends, and the next one at its place joins the run")
        return found

    def _new_link(self, transport: ZmqWorker) -> Link:
        identity = Identity(role=self.service.role, name=self._name, incarnation=time.time_ns(), software=version("rookery"))
        return Link(transport=transport, session=WorkerSide(identity), clock=time.monotonic, log_event=_log.log_event)

    def _run(self, link: Link, loop: Loop | None) -> str | None:
        """Return the reason for which the loop ended; None where the run goes on with other settings, and needs another loop."""
        if loop is None:
            return link.drain.reason if link.drain else self.shutdown.reason
        self.health.ready(unless=lambda: "" if link.joined or link.drain else f"no {self.service.server} at {self._address}")
        try:
            return loop.run()
        except RunChangedError as error:
            _log.warning("run_changed", detail=error, consequence="this worker is built anew")
            self.resources.close()
            return None

    def _build_loop(self, transport: ZmqWorker) -> tuple[Link, Loop | None]:
        """Greet, and build the loop that the Welcome describes; None where it is time to leave before that.

        Raises `ConfigError` where the Welcome cannot be used. Since a network without keys may change its bytes, a new
        incarnation greets once more, and the error stands if the Welcome comes as before.
        """
        role, health = self.service.role, self.health
        refused: object = None
        while True:
            link = self._new_link(transport)
            welcome = self._welcomed(link, transport)
            if welcome is None:
                return link, None
            try:
                run = read_run(welcome.config, role=role, settings=self.invocation.settings)
                logs.belong_to(run.run_id)
                _log.info("welcomed", run=run.run_id, **self._where, slot=welcome.index, generation=welcome.generation)
                health.tick(doing="builds its environments", within=BUILD_SECONDS)
                welcomed: WelcomedWorker[Any] = WelcomedWorker(
                    invocation=self.invocation,
                    role=role,
                    link=link,
                    run=run,
                    shutdown=self.shutdown,
                    health=health,
                    resources=self.resources,
                )
                with process.build_limit():
                    return link, self.build(welcomed)
            except ConfigError as error:
                if welcome.described == refused:
                    raise
                refused = welcome.described
                _log.warning("welcome_refused", error=error, consequence="this worker greets once more")
                self.resources.close()

    def _welcomed(self, link: Link, transport: ZmqWorker) -> Welcome | None:
        """Greet until the server welcomes this worker, and return its Welcome; None for a stop, or the end of the run, before.

        A refusal is an answer, which has its own log line. Raises `ResourceError` where the server answers nothing for as long
        as the service waits.
        """
        server, key = self.service.server, self.service.server_key
        limit = self.invocation.settings.policy_server.learner_seconds if self.service.name == "policy-server" else None
        answers, answered_at = 0, time.monotonic()
        warn_at = answered_at + FIRST_WARNING_SECONDS
        while link.welcome is None:
            now = time.monotonic()
            if link.received.total() > answers:
                answers, answered_at, warn_at = link.received.total(), now, now + WARN_SECONDS
            if limit is not None and now - answered_at >= limit:
                fix = transport.handshakes.detail or f"start the {server} first, or set {self.service.role}.{key}"
                raise ResourceError(f"no {server} answers", found=f"none at {self._address} within {limit:g} s", fix=fix)
            if now >= warn_at:
                warn_at = now + WARN_SECONDS
                _log.warning(f"no_{key}_yet", **self._where, consequence="this worker waits for it")
            link.service(WAIT_SECONDS)
            self.health.tick(doing=f"waits for the {server}")
            if self.shutdown.requested or link.drain:
                return None
        return link.welcome


def rank_address(addresses: str, *, role: str, name: str, numbered: bool) -> str:
    """Return the address of the rank of the learner that a worker belongs to, of those of all ranks.

    An actor belongs to the rank of the number at the end of its name, or else of a hash of its name, modulo the number of ranks:
    to the same after each restart. A name that is not `numbered` ends with a process id, which is 1 in each container: there the
    hash of what comes before is added. An evaluator belongs to rank 0, which writes the results of the run.
    """
    ranks = parse_endpoints(addresses)
    text = name.rstrip("0123456789")
    digits = name[len(text) :]
    number = (int(digits) if digits else 0) + (0 if digits and numbered else zlib.crc32(text.encode()))
    return str(ranks[number % len(ranks) if role == "actor" else 0])
