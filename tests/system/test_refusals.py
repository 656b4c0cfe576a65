"""Bad input, and peers that do not fit, as real processes: one line that says what to do, and nothing half-written."""

from __future__ import annotations

import socket
import time

import numpy as np
import pytest

from common.session.actor_side import ActorSide, Identity
from common.transport.link import Link
from common.transport.zmq import ZmqPeer
from common.wire.messages import Gradient, Trajectory

pytestmark = pytest.mark.system

# An environment that each side imports from where it was started: the same name, and what each has installed.
CORRIDOR = """
import gymnasium
import numpy as np

class Corridor(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, ({size},), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros({size}, np.float32), {{}}

    def step(self, action):
        return np.zeros({size}, np.float32), 0.0, True, False, {{}}
"""


@pytest.fixture
def taken():
    """A port that somebody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def refusal(service):
    """The one line of a process that was refused."""
    assert service.ended() == 2
    assert "Traceback" not in service.output
    (line,) = [line for line in service.output.splitlines() if "error:" in line]
    return line


@pytest.mark.parametrize("key", ["learner.bind=tcp://127.0.0.1:{}", "metrics.port={}"])
def test_a_port_in_use_ends_a_run_before_it_begins(colony, taken, key):
    """The run of the other terminal has it: its port is named, and the folder that was asked for is not there."""
    line = refusal(colony.train(key.format(taken)))
    assert line.startswith("rookery train: error: ")
    assert str(taken) in line
    assert "in use" in line
    assert colony.left() == []


def test_a_setting_that_only_a_service_can_judge_ends_a_run_with_that_services_words(colony):
    """Nobody but who makes the environment knows that there is no such game; the folder made meanwhile is gone again."""
    line = refusal(colony.train("env.id=CartPol-v1", "env.entry_point=", "actor.count=0", "evaluator.enabled=false"))
    assert "CartPol-v1" in line
    assert line.endswith("(says learner)")
    assert not colony.run_dir.exists()


def test_a_run_directory_that_cannot_be_written_ends_a_run_before_it_begins(colony):
    """A file stands where the folder should be, as a read-only disk would; nothing is started, nothing is lost."""
    before = colony.config.read_text()
    colony.run_dir = colony.config / "run"
    line = refusal(colony.train())
    assert line.startswith("rookery train: error: run directory cannot be written")
    assert str(colony.run_dir) in line
    assert "run.dir" in line
    assert colony.config.read_text() == before
    assert colony.left() == []


def test_peers_that_do_not_fit_are_refused_with_a_clear_line_and_harm_nobody(colony, wait):
    """One machine has another version of the game, and one peer is of another make: it sends what the schema does not have."""
    (colony.folder / "corridor.py").write_text(CORRIDOR.format(size=3))
    elsewhere = colony.folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "corridor.py").write_text(CORRIDOR.format(size=4))
    learner = colony.learner("env.entry_point=corridor:Corridor")
    other = colony.peer("actor", "other", "--allow-code", "corridor", folder=elsewhere)
    wait(lambda: learner.http.get("/readyz")[0] == 200, "the learner is ready")

    identity = Identity(role="actor", name="of-another-make", incarnation=1, software="?")
    told = []
    link = Link(transport=ZmqPeer(colony.endpoint), session=ActorSide(identity), clock=time.monotonic, note=told.append)
    wait(lambda: link.service(0.05) or link.welcome, "it is welcomed: what it will send nobody knows yet")
    link.offer(Trajectory(seq=0, shipped=0, version=0, env_steps=1, arrays={"pixels": np.zeros(3, np.float32)}))
    wait(lambda: link.service(0.05) or [note for note in told if note.event == "message_rejected"], "it is told")
    link.close("done")
    assert told[-1].fields["reason"] == "schema"
    assert "array obs: found none, wanted float32 [17, 8, 3]" in told[-1].fields["detail"]
    wait(lambda: learner.http.metric("rookery_learner_messages_dropped_total", reason="schema") == 1, "it is counted")

    line = refusal(other)
    assert line.startswith("rookery actor: error: the environment here is not the learner's: found signature ")
    assert "shape=(4,)" in line
    assert "install the same versions" in line
    actor = colony.peer("actor", "fits", "--allow-code", "corridor")
    wait(lambda: learner.http.status()["learner_updates"] > 0, "who fits is trained on")
    assert actor.process.poll() is None


@pytest.mark.parametrize(
    ("reason", "spoilt", "detail"),
    [
        ("schema", lambda good: good[:-1], "array gradient: found float32 ["),
        ("non_finite", lambda good: good * np.nan, "array gradient at [0]: found nan, wanted finite numbers"),
    ],
)
def test_a_gradient_that_cannot_be_stepped_along_is_counted_and_told(colony, wait, reason, spoilt, detail):
    """A peer with another network, and one whose loss has blown up: the learner goes on, and both sides say why."""
    learner = colony.learner("algorithm.name=a3c-grad")
    wait(lambda: learner.http.get("/readyz")[0] == 200, "the learner is ready")
    identity = Identity(role="actor", name="of-another-make", incarnation=1, software="?")
    told = []
    link = Link(transport=ZmqPeer(colony.endpoint), session=ActorSide(identity), clock=time.monotonic, note=told.append)
    wait(lambda: link.service(0.05) or link.welcome, "it is welcomed")
    arrays = {spec.name: np.zeros([max(0, size) for size in spec.shape], spec.dtype) for spec in link.welcome.schema}
    arrays["gradient"] = spoilt(arrays["gradient"])
    link.offer(Gradient(seq=0, shipped=0, version=0, env_steps=1, arrays=arrays))
    wait(lambda: link.service(0.05) or [note for note in told if note.event == "message_rejected"], "it is told")
    link.close("done")
    assert told[-1].fields["reason"] == reason
    assert told[-1].fields["detail"].startswith(detail)
    wait(lambda: learner.http.metric("rookery_learner_messages_dropped_total", reason=reason) == 1, "it is counted")
    assert learner.process.poll() is None
