"""`rookery train` from end to end: a whole run, with kills at the worst moments, and a clean end by Ctrl-C."""

from __future__ import annotations

import json
import signal
from datetime import UTC, datetime

import pytest

from common.runtime.run_directory import RunDirectory
from services.cli.train.plan import Request, make_plan
from tests.system.conftest import gone

pytestmark = pytest.mark.system


def test_a_killed_actor_is_replaced_and_the_run_is_solved(colony, wait, balances):
    """The kernel kills an actor for its memory in the middle of a run of CartPole: nobody has to do anything."""
    run = colony.train("target.mean100=40", "actor.count=2", "algorithm.epochs=4", preset="cartpole")
    wait(lambda: run.http.status().get("env_steps", 0) > 0, "the run trains")
    first, other = (run.children()[name] for name in ("actor-0", "actor-1"))
    for actor in (first, other):
        actor.suspend()  # else a fast machine has solved the run before
    wait(lambda: run.http.status().get("workers", {}).get("evaluator"), "the evaluator is connected")
    first.kill()
    wait(lambda: run.children().get("actor-0", first).pid != first.pid, "the actor is started again")
    other.resume()
    assert run.ended() == 0, run.output
    assert "solved" in run.output
    summary = colony.summary()
    assert summary["solved"]
    assert summary["mean100"] >= 40
    assert summary["last_evaluation"]["version"] == summary["learner_updates"]
    balances(summary["ledger"])
    assert summary["ledger"]["trained"] == summary["env_steps"]
    for name in ("config.yaml", "command.txt", "learning_curve.png", "learning_curve.csv", "tensorboard", "checkpoints"):
        assert (colony.run_dir / name).exists(), name


def test_a_killed_learner_resumes_and_its_actors_are_not_restarted(colony, wait, balances):
    """The learner dies; the supervisor starts it with --resume, the actors find it, and Ctrl-C then ends all of it."""
    run = colony.train()
    wait(lambda: len(colony.checkpoints()) > 1, "checkpoints are written")
    before = run.children()
    assert set(before) == {"learner", "evaluator", "actor-0", "actor-1"}
    before["learner"].kill()
    saved = int(colony.checkpoints()[-1].rpartition("-")[2])
    back = wait(lambda: run.children().get("learner", before["learner"]).pid != before["learner"].pid, "the learner is back")
    assert back
    wait(lambda: run.http.status().get("learner_updates", 0) > saved, "it goes on from the checkpoint")
    after = run.children()
    assert {name: after[name].pid for name in after if name != "learner"} == {
        name: before[name].pid for name in before if name != "learner"
    }
    run.signal(signal.SIGINT)
    assert run.ended() == 0, run.output
    wait(lambda: all(map(gone, after.values())), "no orphans")
    summary = colony.summary()
    balances(summary["ledger"])
    assert summary["ledger"]["trained"] == summary["env_steps"]
    assert colony.checkpoints()[-1].endswith(f"{summary['learner_updates']:012d}")


def test_of_two_resumes_at_once_one_goes_on_and_the_other_touches_nothing(colony, wait):
    """Two terminals. The second one ended with a traceback, removed the first one's addresses and took over its actors."""
    known = "env.entry_point=common.envs.probes:matching_action"  # this process does not import from the colony's folder
    few = "actor.count=1", "evaluator.enabled=false", f"learner.bind={colony.endpoint}"
    request = Request(preset=str(colony.config), overrides=(known, *few), run_dir=colony.run_dir)
    directory = RunDirectory(colony.run_dir)
    with make_plan(request, environ={}, command_line=[], now=datetime.now(UTC)):
        pass
    both = [colony.rookery("train", "--resume", "--run-dir", str(colony.run_dir)) for _ in range(2)]
    wait(lambda: any(run.process.poll() is not None for run in both), "one is refused")
    winner, loser = sorted(both, key=lambda run: run.process.poll() is not None)
    assert loser.ended() == 2
    (line,) = loser.output.splitlines()
    assert line.startswith("rookery train: error: a run is under way in this directory")
    wait(colony.checkpoints, "the other one trains")
    alone = ["--config", str(directory.config), "--run-dir", str(colony.run_dir), "--resume", "metrics.port=0"]
    before = winner.children()
    learner = colony.start("services.learner", *alone, "learner.bind=tcp://127.0.0.1:0")
    assert learner.ended() == 2
    assert "a run is under way in this directory" in learner.output
    before["learner"].kill()
    wait(lambda: winner.children().get("learner", before["learner"]).pid != before["learner"].pid, "its own learner is restarted")
    assert set(json.loads(directory.addresses.read_text())) == set(before)
    newest = colony.checkpoints()[-1]
    wait(lambda: colony.checkpoints()[-1] > newest, "it trains again, so that a stop loses nothing")
    winner.signal(signal.SIGINT)
    assert winner.ended() == 0, winner.output
    assert not directory.addresses.exists()
