"""Errors of a resumed run where a part of a checkpoint does not fit it."""

from types import SimpleNamespace

import pytest

from common.algorithms.registry import build_algorithm
from common.config.load import load_settings
from common.envs.spec import ActionSpec, EnvSpec
from common.errors import ResourceError
from common.runtime.checkpoint_files import Checkpoint
from common.runtime.checkpoints import STATE_SETTINGS, CheckpointStore
from services.learner.saving import restore_checkpoint

pytestmark = pytest.mark.service

ENV = EnvSpec(
    observation_shape=(4,), observation_dtype="float32", action=ActionSpec(choices=(2,), shape=()), frame_stack=1, frame_skip=1
)


def learner(*overrides):
    """The algorithm and the record of a run with a small memory."""
    given = ["checkpoint.replay=true", "algorithm.replay_capacity=6000", "learner.max_policy_lag=64", *overrides]
    settings = load_settings(preset="cartpole-dqn", overrides=given, environ={}).settings
    streams = settings.actor.count * settings.env.num_envs
    algorithm = build_algorithm(settings.algorithm, model=settings.model, env=ENV, seed=1, streams=streams)
    record = SimpleNamespace(settings=settings, load_state_dict=lambda *_: None, lockstep_broken="")
    return algorithm, record


def test_a_memory_that_was_laid_out_for_fewer_environments_names_the_setting(tmp_path):
    algorithm, record = learner("actor.count=4")
    counters = {"record": {}, "session": {}, STATE_SETTINGS: record.settings.state_settings}
    checkpoint = Checkpoint(
        run_id="r",
        version=1,
        env_steps=0,
        architecture="a",
        counters=counters,
        state=algorithm.state_dict(),
        replay=algorithm.replay_state(),
    )
    algorithm, record = learner("actor.count=12")
    session = SimpleNamespace(saved=SimpleNamespace(load_state_dict=lambda _: None))
    with pytest.raises(ResourceError, match=r"another layout: found actor\.count=4, wanted actor\.count=12; resume with its"):
        restore_checkpoint(
            checkpoint, algorithm=algorithm, record=record, session=session, store=CheckpointStore(tmp_path, keep=1)
        )
