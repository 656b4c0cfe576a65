"""Lockstep with real processes, which the kernel schedules as it likes."""

from __future__ import annotations

import signal

import pytest

pytestmark = pytest.mark.system

# Steps as `paced` does, and stops near the end of the run until the test says otherwise: no run is over before its kills.
HELD = """
import pathlib, time
import paced

class Held(paced.Paced):
    left = 1_600  # env steps of this process, where the run takes 2,500 of each actor

    def step(self, action):
        Held.left -= 1
        while Held.left < 0 and not pathlib.Path("killed").exists():
            time.sleep(0.01)
        return super().step(action)

def make():
    return Held(0.0005)

def alone():
    return paced.Paced(0.0005)
"""


def test_a_run_whose_learner_and_actor_are_killed_ends_with_the_weights_of_one_that_is_left_alone(colony, wait, balances):
    """SIGKILL to each once, after the first checkpoint; whatever they were doing."""
    (colony.folder / "held.py").write_text(HELD)
    words = ("run.mode=lockstep", "run.seed=3", "actor.count=2", "target.env_steps=5_000", "checkpoint.every_seconds=0.1")
    summaries = []
    for name, entry_point in (("alone", "held:alone"), ("killed", "held:make")):
        colony.run_dir = colony.folder / name
        run = *words, f"env.entry_point={entry_point}"
        learner = colony.learner(*run)
        actors = {number: colony.worker("actor", f"actor-{number}", "--allow-code", "held") for number in range(2)}
        if name == "killed":
            wait(lambda: any(not place.endswith("-000000000000") for place in colony.checkpoints()), "a checkpoint of an update")
            actors[1].signal(signal.SIGKILL)
            actors[1] = colony.worker("actor", "actor-1", "--allow-code", "held")
            learner.signal(signal.SIGKILL)
            assert learner.ended() == -signal.SIGKILL  # the run was not over
            (colony.folder / "killed").touch()
            learner = colony.learner("--resume", *run)
        assert learner.ended() == 0, learner.output
        for actor in actors.values():
            assert actor.ended() == 0, actor.output
        summaries.append(colony.summary())
        balances(summaries[-1]["ledger"])
    alone, killed = summaries
    assert (alone["reproducible"], killed["reproducible"]) == (True, True)
    assert alone["policy_lag"]["max"] == 0
    timeless = ("learner_updates", "env_steps", "episodes", "mean100", "parameters_sha256")
    assert [killed[fact] for fact in timeless] == [alone[fact] for fact in timeless]


def test_lockstep_that_cannot_be_is_refused_in_one_line(colony):
    """A budget of time would end two runs at two places: exit code 2, nothing left behind."""
    run = colony.train("run.mode=lockstep", "target.wall_seconds=60", preset="cartpole")
    assert run.ended() == 2
    assert "target.wall_seconds: found 60, wanted null where run.mode is lockstep" in run.output
    assert len(run.output.strip().splitlines()) == 1
    assert not colony.run_dir.exists()
