"""Environments that env workers step, in place of the actor's own: the adapter between the actor's loop and `EnvSide`.

One thread uses it, that of the actor's loop. A step waits for the env workers at most `step_timeout`, and without any env
worker until one has come; meanwhile `idle` serves the connection to the learner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np

from common.envs.remote import RowJoiner
from common.envs.spec import EnvSpec
from common.envs.state import StateError
from common.envs.vector import Array, Transition
from common.errors import ProtocolError, ProtocolVersionError
from common.observability.env_metrics import PolicyServerStats
from common.protocol import codec
from common.protocol import events as e
from common.protocol.env_side import EnvSide
from common.protocol.messages import Envelope
from common.transport.api import ConnectionLimit, Frame, ServerTransport
from common.units import Seconds

WAIT_SECONDS: Seconds = 0.05
TICK_SECONDS: Seconds = 0.1
DRAIN_SECONDS: Seconds = 2.0  # the learner waits meanwhile
MESSAGES_AT_ONCE = 64  # then the next row is looked at, so that a flood does not stop the others


class RemoteEnvironments:
    """B environments of env workers, with the methods of `common.envs.vector.VectorEnvironment` that the actor's loop uses."""

    def __init__(
        self,
        *,
        side: EnvSide,
        transport: ServerTransport,
        spec: EnvSpec,
        step_timeout: Seconds,
        stats: PolicyServerStats,
        clock: Callable[[], Seconds],
        log_event: Callable[[e.LogEvent], None],
        idle: Callable[[], None],
        stopping: Callable[[], bool],
    ) -> None:
        """`idle` is called while a step waits; where `stopping` returns True, the step returns without the missing rows."""
        self.spec = spec
        self.num_envs = side.num_envs
        self._side, self._transport = side, transport
        self._step_timeout = step_timeout
        self._stats, self._clock, self._log_event = stats, clock, log_event
        self._idle, self._stopping = idle, stopping
        self._limit = ConnectionLimit()
        self._rows = RowJoiner(spec, side.num_envs)
        self._ticked_at: Seconds = float("-inf")
        self._idle_at: Seconds = float("-inf")

    def reset(self, seed: int) -> Array:
        """Let all env workers begin new episodes. Return zeros [B, *frame]: first observations come in a row of `step`."""
        self._perform(self._side.begin(seed, self._clock()))
        return self._rows.observation

    def step(self, action: Array) -> Transition:
        """Send `action` [B, ...] to the env workers and return their rows; those without an answer in time are not valid."""
        began = self._clock()
        self._perform(self._side.act(np.ascontiguousarray(action), began))
        while not (self._side.answered or self._stopping()):
            now = self._clock()
            left = began + self._step_timeout - now
            if not self._side.rows_waiting:
                left = WAIT_SECONDS
            elif left <= 0:
                self._perform(self._side.expire(now))
                continue
            self.service(min(left, WAIT_SECONDS))
            if now >= self._idle_at:
                self._idle_at = now + WAIT_SECONDS
                self._idle()
        transition = self._rows.join(self._side.finish())
        self._stats.steps += 1
        self._stats.wait_seconds += self._clock() - began
        return transition

    def service(self, timeout: Seconds = 0.0) -> None:
        """Handle the messages that have arrived, at most `MESSAGES_AT_ONCE`, waiting up to `timeout` seconds for the first."""
        for number in range(MESSAGES_AT_ONCE):
            if (received := self._transport.receive(0.0 if number else timeout)) is None:
                break
            self._arrived(*received)
        now = self._clock()
        if now - self._ticked_at >= TICK_SECONDS:
            self._ticked_at = now
            self._perform(self._side.handle(e.Tick(), now))
            if failures := self._transport.handshakes.handshake_failures(now):
                self._log_event(failures)
            self._collect()

    def drain(self, reason: str) -> None:
        """Let all env workers end, and wait until they have left: a connection that closes may lose what was sent last."""
        began = self._clock()
        self._perform(self._side.handle(e.DrainAsked(reason=reason, deadline_seconds=DRAIN_SECONDS), began))
        while self._side.connected and self._clock() - began < DRAIN_SECONDS:
            self.service(WAIT_SECONDS)

    def close(self) -> None:
        """Close the connections; env workers greet again until a policy server answers."""
        self._transport.close()

    def state_dict(self) -> NoReturn:
        """Raise `StateError`: the state is with the env workers."""
        raise StateError("state of the environments", found="environments of env workers", wanted="environments of this process")

    def load_state_dict(self, saved: Mapping[str, Any]) -> NoReturn:  # noqa: ARG002
        """Raise `StateError`, as `state_dict`."""
        self.state_dict()

    def _arrived(self, route: e.Route, frames: list[Frame]) -> None:
        now, answers = self._clock(), self._side.answers
        if self._limit.ignores(route, now):
            self._stats.ignored += 1
            return
        try:
            event: e.Event = e.Received(route=route, envelope=codec.decode(frames), public_key=self._transport.received_key)
        except ProtocolError as error:
            event = e.Undecodable(route=route, detail=str(error), protocol=isinstance(error, ProtocolVersionError))
        self._perform(self._side.handle(event, now))
        if answers == self._side.answers and (ignored := self._limit.count(route, now)):
            self._log_event(ignored)

    def _perform(self, instructions: list[e.Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, e.LogEvent):
                self._log_event(instruction)
            elif isinstance(instruction, e.Send):
                frames = codec.encode(Envelope(run=self._side.config.run, message=instruction.message))
                if self._transport.send(instruction.route, frames):
                    self._stats.env_sent[instruction.message.tag] += 1
                else:
                    unsent = e.Unsent(message=instruction.message, route=instruction.route)
                    self._perform(self._side.handle(unsent, self._clock()))

    def _collect(self) -> None:
        side, stats = self._side, self._stats
        stats.env_workers, stats.rows_waiting = side.connected, side.rows_waiting
        stats.missing_rows, stats.env_workers_lost = side.missing_rows, side.workers_lost
        stats.refused = side.messages_refused.total()
