"""Bad input, and workers that do not fit, as real processes: one line that says what to do, and nothing half-written."""

from __future__ import annotations

import socket
import time
from functools import partial

import numpy as np
import pytest

from common.protocol.messages import Gradient, Trajectory
from common.protocol.worker_side import Identity, WorkerSide
from common.transport.link import Link
from common.transport.zmq import ZmqWorker

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


SPOILT = """
import math
import sys
import gymnasium
from common.envs.probes import matching_action

class Spoilt(gymnasium.Wrapper):
    def step(self, action):
        seen, reward, *ends = self.env.step(action)
        return seen, math.nan if "actor" in sys.argv[0] else reward, *ends

def make():
    return Spoilt(matching_action())
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


def test_a_setting_that_only_a_service_can_check_ends_a_run_with_the_message_of_that_service(colony):
    """A memory that cannot be allocated; the folder made before that is removed again."""
    settings = "algorithm.name=dqn", "algorithm.replay_capacity=1000000000000"
    line = refusal(colony.train(*settings, "actor.count=0", "evaluator.enabled=false"))
    assert "replay memory" in line
    assert line.endswith("(from learner)")
    assert not colony.run_dir.exists()


def test_a_run_of_an_environment_with_rewards_that_are_no_numbers_ends_with_the_reason(colony):
    """They are none in actors alone, so that the env steps that are taken before the start do not show them."""
    (colony.folder / "spoilt.py").write_text(SPOILT)
    run = colony.train("env.entry_point=spoilt:make", "evaluator.enabled=false", "actor.count=1")
    assert run.ended() == 1, run.output
    (line,) = [line for line in run.output.splitlines() if "error:" in line]
    assert line.startswith("rookery train: error: actor-0 cannot work: all its experience is refused (")
    assert "array reward at [" in line
    assert "found nan, wanted finite numbers; correct the environment (" in line
    assert "add actors" not in run.output


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


def test_workers_that_do_not_fit_are_refused_with_a_clear_line_and_harm_nobody(colony, wait):
    """One machine has another version of the game; a worker with other software sends arrays that are not in the schema."""
    (colony.folder / "corridor.py").write_text(CORRIDOR.format(size=3))
    elsewhere = colony.folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "corridor.py").write_text(CORRIDOR.format(size=4))
    learner = colony.learner("env.entry_point=corridor:Corridor")
    other = colony.worker("actor", "other", "--allow-code", "corridor", folder=elsewhere)
    other.may_end = True
    wait(lambda: learner.http.get("/readyz")[0] == 200, "the learner is ready")

    identity = Identity(role="actor", name="of-another-make", incarnation=1, software="?")
    events = []
    link = Link(transport=ZmqWorker(colony.endpoint), session=WorkerSide(identity), clock=time.monotonic, log_event=events.append)
    wait(lambda: link.service(0.05) or link.welcome, "it is welcomed before it sends any experience")
    link.offer(Trajectory(seq=0, env_steps_sent=0, version=0, env_steps=1, arrays={"pixels": np.zeros(3, np.float32)}))
    wait(
        lambda: link.service(0.05) or [note for note in events if note.event == "message_rejected"], "the sender gets the reject"
    )
    link.close("done")
    assert events[-1].fields["reason"] == "schema"
    assert "array obs: found none, wanted float32 [17, 8, 3]" in events[-1].fields["detail"]
    wait(lambda: learner.http.metric("rookery_learner_messages_dropped_total", reason="schema") == 1, "it is counted")

    line = refusal(other)
    assert line.startswith("rookery actor: error: the environment here is not the learner's: found signature ")
    assert "shape=(4,)" in line
    assert "install the same versions" in line
    actor = colony.worker("actor", "fits", "--allow-code", "corridor")
    wait(lambda: learner.http.status()["learner_updates"] > 0, "its experience is trained on")
    assert actor.process.poll() is None


def test_a_gradient_that_cannot_be_stepped_along_is_counted_and_reported(colony, wait):
    """A worker with another network, and one whose loss has blown up: the learner continues, and both sides log the reason."""
    learner = colony.learner("algorithm.name=a3c-grad")
    wait(lambda: learner.http.get("/readyz")[0] == 200, "the learner is ready")
    identity = Identity(role="actor", name="of-another-make", incarnation=1, software="?")
    events = []
    link = Link(transport=ZmqWorker(colony.endpoint), session=WorkerSide(identity), clock=time.monotonic, log_event=events.append)
    wait(lambda: link.service(0.05) or link.welcome, "it is welcomed")
    good = {spec.name: np.zeros([max(0, size) for size in spec.shape], spec.dtype) for spec in link.welcome.schema}
    cases = (
        ("schema", good["gradient"][:-1], "array gradient: found float32 ["),
        ("non_finite", good["gradient"] * np.nan, "array gradient at [0]: found nan, wanted finite numbers"),
    )
    for number, (reason, gradient, detail) in enumerate(cases, start=1):
        arrays = good | {"gradient": gradient}
        link.offer(Gradient(seq=0, env_steps_sent=0, version=0, env_steps=1, arrays=arrays))

        def rejected(number=number):
            link.service(0.05)
            return [note for note in events if note.event == "message_rejected"][number - 1 :]

        (note,) = wait(rejected, "the sender gets the reject")
        assert note.fields["reason"] == reason
        assert note.fields["detail"].startswith(detail)
        counted = partial(learner.http.metric, "rookery_learner_messages_dropped_total", reason=reason)
        wait(lambda counted=counted: counted() == 1, "it is counted")
    link.close("done")
    assert learner.process.poll() is None
