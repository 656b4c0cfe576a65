"""Whole runs in lockstep, three actors in threads that are held up at random: equal seeds, equal weights."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest

from common.algorithms.registry import ALGORITHMS
from common.algorithms.sections import ReplaySection
from common.config.schema import Settings
from common.config.sections import (
    ActorSettings,
    CheckpointSettings,
    LearnerSettings,
    RolloutSettings,
    RunSettings,
    TargetSettings,
)
from common.envs.spec import EnvSettings
from common.models.spec import ModelSettings
from tests.services.test_whole_run import Colony, assert_accounts_agree, pqn_probe, probe, q_probe, with_memory

pytestmark = [pytest.mark.service, pytest.mark.timeout(700), pytest.mark.usefixtures("one_torch_thread")]

ACTORS = 3
LONGEST = 0.004  # seconds for which a thread is held up: several env steps, or a short update


def recipe(algorithm):
    """A run of a few updates of 3 x 16 x 8 env steps, or 3 x 8 x 8 with a memory."""
    if algorithm == "dqn":
        settings = q_probe("matching_action", env_steps=1_500)
    elif algorithm == "pqn":
        settings = pqn_probe("matching_action", env_steps=3_000)
    elif algorithm in {"td3", "sac"}:
        settings = Settings(
            env=EnvSettings(entry_point="common.envs.probes:aimed_action", num_envs=8),
            model=ModelSettings(hidden=(32,)),
            algorithm=ALGORITHMS[algorithm].settings(
                minibatch=32, samples_per_insert=8, replay_capacity=5_000, warmup=200, random_env_steps=400
            ),
            rollout=RolloutSettings(length=8),
            learner=LearnerSettings(batch=1),
            target=TargetSettings(env_steps=1_500),
        )
    else:
        settings = probe("matching_action", algorithm=algorithm, env_steps=3_000)
    # With statistics of observations and rewards, which a restarted learner must continue; of gradients alone there are none.
    known = algorithm != "a3c-grad"
    model = settings.model.model_copy(update={"normalize_observation": known})
    return settings.model_copy(update={"model": model, "env": settings.env.model_copy(update={"normalize_reward": known})})


def lockstep(settings, *, seed=1, batch=1):
    """The same, its actors and learner taking turns."""
    learner = settings.learner.model_copy(update={"batch": batch})
    sections = {"run": RunSettings(mode="lockstep", seed=seed), "actor": ActorSettings(count=ACTORS), "learner": learner}
    return Settings(**{name: getattr(settings, name) for name in Settings.model_fields} | sections)


def held_up(seed):
    """Called by every thread at each env step and update: each is held up at times of its own."""
    local = threading.local()

    def wait(**_):
        if not hasattr(local, "chance"):
            local.chance = random.Random(f"{seed} {threading.current_thread().name}")
        if local.chance.random() < 0.05:
            time.sleep(local.chance.uniform(0.0, LONGEST))

    return wait


def trained(settings, folder, *, delays):
    """A whole run; what its summary says."""
    colony = Colony(settings, folder)
    colony.alive = held_up(delays)
    run = colony.run(actors=ACTORS)
    assert_accounts_agree(run)
    # The lag is 0: experience is evaluated by the very weights and statistics that acted. Some algorithms measure no ratio.
    assert len(run.first_ratio_errors) > 5
    assert not (np.array(run.first_ratio_errors) > 1e-5).any()
    return run.record.summary(run.stats, now=time.monotonic())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_two_runs_of_one_seed_end_with_the_same_weights(tmp_path, algorithm):
    """Threads are delayed differently in each run; the lag is 0 throughout, the means are equal too."""
    first, second = (trained(lockstep(recipe(algorithm)), tmp_path / str(delays), delays=delays) for delays in (1, 2))
    assert first["reproducible"]
    assert second["reproducible"]
    assert first["policy_lag"]["max"] == 0
    assert first["learner_updates"] > 5
    timeless = ("learner_updates", "env_steps", "episodes", "mean100", "parameters_sha256")
    assert [first[name] for name in timeless] == [second[name] for name in timeless]


def test_another_seed_ends_with_other_weights(tmp_path):
    first, other = (trained(lockstep(recipe("ppo"), seed=seed), tmp_path / str(seed), delays=1) for seed in (1, 2))
    assert other["parameters_sha256"] != first["parameters_sha256"]


def test_an_actor_may_have_several_messages_in_one_batch(tmp_path):
    """Batches of 4 with 3 actors become batches of 6, two of each, collected by one policy."""
    settings = lockstep(recipe("ppo"), batch=4)
    first, second = (trained(settings, tmp_path / str(delays), delays=delays) for delays in (1, 2))
    assert first["reproducible"]
    assert first["env_steps"] / first["learner_updates"] == pytest.approx(6 * 16 * 8 / 2, rel=0.1)  # every second row is a reset
    assert first["parameters_sha256"] == second["parameters_sha256"]


def killed(settings, folder, *, actors=(), learner=(), seed=0, saved=0.3):
    """A whole run in which processes are killed, and a share of `saved` checkpoints is written, at random moments."""
    colony, chance = Colony(settings, folder, killed=frozenset(actors)), random.Random(seed)
    colony.replaced, colony.learner_kills = True, list(learner)
    colony.saves = lambda: chance.random() < saved
    colony.alive = held_up(seed)
    run = colony.run(actors=ACTORS)
    ledger = run.stats.ledger
    assert (ledger["queued"], ledger["in_flight"]) == (0, 0)
    assert ledger["produced"] == ledger["trained"] + sum(ledger["dropped"].values())
    return run.record.summary(run.stats, now=time.monotonic())


def often(settings):
    """The same, with a checkpoint due after each update."""
    replay = isinstance(settings.algorithm, ReplaySection)
    return settings.model_copy(update={"checkpoint": CheckpointSettings(every_seconds=1e-9, replay=replay)})


@pytest.mark.parametrize(
    ("algorithm", "batch", "cell"),
    [("ppo", 4, ""), ("a3c-grad", 1, ""), ("dqn", 1, ""), ("sac", 1, ""), ("impala", 1, "lstm")],
)
def test_a_run_whose_processes_are_killed_ends_with_the_weights_of_one_that_is_left_alone(tmp_path, algorithm, batch, cell):
    """Actors in the middle of a rollout; the learner four times, once before its first checkpoint. Also two messages of each."""
    settings = lockstep(recipe(algorithm), batch=batch)
    if algorithm == "ppo" or cell:  # episodes span messages, and count only where their beginning was received
        env = settings.env.model_copy(
            update={"entry_point": "common.envs.probes:recalled_action" if cell else "common.envs.probes:discounted_value"}
        )
        settings = settings.model_copy(update={"env": env})
    if cell:
        settings = with_memory(settings, cell)
    alone = trained(settings, tmp_path / "alone", delays=1)
    disturbed = killed(
        often(settings), tmp_path / "killed", actors=(0, 2), learner=(0, 2, 2, 5), seed=2, saved=1.0 if cell else 0.3
    )
    timeless = ("learner_updates", "env_steps", "episodes", "mean100", "parameters_sha256", "reproducible")
    assert [disturbed[name] for name in timeless] == [alone[name] for name in timeless]
    assert disturbed["reproducible"]
