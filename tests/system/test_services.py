"""The services as processes of their own, as on several machines: learner, actors and evaluator joined by one address."""

from __future__ import annotations

import shutil
import signal
import subprocess

import pytest

pytestmark = pytest.mark.system


def test_actors_that_start_first_connect_when_the_learner_comes(colony, wait, balances):
    """A cluster starts its pods in any order; a service ends within its time limit after SIGTERM, with its work saved.

    Along the way: every endpoint answers, Prometheus can parse the metrics, an evaluator without settings of its own plays as
    the run's settings say (at once, not after a minute), and an actor that waits for credit from a stuck learner stays healthy.
    """
    actors = [colony.worker("actor", f"actor-{number}") for number in range(2)]
    for actor in actors:
        wait(lambda actor=actor: actor.http.get("/healthz")[0] == 200, "an actor without a learner is healthy")
        assert actor.http.get("/readyz")[0] == 503
    evaluator = colony.worker("evaluator", "evaluator")
    learner = colony.learner()
    wait(lambda: learner.http.status().get("workers") == {"actor": 2, "evaluator": 1}, "all workers are welcomed")
    wait(lambda: learner.http.status()["env_steps"] > 300, "the learner trains")
    evaluation = wait(lambda: learner.http.status()["last_evaluation"], "an evaluation is reported")
    assert evaluation["episodes"] == 4
    services = {"learner": learner, "actor": actors[0], "evaluator": evaluator}
    for name, service in services.items():
        wait(lambda service=service: service.http.get("/readyz") == (200, b"ok\n"), "all are ready")
        assert service.http.get("/healthz") == (200, b"ok\n")
        assert service.http.metric("rookery_build_info", service=name) == 1.0
        assert service.http.metric("rookery_loop_overdue_seconds") == 0.0
        assert service.http.get("/nowhere")[0] == 404
        if shutil.which("promtool"):
            page = service.http.get("/metrics")[1]
            checked = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, check=False)
            assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b""), name

    learner.signal(signal.SIGSTOP)
    waited = "rookery_actor_phase_seconds_total"
    before = actors[0].http.metric(waited, phase="credit_wait")
    wait(lambda: actors[0].http.metric(waited, phase="credit_wait") > before + 3.0, "the actor waits for a stuck learner")
    assert actors[0].http.get("/healthz")[0] == 200
    learner.signal(signal.SIGCONT)
    steps = learner.http.status()["env_steps"]
    wait(lambda: learner.http.status().get("env_steps", 0) > steps + 300, "flow resumes")
    paused = learner.http.status()["version"]
    wait(lambda: learner.http.status()["last_evaluation"]["version"] > paused, "the evaluator, which may have lost it, is back")

    actors[0].signal(signal.SIGTERM)
    assert actors[0].ended() == 0
    wait(lambda: learner.http.status()["workers"]["actor"] == 1, "its goodbye is heard")
    learner.signal(signal.SIGTERM)
    assert learner.ended() == 0
    assert [actors[1].ended(), evaluator.ended()] == [0, 0]
    summary = colony.summary()
    balances(summary["ledger"])
    assert summary["ledger"]["trained"] == summary["env_steps"] > 0
    assert (summary["ledger"]["queued"], summary["ledger"]["in_flight"]) == (0, 0)
    assert colony.checkpoints()[-1].endswith(f"{summary['learner_updates']:012d}")


def test_a_learner_that_is_moved_keeps_its_actors_and_one_that_has_finished_keeps_the_peace(colony, wait, balances):
    """As under an orchestrator, which starts everything again whenever it ends, with the same words each time.

    After SIGTERM the learner saves and drains no worker; the next one resumes. At the end of the run all processes stay, answer,
    and restart nothing; a late worker is refused because the run is over, and stays as well.
    """
    words = ("--resume-if-found", "--linger")
    learner, actor = colony.learner(*words), colony.worker("actor", "actor-0", "--linger")
    wait(lambda: learner.http.status().get("learner_updates", 0) > 0, "the learner trains")
    learner.signal(signal.SIGTERM)
    assert learner.ended() == 0
    saved = colony.summary()
    balances(saved["ledger"])
    learner = colony.learner(*words)
    wait(lambda: learner.http.status().get("learner_updates", 0) > saved["learner_updates"], "it goes on")
    assert learner.http.status()["run_id"] == saved["run_id"]
    assert actor.process.poll() is None
    assert actor.http.metric("rookery_actor_reconnects_total") >= 1
    balances(learner.http.status()["ledger"])

    learner.signal(signal.SIGTERM)
    assert learner.ended() == 0
    learner = colony.learner(*words, f"target.env_steps={colony.summary()['env_steps'] + 300}")
    wait(lambda: learner.http.status().get("phase") == "finished", "the run is over")
    late = colony.worker("evaluator", "late", "--linger")
    services = (learner, actor, late)
    wait(lambda: all(service.output.count("lingering") == 1 for service in services), "all linger")
    for service in services:
        assert service.http.get("/healthz") == (200, b"ok\n")
        assert service.http.get("/readyz") == (200, b"ok\n")
    assert actor.http.metric("rookery_actor_connected") == 0.0
    assert learner.http.metric("rookery_learner_workers_connected", role="actor") == 0.0
    final = colony.summary()
    balances(final["ledger"])
    shown = learner.http.status()
    timed = {"frames_per_second", "env_steps_per_second", "wall_seconds"}
    assert {name: shown[name] for name in final.keys() - timed} == {name: final[name] for name in final.keys() - timed}
    for service in services:
        service.signal(signal.SIGTERM)
        assert service.ended() == 0


def test_a_stop_in_the_middle_of_a_long_update_ends_in_time_with_its_work_saved(colony, wait):
    """An update of 800,000 gradient steps: SIGTERM must lead to a checkpoint without SIGKILL."""
    long = ("rollout.length=512", "learner.batch=4", "algorithm.epochs=100", "algorithm.minibatch=2")
    learner = colony.learner("env.kwargs={pause: 0.0}", *long)
    actor = colony.worker("actor", "actor-0")
    trained = "rookery_learner_phase_seconds_total"
    wait(lambda: learner.http.metric(trained, phase="train") > 0.5, "the first update is under way")
    learner.signal(signal.SIGTERM)
    assert learner.ended() == 0
    assert actor.ended() == 0
    assert colony.summary()["learner_updates"] == 1
    assert colony.checkpoints()[-1] == "checkpoint-000000000001"
