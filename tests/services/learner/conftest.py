"""A learner's intake with its real session and codec, over the network in memory, and workers that speak through real links."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from common.protocol.events import LogEvent
from common.protocol.learner_side import LearnerSide
from common.protocol.messages import ArraySpec, Trajectory
from common.protocol.session_config import SessionConfig
from common.protocol.worker_side import Identity, WorkerSide
from common.transport.link import Link
from services.learner.intake import Intake
from tests.support.memory import MemoryHub

DEADLINE = 120.0  # of anything awaited: only a fault lets it pass
STEPS = 4  # env steps of one trajectory
SCHEMA = (
    ArraySpec(name="reward", dtype="float32", shape=(2, 2)),
    ArraySpec(name="valid", dtype="bool", shape=(2, 2)),
    ArraySpec(name="episode_return", dtype="float32", shape=(-1,)),
    ArraySpec(name="episode_length", dtype="int32", shape=(-1,)),
)


def session_config(**changes) -> SessionConfig:
    """Return the session config of the learner in these tests."""
    known = {
        "run": "run-1",
        "run_config": "{}",
        "env_signature": "abc",
        "schema": SCHEMA,
        "credits": 4,
        "batch": 1,
        "max_actors": 8,
    }
    return SessionConfig(**known | {"rollout_env_steps": STEPS} | changes)


def trajectory(*, version: int = 0, env_steps: int = STEPS, **arrays) -> Trajectory:
    """A rollout by the schema; `arrays` replace or, where None, leave out."""
    good = {
        "reward": np.ones((2, 2), np.float32),
        "valid": np.ones((2, 2), np.bool_),
        "episode_return": np.zeros(0, np.float32),
        "episode_length": np.zeros(0, np.int32),
    }
    kept = {name: array for name, array in (good | arrays).items() if array is not None}
    return Trajectory(seq=0, env_steps_sent=0, version=version, env_steps=env_steps, arrays=kept)


@dataclass
class Colony:
    """One intake, its hub, and the log events of both sides."""

    hub: MemoryHub
    session: LearnerSide
    intake: Intake
    notes: list[LogEvent] = field(default_factory=list)
    worker_notes: list[LogEvent] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)

    def link(self, name: str = "actor-0", role: str = "actor", *, run: str = "", signature: str = "") -> Link:
        """A worker that has not greeted yet."""
        identity = Identity(role=role, name=name, incarnation=1, software="test")
        session = WorkerSide(identity, run=run, env_signature=signature)
        self.links.append(
            Link(transport=self.hub.connect(), session=session, clock=time.monotonic, log_event=self.worker_notes.append)
        )
        return self.links[-1]

    def welcome(self, name: str = "actor-0", role: str = "actor") -> Link:
        """A worker that was welcomed."""
        link = self.link(name, role)
        self.until(lambda: link.welcome)
        return link

    def until(self, happened: Callable[[], object]) -> None:
        """Let the workers' links turn until something has happened, as their loops would."""
        deadline = time.monotonic() + DEADLINE
        while not happened():
            assert time.monotonic() < deadline, "it never happened"
            for link in self.links:
                link.service(0.01)


def start_colony(**changes) -> Colony:
    """An intake that receives."""
    hub, session, notes = MemoryHub(), LearnerSide(session_config(**changes)), []
    intake = Intake(transport=hub.bind(), session=session, clock=time.monotonic, log_event=notes.append)
    intake.start()
    return Colony(hub=hub, session=session, intake=intake, notes=notes)


@pytest.fixture
def colony():
    """An intake that receives, closed at the end."""
    built = start_colony()
    yield built
    built.intake.close()


@pytest.fixture
def make_colony():
    """As `colony`, with a session config of one's own."""
    built = []

    def make(**changes) -> Colony:
        built.append(start_colony(**changes))
        return built[-1]

    yield make
    for one in built:
        one.intake.close()


@pytest.fixture
def make_trajectory() -> Callable[..., Trajectory]:
    """Builds rollouts by the schema of the colony."""
    return trajectory
