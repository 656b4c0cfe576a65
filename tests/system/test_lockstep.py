"""Lockstep with real processes, which the kernel schedules as it likes."""

from __future__ import annotations

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


def test_lockstep_that_cannot_be_is_refused_in_one_line(colony):
    """A budget of time would end two runs at two places: exit code 2, nothing left behind."""
    run = colony.train("run.mode=lockstep", "target.wall_seconds=60", preset="cartpole")
    assert run.ended() == 2
    assert "target.wall_seconds: found 60, wanted null in lockstep" in run.output
    assert len(run.output.strip().splitlines()) == 1
    assert not colony.run_dir.exists()
