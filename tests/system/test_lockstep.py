"""Lockstep with real processes, which the kernel schedules as it likes."""

from __future__ import annotations

import signal

import pytest

pytestmark = pytest.mark.system


def test_two_runs_of_cartpole_with_three_actors_end_with_the_same_weights(colony, balances):
    """From the command line to summary.json: equal hashes of the parameters, and the summary says that they must be."""
    words = ("run.mode=lockstep", "actor.count=3", "evaluator.enabled=false", "target.env_steps=4_000", "algorithm.epochs=2")
    summaries = []
    for number in range(2):
        colony.run_dir = colony.folder / f"run-{number}"
        run = colony.train(*words, preset="cartpole")
        assert run.ended() == 0, run.output
        summaries.append(colony.summary())
    first, second = summaries
    assert (first["reproducible"], second["reproducible"]) == (True, True)
    assert first["policy_lag"]["max"] == 0
    assert (first["env_steps"], first["parameters_sha256"]) == (second["env_steps"], second["parameters_sha256"])
    balances(first["ledger"])


def test_a_run_whose_learner_and_actor_are_killed_ends_with_the_weights_of_one_that_is_left_alone(colony, wait, balances):
    """SIGKILL to each once, after the first checkpoint; whatever they were doing."""
    words = ("run.mode=lockstep", "run.seed=3", "actor.count=2", "target.env_steps=20_000", "checkpoint.every_seconds=0.1")
    summaries = []
    for name in ("alone", "killed"):
        colony.run_dir = colony.folder / name
        learner = colony.learner(*words)
        actors = {number: colony.peer("actor", f"actor-{number}") for number in range(2)}
        if name == "killed":
            wait(colony.checkpoints, "a checkpoint")
            actors[1].signal(signal.SIGKILL)
            actors[1] = colony.peer("actor", "actor-1")
            learner.signal(signal.SIGKILL)
            learner.process.wait()
            learner = colony.learner("--resume", *words)
        assert learner.ended() == 0, learner.output
        for actor in actors.values():
            assert actor.ended() == 0, actor.output
        summaries.append(colony.summary())
        balances(summaries[-1]["ledger"])
    alone, killed = summaries
    assert (alone["reproducible"], killed["reproducible"]) == (True, True)
    timeless = ("learner_updates", "env_steps", "episodes", "mean100", "parameters_sha256")
    assert [killed[fact] for fact in timeless] == [alone[fact] for fact in timeless]


def test_lockstep_that_cannot_be_is_refused_in_one_line(colony):
    """A budget of time would end two runs at two places: exit code 2, nothing left behind."""
    run = colony.train("run.mode=lockstep", "target.wall_seconds=60", preset="cartpole")
    assert run.ended() == 2
    assert "target.wall_seconds: found 60, wanted null in lockstep" in run.output
    assert len(run.output.strip().splitlines()) == 1
    assert not colony.run_dir.exists()
