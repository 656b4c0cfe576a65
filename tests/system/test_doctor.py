"""Real runs that are ill in eight ways: `rookery doctor` names the illness, and calls a run that is only slow healthy.

A side that is to be slow sleeps or computes many times as long as the other side takes on a busy machine. Verdicts and figures
between the extremes are tested on recorded numbers, in tests/services/cli/inspect/test_doctor_diagnosis.py.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from benchmarks.chaos.proxy import Proxy

pytestmark = pytest.mark.system

# The probe's environment, on a machine that is as slow as its `pace.txt` says.
SLOW = """
import pathlib, time
import gymnasium
from common.envs.probes import matching_action

class Slow(gymnasium.Wrapper):
    pause = float(pathlib.Path("pace.txt").read_text())

    def step(self, action):
        time.sleep(self.pause)
        return super().step(action)

def make():
    return Slow(matching_action())
"""

# A network whose gradient steps keep a core busy for `pace` seconds each, on a machine of any speed; acting costs nothing.
BUSY = """
import time
import torch

class Busy(torch.nn.Flatten):
    def __init__(self, shape, *, pace):
        super().__init__()
        self.pace = pace

    def forward(self, observation):
        until = time.perf_counter() + self.pace * torch.is_grad_enabled()
        while time.perf_counter() < until:
            pass
        return super().forward(observation)
"""

# The same environment, which fails in the middle of the fifth rollout.
CRASHING = """
import gymnasium
from common.envs.probes import matching_action

class Crashing(gymnasium.Wrapper):
    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps > 70:
            raise RuntimeError("the simulator has no licence")
        return super().step(action)

def make():
    return Crashing(matching_action())
"""
SPIN = "import os\nos.sched_setaffinity(0, {{{}}})\nwhile True: pass"
OWN = "env.entry_point=slow:make", "checkpoint.every_seconds=3600"  # a late checkpoint is a fault
SHORT = "rollout.length=4", "algorithm.minibatch=32"
ALLOWED = "--allow-code", "slow", "--allow-code", "busy"
EXPERIENCE = "rookery_learner_messages_received_total"


@pytest.fixture
def paced(colony):
    """Return a function that makes a folder with environments of a given step time; an actor has eight, one after the other."""

    def make(name, seconds):
        folder = colony.folder / name if name else colony.folder
        folder.mkdir(exist_ok=True)
        (folder / "slow.py").write_text(SLOW)
        (folder / "busy.py").write_text(BUSY)
        (folder / "pace.txt").write_text(str(seconds))
        return folder

    return make


def takes(seconds):
    """Settings by which a gradient step of the learner takes `seconds`."""
    return "model.entry_point=busy:Busy", f"model.kwargs={{pace: {seconds}}}"


def address(service):
    """Host and port of the service's metrics."""
    return service.http.url.removeprefix("http://")


def doctor(colony, *services, seconds=4):
    """Exit code and words of `rookery doctor`, asked by the addresses of all services."""
    ended = colony.rookery("doctor", "--seconds", str(seconds), *map(address, services))
    code = ended.ended()
    print(ended.output)  # noqa: T201 - what a user would read
    return code, ended.output


@pytest.fixture
def examined(colony, wait):
    """Exit code and words of `rookery doctor`, once experience comes."""

    def examine(*services, seconds=4, messages=1):
        learner = services[0]
        wait(lambda: learner.http.metric(EXPERIENCE, kind="trajectory") >= messages, "experience comes")
        for service in services:
            wait(lambda service=service: service.http.get("/readyz")[0] == 200, "all are ready")
        return doctor(colony, *services, seconds=seconds)

    return examine


def test_a_slow_environment_is_actor_bound_and_a_killed_learner_is_unreachable(colony, paced, examined):
    """A rollout takes 1.6 s and the learner's gradient step a millisecond: the learner waits, whatever else the machine does.

    On a machine without a free core the actors wait for one as well. When the learner has been killed, the actor still
    answers, and waits for another learner.
    """
    paced("", 0.05)
    learner = colony.learner(*OWN, *SHORT, "algorithm.epochs=1", *takes(0.001))
    actor = colony.worker("actor", "one", *ALLOWED)
    code, words = examined(learner, actor)
    idle = r"actor-bound: the learner waits \d+ % for experience; actors spend \d+ % in the environment; add actors "
    loaded = r"cpu-starved: actors wait \d+ % of the time for a core, the learner waits \d+ % for experience; "
    assert re.search(rf"^({idle}|{loaded})", words, re.MULTILINE), words
    assert (code, "nothing is broken" in words) == (0, True)
    learner.signal(signal.SIGKILL)
    learner.ended()
    code, words = doctor(colony, learner, actor, seconds=1)
    assert "unknown: the learner is unreachable (connection refused)" in words
    assert f"LearnerDown: learner {address(learner)} does not answer: connection refused; see its log" in words
    assert code == 1


@pytest.fixture
def busy():
    """Return a function that starts four processes which keep one core busy, and names that core."""
    spinning = []

    def start():
        (core, *_) = sorted(os.sched_getaffinity(0))
        spin = [sys.executable, "-c", SPIN.format(core)]
        spinning.extend(subprocess.Popen(spin, start_new_session=True) for _ in range(4))  # Linux may share a core by sessions
        return core

    yield start
    for process in spinning:
        process.kill()
        process.wait()


def test_a_slow_learner_is_the_learners_matter_and_beside_busy_neighbours_it_lacks_cpu(colony, paced, examined, busy):
    """160 gradient steps of ten milliseconds or more on each rollout of 128 ms: that is a bottleneck, and no fault.

    With a fifth of a core it trains all the time as well, and a smaller network is not what it lacks.
    """
    paced("", 0.001)
    learner = colony.learner(*OWN, "algorithm.epochs=10", "algorithm.minibatch=8", *takes(0.01))
    actor = colony.worker("actor", "one", *ALLOWED)
    code, words = examined(learner, actor, seconds=2, messages=3)
    assert re.search(r"^(learner-bound: the learner trains|cpu-starved: the learner waits) ", words, re.MULTILINE), words
    assert (code, "nothing is broken" in words) == (0, True)
    os.sched_setaffinity(learner.process.pid, {busy()})
    code, words = doctor(colony, learner, actor, seconds=2)
    assert "cpu-starved: the learner waits" in words
    assert "times as fast, if a core were always free" in words
    assert (code, "nothing is broken" in words) == (0, True)


def test_a_slow_network_is_neither_sides_matter(colony, examined):
    """A line of 4 kB/s: both sides wait for one another, and the queue is empty."""
    with Proxy(colony.port, bytes_per_second=4_000) as line:
        actor = colony.worker("actor", "one", "--learner", line.endpoint)
        _, words = examined(colony.learner(*SHORT, "env.kwargs={pause: 0.001}"), actor, messages=3)
    assert "network-bound: the learner waits" in words
    assert "of their way on the wire" in words
    assert "a message is under way for" in words


def test_a_straggler_is_found_among_the_actors(colony, paced, examined):
    """One of three machines is far slower: nobody would see it in the sum."""
    paced("", 0.0)
    fast, slow = paced("fast", 0.005), paced("slow", 0.1)
    actors = [colony.worker("actor", name, *ALLOWED, folder=fast) for name in ("one", "two")]
    lame = colony.worker("actor", "lame", *ALLOWED, folder=slow)
    code, words = examined(colony.learner(*OWN, *SHORT), *actors, lame, messages=10)
    straggler = [line for line in words.splitlines() if line.startswith("ActorStraggler: ")]
    assert len(straggler) == 1
    assert f"actor {address(lame)} makes" in straggler[0]
    assert "in env" in straggler[0]
    assert code == 1


def test_snapshots_that_stall_are_missed(colony, paced, examined, wait):
    """Experience still flows, the credits too, and the actor acts by a policy of long ago."""
    paced("", 0.005)
    # An actor that had to wait for a credit waits for the newest policy as well: it has credits for two minutes of rollouts.
    often = *SHORT, "algorithm.epochs=1", "learner.max_policy_lag=1_000_000", "learner.credits=1024"
    with Proxy(colony.port) as line:
        learner, actor = colony.learner(*OWN, *often), colony.worker("actor", "one", "--learner", line.endpoint, *ALLOWED)
        version = "rookery_actor_policy_version"
        wait(lambda: actor.http.metric(version) >= 2, "policies arrive")
        line.withheld = "snapshot"
        behind = actor.http.metric(version) + 5
        wait(lambda: learner.http.metric("rookery_learner_policy_version") >= behind, "the learner goes on")
        code, words = examined(learner, actor)
    assert "network-bound: new policies do not reach 100 % of the actors" in words
    assert "SnapshotsStale: actor" in words
    assert code == 1


def test_an_environment_that_crashes_gets_no_advice_about_speed(colony, wait):
    """More actors would crash as well."""
    (colony.folder / "crashing.py").write_text(CRASHING)
    learner = colony.learner("env.entry_point=crashing:make")
    actor = colony.worker("actor", "one", "--allow-code", "crashing")
    actor.may_end = True
    wait(lambda: learner.http.metric(EXPERIENCE, kind="trajectory") >= 1, "experience comes")
    assert actor.ended() == 1
    assert "RuntimeError: the simulator has no licence" in actor.output
    updates = "rookery_learner_updates_total"
    wait(lambda: learner.http.metric(updates) == learner.http.metric(EXPERIENCE, kind="trajectory"), "all is trained on")
    code, words = doctor(colony, learner, actor)
    assert "unknown: no env step is made, received or trained on" in words
    assert "LearnerStalled: no update in" in words
    assert "does not answer: connection refused; see its log" in words
    assert "add actors" not in words
    assert code == 1
