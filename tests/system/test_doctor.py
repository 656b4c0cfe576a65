"""Five real runs, each ill in its own way: `rookery doctor` names the illness, and a healthy run is called healthy."""

from __future__ import annotations

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
OWN = "env.entry_point=slow:make"
ALLOWED = "--allow-code", "slow"
EXPERIENCE = "rookery_learner_messages_received_total"


@pytest.fixture
def paced(colony):
    """A folder whose environments take so many seconds for a step (there are eight of them, one after the other)."""

    def make(name, seconds):
        folder = colony.folder / name if name else colony.folder
        folder.mkdir(exist_ok=True)
        (folder / "slow.py").write_text(SLOW)
        (folder / "pace.txt").write_text(str(seconds))
        return folder

    return make


@pytest.fixture
def examined(colony, wait):
    """Exit code and words of `rookery doctor`, asked by the addresses of all services, once experience comes."""

    def examine(*services, seconds=4, messages=1):
        learner = services[0]
        wait(lambda: learner.http.metric(EXPERIENCE, kind="trajectory") >= messages, "experience comes")
        for service in services:
            wait(lambda service=service: service.http.get("/readyz")[0] == 200, "all are ready")
        addresses = [service.http.url.removeprefix("http://") for service in services]
        doctor = colony.start("services.cli", "doctor", "--seconds", str(seconds), *addresses)
        code = doctor.ended()
        print(doctor.output)  # noqa: T201 - what a user would read
        return code, doctor.output

    return examine


def test_a_slow_environment_is_the_actors_matter(colony, paced, examined):
    """A simulator that takes 5 ms for a step: more actors are the cure, and the doctor says how many."""
    paced("", 0.005)
    code, words = examined(colony.learner(OWN, "algorithm.epochs=10"), colony.peer("actor", "one", *ALLOWED))
    assert "actor-bound: the learner waits" in words
    assert "in the environment; add actors" in words
    assert "more actors like the 1 here" in words
    assert code == 1
    assert "starved: the learner waits" in words


def test_a_slow_learner_is_the_learners_matter(colony, paced, examined):
    """A hundred epochs on each batch, two rows at a time: that is a bottleneck, and no fault."""
    paced("", 0.001)
    learner = colony.learner(OWN, "algorithm.epochs=100", "algorithm.minibatch=2", "checkpoint.every_seconds=60")
    code, words = examined(learner, colony.peer("actor", "one", *ALLOWED), messages=3)
    assert "learner-bound: the learner trains" in words
    assert "fewer epochs" in words
    assert (code, "nothing is broken" in words) == (0, True)


def test_a_slow_network_is_neither_sides_matter(colony, examined):
    """A line of 4 kB/s: both sides wait for one another, and the queue is empty."""
    with Proxy(colony.port, bytes_per_second=4_000) as line:
        actor = colony.peer("actor", "one", "--learner", line.endpoint)
        _, words = examined(colony.learner(), actor, messages=3)
    assert "network-bound: the learner waits" in words
    assert "of their way on the wire" in words
    assert "a message is under way for" in words


def test_a_straggler_is_found_among_its_peers(colony, paced, examined):
    """One of three machines is far slower: nobody would see it in the sum."""
    paced("", 0.0)
    fast, slow = paced("fast", 0.002), paced("slow", 0.05)
    actors = [colony.peer("actor", name, *ALLOWED, folder=fast) for name in ("one", "two")]
    lame = colony.peer("actor", "lame", *ALLOWED, folder=slow)
    code, words = examined(colony.learner(OWN), *actors, lame, messages=10)
    straggler = [line for line in words.splitlines() if line.startswith("straggler: ")]
    assert len(straggler) == 1
    assert f"actor {lame.http.url.removeprefix('http://')} makes" in straggler[0]
    assert "in env" in straggler[0]
    assert code == 1


def test_snapshots_that_stall_are_missed(colony, paced, examined, wait):
    """Experience still flows, the credits too, and the actor plays on by a policy of long ago."""
    paced("", 0.002)
    with Proxy(colony.port) as line:
        learner, actor = colony.learner(OWN), colony.peer("actor", "one", "--learner", line.endpoint, *ALLOWED)
        version = "rookery_actor_policy_version"
        wait(lambda: actor.http.metric(version) >= 2, "policies arrive")
        line.withheld = "snapshot"
        behind = actor.http.metric(version) + 5
        wait(lambda: learner.http.metric("rookery_learner_policy_version") >= behind, "the learner goes on")
        code, words = examined(learner, actor)
    assert "network-bound: new policies do not reach 1 of 1 actors" in words
    assert "stale snapshots: actor" in words
    assert code == 1
