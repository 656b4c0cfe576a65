"""The policy server: an actor for environments that env workers step. See docs/policy-server.md."""

from __future__ import annotations

from common.runtime.lifecycle import begin_process

if __name__ == "__main__":
    begin_process()

import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from common.config.run_config import EnvRunConfig, RunConfig
from common.envs.leaves import Array
from common.envs.remote import RowJoiner, check_observe, observe_schema
from common.envs.spec import EnvSpec
from common.envs.trial import spec_of
from common.envs.vector import Transition
from common.errors import ConfigError, ProtocolError, ProtocolVersionError
from common.observability import logs
from common.observability.env_metrics import POLICY_SERVER_METRICS, PolicyServerStats
from common.protocol import codec
from common.protocol import events as e
from common.protocol.env_side import EnvSide
from common.protocol.env_slots import SILENCE_SECONDS, EnvSessionConfig
from common.protocol.messages import ACTOR_STATE, Envelope
from common.runtime import process
from common.runtime.lifecycle import BUILD_SECONDS
from common.runtime.machine import cpu_limit
from common.runtime.process import derive_seed
from common.transport.api import ConnectionLimit, Frame, ServerTransport
from common.transport.curve import ServerKeys
from common.transport.zmq import ZmqServer
from common.units import Seconds
from services import worker
from services.acting.incarnation import build_incarnation, message_type_of
from services.acting.loop import ActorLoop
from services.acting.policy import policy_of
from services.worker import WelcomedWorker

WAIT_SECONDS: Seconds = 0.05
TICK_SECONDS: Seconds = 0.1
HELD_UP_SECONDS: Seconds = SILENCE_SECONDS / 2  # between two ticks: the policy acted for so long, or the process was stopped
DRAIN_SECONDS: Seconds = 2.0  # the learner waits meanwhile
MESSAGES_AT_ONCE = 64  # then the next row is looked at, so that a flood does not stop the others

_log = logs.EventLog(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run one policy server until a stop is requested or the run ends."""
    stats = PolicyServerStats(cpu_limit=cpu_limit)
    return worker.main("policy-server", argv, stats=stats, metrics=POLICY_SERVER_METRICS, build=PolicyServerLoop)


class PolicyServerLoop:
    """The actor's loop over remote environments, and the end of the env workers with the run."""

    def __init__(self, welcomed: WelcomedWorker[RunConfig], stats: PolicyServerStats) -> None:
        """Listen for env workers.

        Raises `ConfigError` where the run cannot be divided among them or its policy cannot be built, `ResourceError` where the
        address is in use.
        """
        if any(spec.name == ACTOR_STATE for spec in welcomed.welcome.schema):
            fact = "a policy server cannot take part in lockstep: the clock decides which env workers are late"
            raise ConfigError(fact, found="run.mode lockstep", wanted="asynchronous", fix="use `rookery actor`")
        self._worker = welcomed
        spec = spec_of(welcomed.run.env)
        stats.frame_skip = spec.frame_skip
        policy = policy_of(welcomed, spec, num_envs=welcomed.run.env.num_envs, training=True)  # before the port is opened
        own, side = welcomed.invocation.settings.policy_server, EnvSide(_session(welcomed, spec))
        transport = ZmqServer(own.bind, keys=ServerKeys.of(own.keys))
        _log.info("listening", env_workers=own.workers, bind=transport.endpoint)
        if own.insecure and not own.keys:
            _log.warning(
                "insecure", bind=transport.endpoint, consequence="any process that reaches this port may be an env worker"
            )
        environments = RemoteEnvironments(
            side=side,
            transport=transport,
            spec=spec,
            step_timeout=own.step_timeout_ms / 1000,
            stats=stats,
            clock=time.monotonic,
            log_event=_log.log_event,
            idle=self._idle,
            stopping=lambda: welcomed.shutdown.requested or welcomed.link.drain is not None,
        )
        self._environments = welcomed.resources.enter_context(closing(environments))
        self._actor = ActorLoop(
            link=welcomed.link,
            incarnation=build_incarnation(welcomed, self._environments, policy),
            message_type=message_type_of(welcomed.run, self._environments),
            stats=stats,
            stopping=lambda: welcomed.shutdown.requested,
            alive=self._alive,
        )
        self._stats = stats

    def run(self) -> str:
        """Collect and send until there is a reason to stop; return the reason."""
        link, server = self._worker.link, self._worker.invocation.settings.actor.learner

        def obstacle() -> str:
            if link.drain:
                return ""
            return "no env worker" if not self._stats.env_workers else "" if link.joined else f"no learner at {server}"

        self._worker.health.ready(unless=obstacle)
        reason = self._actor.run()
        if link.drain:
            self._environments.drain(reason)
        return reason

    def _idle(self) -> None:
        self._worker.link.service()
        self._worker.health.tick(doing="waits for env workers")

    def _alive(self, **announced: Any) -> None:
        self._environments.service()
        self._worker.health.tick(**announced)


def _session(welcomed: WelcomedWorker[RunConfig], spec: EnvSpec) -> EnvSessionConfig:
    own, run = welcomed.invocation.settings.policy_server, welcomed.run
    rows, rest = divmod(run.env.num_envs, own.workers)
    if rest:
        fix = "choose --workers, or env.num_envs at the learner"
        wanted = f"a divisor of the learner's env.num_envs, {run.env.num_envs}"
        raise ConfigError("policy_server.workers", found=own.workers, wanted=wanted, fix=fix)
    # The same after a restart, so that env workers need not build their environments anew; another for each policy server.
    seed = derive_seed(run.seed, "environment", role=welcomed.role, index=welcomed.welcome.index)
    return EnvSessionConfig(
        run=run.run_id,
        env_config=EnvRunConfig.of(run, rows=rows, environment_seed=seed).model_dump_json(),
        env_signature=spec.signature,
        schema=observe_schema(spec, rows=rows),
        check=partial(check_observe, spec),
        slots=own.workers,
        rows=rows,
        silence_seconds=SILENCE_SECONDS + own.step_timeout_ms / 1000,
        reset_seconds=BUILD_SECONDS,
    )


@dataclass(kw_only=True)
class RemoteEnvironments:
    """B environments of env workers, with the methods of `common.envs.vector.VectorEnvironment` that the actor's loop uses.

    It is the adapter between that loop, whose thread alone uses it, and `EnvSide`. A step waits for the env workers at most
    `step_timeout`, and without any env worker until one has come; meanwhile `idle` serves the connection to the learner.
    """

    side: EnvSide
    transport: ServerTransport
    spec: EnvSpec
    step_timeout: Seconds
    stats: PolicyServerStats
    clock: Callable[[], Seconds]
    log_event: Callable[[e.LogEvent], None]
    idle: Callable[[], None]
    stopping: Callable[[], bool]  # where it returns True, a step returns without the missing rows
    _limit: ConnectionLimit = field(default_factory=ConnectionLimit)
    _ticked_at: Seconds = float("-inf")
    _idle_at: Seconds = float("-inf")

    def __post_init__(self) -> None:
        self.num_envs = self.side.num_envs
        self._rows = RowJoiner(self.spec, self.num_envs)

    def reset(self, seed: int) -> Array:
        """Let all env workers begin new episodes. Return zeros [B, *frame]: first observations come in a row of `step`."""
        self._perform(self.side.begin(seed, self.clock()))
        return self._rows.observation

    def step(self, action: Array) -> Transition:
        """Send `action` [B, ...] to the env workers and return their rows; those without an answer in time are not valid."""
        # An env worker that greets again, because the policy acted for seconds, ignores an Act before its Welcome.
        self.service(messages=MESSAGES_AT_ONCE * self.side.config.slots)
        began = self.clock()
        self._perform(self.side.act(np.ascontiguousarray(action), began))
        while not (self.side.answered or self.stopping()):
            now = self.clock()
            left = began + self.step_timeout - now
            if not self.side.rows_waiting:
                left = WAIT_SECONDS
            elif left <= 0:
                answers = self.side.answers
                self.service()  # there may be some that this process, held up, did not read in time
                if self.side.answers == answers:
                    self._perform(self.side.expire(now))
                continue
            self.service(min(left, WAIT_SECONDS))
            if now >= self._idle_at:
                self._idle_at = now + WAIT_SECONDS
                self.idle()
        transition = self._rows.join(self.side.finish())
        self.stats.steps += 1
        self.stats.wait_seconds += self.clock() - began
        return transition

    def service(self, timeout: Seconds = 0.0, *, messages: int = MESSAGES_AT_ONCE) -> None:
        """Handle what has arrived, at most so many `messages`, waiting up to `timeout` seconds for the first."""
        for number in range(messages):
            if (received := self.transport.receive(0.0 if number else timeout)) is None:
                break
            self._arrived(*received)
        now = self.clock()
        if now - self._ticked_at >= TICK_SECONDS:
            if now - self._ticked_at > HELD_UP_SECONDS:  # no env worker is silent whose messages wait to be read
                for _ in range(MESSAGES_AT_ONCE * self.side.config.slots):
                    if (received := self.transport.receive(TICK_SECONDS)) is None:
                        break
                    self._arrived(*received)
                now = self.clock()
            self._ticked_at = now
            self._perform(self.side.handle(e.Tick(), now))
            if failures := self.transport.handshakes.handshake_failures(now):
                self.log_event(failures)
            self._collect()

    def drain(self, reason: str) -> None:
        """Let all env workers end, and wait until they have left: a connection that closes may lose what was sent last."""
        began = self.clock()
        self._perform(self.side.handle(e.DrainAsked(reason=reason, deadline_seconds=DRAIN_SECONDS), began))
        while self.side.connected and self.clock() - began < DRAIN_SECONDS:
            self.service(WAIT_SECONDS)

    def close(self) -> None:
        """Close the connections; env workers greet again until a policy server answers."""
        self.transport.close()
        self.stats.env_workers = self.stats.rows_waiting = 0

    def _arrived(self, route: e.Route, frames: list[Frame]) -> None:
        now, answers = self.clock(), self.side.answers
        if self._limit.ignores(route, now):
            self.stats.ignored += 1
            return
        try:
            event: e.Event = e.Received(route=route, envelope=codec.decode(frames), public_key=self.transport.received_key)
        except ProtocolError as error:
            event = e.Undecodable(route=route, detail=str(error), protocol=isinstance(error, ProtocolVersionError))
        self._perform(self.side.handle(event, now))
        if answers == self.side.answers and (ignored := self._limit.count(route, now)):
            self.log_event(ignored)

    def _perform(self, instructions: list[e.Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, e.LogEvent):
                self.log_event(instruction)
            elif isinstance(instruction, e.Send):
                frames = codec.encode(Envelope(run=self.side.config.run, message=instruction.message))
                if self.transport.send(instruction.route, frames):
                    self.stats.env_sent[instruction.message.tag] += 1
                else:
                    unsent = e.Unsent(message=instruction.message, route=instruction.route)
                    self._perform(self.side.handle(unsent, self.clock()))

    def _collect(self) -> None:
        side, stats = self.side, self.stats
        stats.env_workers, stats.rows_waiting = side.connected, side.rows_waiting
        stats.missing_rows, stats.env_workers_lost = side.missing_rows, side.workers_lost
        stats.refused = side.messages_refused.total()
        stats.handshakes_failed = Counter(self.transport.handshakes.failed)


if __name__ == "__main__":
    process.end_process(main())
