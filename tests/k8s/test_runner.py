"""The rendered manifests, run: real commands with the environment, probes and volumes that a cluster would give them.

What needs no cluster to be shown: the commands of the manifests start services that find one another and keep their run. Scaling,
evictions, changed runs, the natural end, keys and refusals are in tests/cluster.
"""

from __future__ import annotations

import signal
import sys

import pytest

from tests.k8s.conftest import all_ready, restarts
from tests.k8s.runner import SOAK
from tests.system.conftest import until

ENDS = SOAK or 1

pytestmark = [pytest.mark.system, pytest.mark.timeout(410 + 60 * SOAK)]


def checkpoints(learner):
    """Updates of the whole checkpoints on the learner's volume."""
    (volume,) = learner.volumes
    return sorted(int(path.name.rpartition("-")[2]) for path in volume.glob("run/checkpoints/checkpoint-*"))


def wedged(actor):
    """Stop all threads of an actor, which only liveness finds, and wait for the next one."""
    process = actor.process
    actor.signal(signal.SIGSTOP)
    until(lambda: actor.status.restarts == 1, "its container is replaced")
    assert process.returncode == -signal.SIGKILL  # a stopped process hears no SIGTERM


def test_pods_that_start_before_the_learner_wait_for_it_alive_and_stay_when_it_is_killed(cluster):
    """A cluster starts pods in any order, and no learner is resumed by hand after its node lost power."""
    actors, evaluator = [cluster.start("actor") for _ in range(2)], cluster.start("evaluator")
    for pod in (*actors, evaluator):
        until(lambda pod=pod: pod.status.lived >= 8, f"{pod.name} is found alive longer than a hung loop would be")
        assert not pod.status.ready
    learner = cluster.start("learner")
    until(lambda: all_ready(learner, *actors, evaluator), "all are ready")
    until(lambda: learner.http.status().get("workers") == {"actor": 2, "evaluator": 1}, "all are welcomed")
    until(lambda: learner.http.status().get("env_steps", 0) > 300, "it trains")
    assert restarts(learner, *actors, evaluator) == [0, 0, 0, 0]
    assert [pod.http.metric("rookery_build_info", service=pod.container["name"]) for pod in (learner, *actors, evaluator)] == [
        1.0
    ] * 4

    until(lambda: len(checkpoints(learner)) > 1, "checkpoints are written")
    processes = [actor.process for actor in actors]
    run = learner.http.status()["run_id"]
    learner.signal(signal.SIGKILL)
    until(lambda: learner.status.restarts == 1, "it is started again")
    saved = checkpoints(learner)[-1]
    until(lambda: learner.status.ready, "it is ready again")
    until(lambda: learner.http.status().get("learner_updates", 0) > saved, "it goes on from the checkpoint")
    assert learner.http.status()["version"] > saved
    until(lambda: learner.http.status()["workers"]["actor"] == 2, "its actors found it")
    assert '"event": "resumed"' in learner.logs
    assert learner.http.status()["run_id"] == run
    assert [actor.process for actor in actors] == processes
    assert restarts(*actors) == [0, 0]
    until(lambda: all(actor.http.metric("rookery_actor_reconnects_total") >= 1 for actor in actors), "the actors know it")


def terminated(cluster, learner, actor, stays):
    """Let a learner and two actors train, delete all but the actor `stays`: seconds it took, and the next learner."""
    until(lambda: all_ready(learner, actor, stays), "all are ready")
    steps = learner.http.status()["env_steps"]
    until(lambda: learner.http.status()["env_steps"] > steps + 300, "it trains")
    before, took = checkpoints(learner)[-1:], {}
    for pod in (actor, learner):
        took[pod.container["name"]], code = pod.delete()
        assert code == 0, pod.logs  # by itself: in the soak a pod that is late is killed, as in a cluster
    saved = checkpoints(learner)[-1:]
    assert saved >= before
    following = cluster.start("learner")
    until(lambda: following.status.ready, "the next learner is ready")
    assert following.http.status()["learner_updates"] >= saved[0]
    return took, following


def test_a_wedged_pod_is_replaced_and_pods_are_terminated_in_time_and_the_run_goes_on(cluster, capsys):
    """A process that is there and does nothing; and drains, which end pods all the time, their work saved or counted."""
    learner = cluster.start("learner")
    until(lambda: learner.status.ready, "the learner is ready without actors")
    stays, actor = (cluster.start("actor") for _ in range(2))
    until(lambda: all_ready(stays, actor), "the actors are ready")
    wedged(actor)
    until(lambda: all_ready(stays, actor), "it is ready again")
    until(lambda: learner.http.status()["workers"]["actor"] == 2, "it is welcomed again")
    assert restarts(learner, stays, actor) == [0, 0, 1]
    rounds = []
    for number in range(ENDS):
        took, learner = terminated(cluster, learner, actor if number == 0 else cluster.start("actor"), stays)
        rounds.append(took)
    assert restarts(stays) == [0]
    longest = {name: max(took[name] for took in rounds) for name in ("actor", "learner")}  # shown alone: the machine's as much
    with capsys.disabled():
        sys.stdout.write(
            f"\nSIGTERM to exit, longest of {ENDS}: {longest['actor']:.1f} s actor, {longest['learner']:.1f} s learner\n"
        )
