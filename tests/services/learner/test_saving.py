"""Errors of a resumed run where a part of a checkpoint does not fit it."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from common.algorithms.registry import build_algorithm, rollout_schema
from common.config.load import load_settings
from common.envs.spec import ActionSpec, EnvSpec
from common.errors import ResourceError
from common.protocol.events import Experience, WorkerKey
from common.runtime.checkpoint_files import Checkpoint
from common.runtime.checkpoints import STATE_SETTINGS, CheckpointStore
from services.learner.rates import PolicyLag
from services.learner.record import EPISODES, RunRecord
from services.learner.saving import restore_checkpoint, restore_without_sessions

pytestmark = pytest.mark.service

ENV = EnvSpec(
    observation_shape=(4,), observation_dtype="float32", action=ActionSpec(choices=(2,), shape=()), frame_stack=1, frame_skip=1
)


def learner(*overrides, env_steps=25, over=""):
    """The algorithm and the record of a run with a small memory."""
    given = ["checkpoint.replay=true", "algorithm.replay_capacity=6000", "learner.max_policy_lag=64", *overrides]
    settings = load_settings(preset="cartpole-dqn", overrides=given, environ={}).settings
    streams = settings.actor.count * settings.env.num_envs
    algorithm = build_algorithm(settings.algorithm, model=settings.model, env=ENV, seed=1, streams=streams)
    own = {
        "load_state_dict": lambda *_: None,
        "begin_environments_anew": lambda: None,
        "env_steps": env_steps,
        "settings_changed": [],
        "over": lambda _: over,
    }
    return algorithm, SimpleNamespace(settings=settings, lockstep_broken="", task_changed="", **own)


def checkpoint_of(algorithm, record):
    """A checkpoint with its replay memory."""
    counters = {"record": {}, "session": {}, STATE_SETTINGS: record.settings.state_settings}
    return Checkpoint(
        run_id="r",
        version=1,
        env_steps=0,
        architecture="a",
        counters=counters,
        state=algorithm.state_dict(),
        replay=algorithm.replay_state(),
        segments=algorithm.replay_segments(),
    )


def rows(length):
    """Experience of one environment, in which nothing ends."""
    settings = load_settings(preset="cartpole-dqn", environ={}).settings
    shapes = rollout_schema(settings.algorithm, model=settings.model, env=ENV, length=length, num_envs=1)
    arrays = {spec.name: np.zeros([max(0, size) for size in spec.shape], spec.dtype) for spec in shapes}
    return Experience(version=0, env_steps=length, arrays=arrays | {"valid": np.ones((length, 1), bool)})


SESSION = SimpleNamespace(saved=SimpleNamespace(load_state_dict=lambda _: None, load_ledgers=lambda _: None))


def test_a_memory_that_was_laid_out_for_fewer_environments_names_the_setting(tmp_path):
    checkpoint = checkpoint_of(*learner("actor.count=4"))
    algorithm, record = learner("actor.count=12")
    store = CheckpointStore(tmp_path, keep=1)
    with pytest.raises(ResourceError, match=r"another layout: found actor\.count=4, wanted actor\.count=12; resume with its"):
        restore_checkpoint(checkpoint, algorithm=algorithm, record=record, session=SESSION, store=store)


@pytest.mark.parametrize(("changed", "kept"), [("", 16), ("env.kwargs was {}, is {'sutton_barto_reward': True}", 0)])
def test_the_memory_of_another_environment_is_not_restored(changed, kept, tmp_path):
    """Its rewards and transitions would be trained on until they are overwritten."""
    algorithm, record = learner()
    algorithm.ingest([rows(20)])
    store = CheckpointStore(tmp_path, keep=1)
    store.save(checkpoint_of(algorithm, record))
    algorithm, record = learner()
    record.task_changed = changed

    def restore(checkpoint):
        restore_checkpoint(checkpoint, algorithm=algorithm, record=record, session=SESSION, store=store)

    store.load_newest(architecture="a", warn=pytest.fail, restore=restore)
    assert len(algorithm._replay) == kept
    assert bool(record.lockstep_broken) == bool(changed)


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [(2, "resumed without a version of which every rank has a checkpoint"), (3, "resumed with another number of ranks")],
)
def test_replay_memories_that_a_resume_of_ranks_loses_are_in_the_log_with_the_reason(ranks, reason, caplog):
    """The disk of one rank was lost, or the run continues from its copy, which has the checkpoints of rank 0 alone."""
    algorithm, record = learner(f"learner.ranks={ranks}", "actor.count=6")
    saved = checkpoint_of(algorithm, record)
    saved = replace(saved, counters={**saved.counters, "ledgers": [{}, {}]})
    restore_without_sessions(saved, algorithm=algorithm, record=record, session=SESSION)
    (entry,) = caplog.records
    assert (entry.message, entry.rookery_fields) == ("replay_memory_lost", {"reason": reason, "env_steps": 25})
    assert record.lockstep_broken == reason


@pytest.mark.parametrize(
    ("saved", "own", "lost"),
    [("false", {}, True), ("false", {"env_steps": 0}, False), ("true", {}, False), ("false", {"over": "target reached"}, False)],
)
def test_a_resume_that_fills_the_replay_memory_anew_says_so(saved, own, lost, tmp_path, caplog):
    """Its warm-up has no gradient steps: the results of such a run are not those of one that was not stopped."""
    algorithm, record = learner(f"checkpoint.replay={saved}", **own)
    store = CheckpointStore(tmp_path, keep=1)
    store.save(checkpoint_of(algorithm, record))
    store.load_newest(
        architecture="a",
        warn=pytest.fail,
        restore=lambda found: restore_checkpoint(found, algorithm=algorithm, record=record, session=SESSION, store=store),
    )
    assert [entry.message for entry in caplog.records] == (["replay_memory_lost"] if lost else [])
    assert record.settings_changed == ([{"env_steps": 25, "settings": ["replay memory filled anew"]}] if lost else [])


@pytest.mark.parametrize(("lags", "lag"), [([[0, 1, 25.0, 25], [5, 5, 375.0, 75]], (0, 5, 400.0, 100)), (None, (1, 1, 25.0, 25))])
def test_rank_0_continues_with_the_policy_lag_of_all_ranks(lags, lag):
    """The checkpoint of a single rank has that of the rank alone."""
    algorithm, record = learner()
    saved = checkpoint_of(algorithm, record)
    saved = replace(saved, counters={**saved.counters, "ledgers": [{}, {}]} | ({"lags": lags} if lags else {}))
    record.lag = PolicyLag(1, 1, 25.0, 25)
    restore_without_sessions(saved, algorithm=algorithm, record=record, session=SESSION)
    assert record.lag == PolicyLag(*lag)


@pytest.mark.parametrize("left", [0, 1])
def test_in_lockstep_environments_begin_anew_where_the_sessions_of_ranks_ended(left):
    """As from the copy of a run, which lacks the checkpoints of other ranks: the first episodes to end are the short ones."""
    overrides = ["run.mode=lockstep", "learner.ranks=2", "actor.count=2", "env.num_envs=2", "target.mean100=-50"]
    settings = load_settings(preset="cartpole", overrides=overrides, environ={}).settings
    before, after = (RunRecord(settings=settings, run_id="r", frame_skip=1, started_at=0.0) for _ in range(2))

    def ended(record, cost, count, envs):
        arrays = {"episode_env": np.array(envs)}
        sample = Experience(worker=WorkerKey(name="one", incarnation=0), index=0, version=0, env_steps=4, arrays=arrays)
        record.ended([-cost] * count, [int(cost)] * count, 1.0, record.coverage.add([sample], ()))

    ended(before, 100.0, EPISODES, [0] if left else [0, 1])
    assert (before.unfinished, before.covered) == (left, True)
    algorithm, other = learner()
    saved = checkpoint_of(algorithm, other)
    counters = {**saved.counters, "record": before.state_dict(now=5.0), "ledgers": [{}, {}]}
    restore_without_sessions(replace(saved, counters=counters), algorithm=algorithm, record=after, session=SESSION)
    assert (after.covered, after.before_leaving) == (False, left * EPISODES)
    ended(after, 20.0, EPISODES, [0])
    assert (after.mean_return, after.unfinished, after.mean_is_complete, after.solved) == (-20.0, 1, False, False)
