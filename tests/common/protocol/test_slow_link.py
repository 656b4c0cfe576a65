"""A worker and its learner over a link on which one message takes longer to cross than the limits of silence."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from common.protocol import events as e
from common.protocol.learner_side import LearnerSide
from common.protocol.limits import SLOWEST_LINK
from common.protocol.messages import ArraySpec, Envelope, Message, Snapshot, Trajectory
from common.protocol.session_config import SessionConfig
from common.protocol.worker_side import Identity, WorkerSide

pytestmark = pytest.mark.pure

STEP = 0.125  # seconds of virtual time
SECONDS = 90.0


class Direction:
    """One direction of a connection: messages cross one after the other, at the rate of the slowest link."""

    def __init__(self) -> None:
        self._crossing: deque[tuple[float, Message]] = deque()
        self._free_at = 0.0

    def send(self, message: Message, now: float) -> None:
        size = 200 + sum(array.nbytes for array in message.arrays.values())
        self._free_at = max(self._free_at, now) + size / SLOWEST_LINK
        self._crossing.append((self._free_at, message))

    def arrived(self, now: float) -> list[e.Event]:
        found: list[e.Event] = []
        while self._crossing and self._crossing[0][0] <= now:
            message = self._crossing.popleft()[1]
            found.append(e.Received(envelope=Envelope(run="run", message=message), route=b"1"))
        return [*found, e.Tick()]


class Pair:
    """An actor that trains with one credit, and a learner that takes each message at once."""

    def __init__(self, *, policy_bytes: int, experience_bytes: int) -> None:
        self._rollout = {"x": np.zeros(experience_bytes, np.uint8)}
        schema = (ArraySpec(name="x", dtype="uint8", shape=(experience_bytes,)),)
        self.learner = LearnerSide(
            SessionConfig(
                run="run",
                run_config="{}",
                env_signature="",
                schema=schema,
                credits=1,
                rollout_env_steps=1,
                batch=1,
                max_actors=1,
            )
        )
        self.worker = WorkerSide(Identity(role="actor", name="a", incarnation=1, software="1"))
        self._parameters = {"parameters": np.zeros(policy_bytes, np.uint8)}
        self._up, self._down = Direction(), Direction()
        self.version = self.trained = -1
        self.events: list[str] = []

    def run(self) -> None:
        self._publish(0.0)
        for now in np.arange(0.0, SECONDS, STEP).tolist():
            for event in self._up.arrived(now):
                self._perform_learner(self.learner.handle(event, now), now)
            for event in self._down.arrived(now):
                self._perform_worker(self.worker.handle(event, now), now)
            if self.version < 0:
                self._perform_worker(self.worker.request_snapshot(-1, now), now)
            elif self.worker.has_credit:
                message = Trajectory(seq=0, env_steps_sent=0, version=self.version, env_steps=1, arrays=self._rollout)
                self._perform_worker(self.worker.request_snapshot(self.version, now), now)
                self._perform_worker(self.worker.offer(message, now), now)

    def _publish(self, now: float) -> None:
        self.trained += 1
        snapshot = Snapshot(version=self.trained, env_steps=0, precision="fp32", layout="", arrays=self._parameters)
        self._perform_learner(self.learner.handle(e.Published(snapshot=snapshot), now), now)

    def _perform_learner(self, instructions: list[e.Instruction], now: float) -> None:
        for instruction in instructions:
            if isinstance(instruction, e.Send):
                self._down.send(instruction.message, now)
            elif isinstance(instruction, e.LogEvent):
                self.events.append(instruction.event)
            elif isinstance(instruction, e.Experience):
                for event in (e.Taken(items=(instruction.number,)), e.Completed(items=(instruction.number,))):
                    self._perform_learner(self.learner.handle(event, now), now)
                self._publish(now)

    def _perform_worker(self, instructions: list[e.Instruction], now: float) -> None:
        for instruction in instructions:
            if isinstance(instruction, e.Send):
                self._up.send(instruction.message, now)
            elif isinstance(instruction, e.LogEvent):
                self.events.append(instruction.event)
            elif isinstance(instruction, Snapshot):
                self.version = instruction.version


@pytest.mark.parametrize(
    ("policy_bytes", "experience_bytes"), [(7_000_000, 1_000), (20_000_000, 1_000), (1_000, 7_000_000), (5_000_000, 5_000_000)]
)
def test_a_message_that_crosses_for_longer_than_the_limits_of_silence_arrives(policy_bytes: int, experience_bytes: int) -> None:
    pair = Pair(policy_bytes=policy_bytes, experience_bytes=experience_bytes)
    pair.run()
    assert pair.events == ["worker_welcomed"]
    assert pair.trained >= 3
    pair.learner.check_ledger()
