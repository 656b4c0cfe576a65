"""The rendered manifests, run: real commands with the environment, probes, volumes and ends that a cluster would give them."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from tests.k8s.conftest import RUN, all_ready, rendered, restarts
from tests.k8s.runner import Cluster
from tests.system.conftest import until

SOAK = int(os.environ.get("SOAK", "0"))  # `make k8s-soak`: how often each service is told to end
ENDS = SOAK or 1
PROMISED = {
    "actor": 5.0,
    "learner": 15.0,
}  # seconds from SIGTERM to exit, on a machine that is not overloaded: only the soak holds it

pytestmark = [pytest.mark.system, pytest.mark.timeout(180 + 60 * SOAK)]


def checkpoints(learner):
    """Updates of the whole checkpoints on the learner's volume."""
    (volume,) = learner.volumes
    return sorted(int(path.name.rpartition("-")[2]) for path in volume.glob("run/checkpoints/checkpoint-*"))


def test_pods_that_start_before_the_learner_wait_for_it_alive(cluster):
    """A cluster starts pods in any order; one that killed actors for want of a learner would never have any."""
    actors, evaluator = [cluster.start("actor") for _ in range(2)], cluster.start("evaluator")
    for pod in (*actors, evaluator):
        until(lambda pod=pod: pod.status.lived >= 8, f"{pod.name} is found alive longer than a hung loop would be")
        assert not pod.status.ready
    learner = cluster.start("learner")
    until(lambda: all_ready(learner, *actors, evaluator), "all are ready")
    until(lambda: learner.http.status()["peers"] == {"actor": 2, "evaluator": 1}, "all are welcomed")
    until(lambda: learner.http.status()["env_steps"] > 1000, "it trains")
    assert restarts(learner, *actors, evaluator) == [0, 0, 0, 0]
    assert [pod.http.metric("rookery_build_info", service=pod.container["name"]) for pod in (learner, *actors, evaluator)] == [
        1.0
    ] * 4


def test_actors_that_start_after_the_learner_join_it_and_a_wedged_one_is_replaced(cluster):
    """Scaling up, and the one thing that only liveness finds: a process that is there and does nothing."""
    learner = cluster.start("learner")
    until(lambda: learner.status.ready, "the learner is ready without actors")
    actors = [cluster.start("actor") for _ in range(2)]
    until(lambda: all_ready(*actors), "the actors are ready")
    wedged = actors[0].process
    actors[0].signal(signal.SIGSTOP)
    until(lambda: actors[0].status.restarts == 1, "its container is replaced")
    assert wedged.returncode == -signal.SIGKILL  # a stopped process hears no SIGTERM
    until(lambda: all_ready(*actors), "it is ready again")
    until(lambda: learner.http.status()["peers"]["actor"] == 2, "it is welcomed again")
    assert restarts(learner, *actors) == [0, 1, 0]


def test_a_killed_learner_goes_on_from_its_volume_and_its_actors_stay(cluster):
    """Power fails on the learner's node: nobody is there to resume it by hand."""
    learner, actors = cluster.start("learner"), [cluster.start("actor") for _ in range(2)]
    until(lambda: all_ready(*actors), "both actors were welcomed once")  # one alone trains, and is saved, on a slow machine
    until(lambda: len(checkpoints(learner)) > 1, "checkpoints are written")
    processes = [actor.process for actor in actors]
    run = learner.http.status()["run_id"]
    learner.signal(signal.SIGKILL)
    until(lambda: learner.status.restarts == 1, "it is started again")
    saved = checkpoints(learner)[-1]
    until(lambda: learner.status.ready, "it is ready again")
    until(lambda: learner.http.status()["learner_updates"] > saved, "it goes on from the checkpoint")
    assert learner.http.status()["version"] > saved
    until(lambda: learner.http.status()["peers"]["actor"] == 2, "its actors found it")
    assert '"event": "resumed"' in learner.logs
    assert learner.http.status()["run_id"] == run
    assert [actor.process for actor in actors] == processes
    assert restarts(*actors) == [0, 0]
    until(lambda: all(actor.http.metric("rookery_actor_reconnects_total") >= 1 for actor in actors), "the actors know it")


def terminated(cluster, learner, stays):
    """Let a learner and two actors train, delete all but the actor `stays`: seconds it took, and the next learner."""
    actor = cluster.start("actor")
    until(lambda: all_ready(learner, actor, stays), "all are ready")
    steps = learner.http.status()["env_steps"]
    until(lambda: learner.http.status()["env_steps"] > steps + 1000, "it trains")
    before, took = checkpoints(learner)[-1], {}
    for pod in (actor, learner):
        took[pod.container["name"]], code = pod.delete()
        assert code == 0, pod.logs  # by itself: a pod that is late is killed, here as there
    saved = checkpoints(learner)[-1]
    assert saved >= before
    following = cluster.start("learner")
    until(lambda: following.status.ready, "the next learner is ready")
    assert following.http.status()["learner_updates"] >= saved
    return took, following


def test_pods_are_terminated_in_time_and_the_run_goes_on(cluster, capsys):
    """Drains, upgrades and spot machines end pods all the time: each leaves within its period, its work saved or counted."""
    learner, stays, rounds = cluster.start("learner"), cluster.start("actor"), []
    for _ in range(ENDS):
        took, learner = terminated(cluster, learner, stays)
        rounds.append(took)
    assert restarts(stays) == [0]
    longest = {name: max(took[name] for took in rounds) for name in PROMISED}
    with capsys.disabled():
        sys.stdout.write(
            f"\nSIGTERM to exit, longest of {ENDS}: {longest['actor']:.1f} s actor, {longest['learner']:.1f} s learner\n"
        )
    assert not SOAK or all(longest[name] <= seconds for name, seconds in PROMISED.items())


def test_a_run_that_has_ended_stays_ended(tmp_path):
    """An orchestrator restarts what ends: without lingering a finished run would begin again and again."""
    over = RUN.replace("100_000_000", "2_000")
    cluster = Cluster(rendered(tmp_path / "mine", over), tmp_path)
    try:
        learner, actor = cluster.start("learner"), cluster.start("actor")
        until(lambda: '"event": "lingering"' in learner.logs and '"event": "lingering"' in actor.logs, "both linger")
        lived = learner.status.lived, actor.status.lived
        until(lambda: learner.status.lived > lived[0] + 1 and actor.status.lived > lived[1] + 1, "both are found alive")
        assert restarts(learner, actor) == [0, 0]
        assert learner.http.status()["env_steps"] >= 2_000
        assert [pod.delete()[1] for pod in (actor, learner)] == [0, 0]
    finally:
        cluster.close()


# -- keys -----------------------------------------------------------------------------------------------------------------
