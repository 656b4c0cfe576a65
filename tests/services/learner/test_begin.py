"""How a run begins: the memory it asks for is told, and refused where it is not there."""

from __future__ import annotations

import logging

import pytest

from common.algorithms.settings.dqn import DQNSettings
from common.envs.spec import ActionSpec, EnvSpec
from common.errors import ConfigError
from common.models.spec import ModelSettings
from common.runtime import memory
from common.runtime.logs import PlainFormatter
from common.runtime.tree import Settings
from services.learner import begin

pytestmark = pytest.mark.service

ENV = EnvSpec(
    observation_shape=(84, 84), observation_dtype="uint8", action=ActionSpec(n=6, shape=()), frame_stack=4, frame_skip=4
)
MODEL = ModelSettings(hidden=(8,))
DQN = Settings(algorithm=DQNSettings(replay_capacity=10_000), model=MODEL)


def test_the_memory_of_a_run_is_told_at_its_start(caplog):
    """10,000 frames of 84x84 are 71 MB, and a little more."""
    with caplog.at_level(logging.INFO):
        assert begin.build(DQN, ENV, seed=0).replay_env_steps >= 10_000
    line = PlainFormatter("learner", tracebacks=False).format(caplog.records[-1])
    assert "replay_allocated env_steps=10" in line
    assert "gigabytes=0.07" in line


def test_an_algorithm_without_a_memory_says_nothing(caplog):
    """PPO."""
    with caplog.at_level(logging.INFO):
        begin.build(Settings(model=MODEL), ENV, seed=0)
    assert not caplog.records


def test_a_memory_larger_than_what_is_free_is_refused(monkeypatch):
    """A pod with 64 MB: better now than when it is killed, an hour from now."""
    monkeypatch.setattr(memory, "available_bytes", lambda: 64_000_000)
    with pytest.raises(
        ConfigError, match=r"larger than what is free here: found 0\.1 GB, wanted at most 0\.1 GB; lower algorithm"
    ):
        begin.build(DQN, ENV, seed=0)


def test_where_nothing_is_known_of_the_machine_the_run_goes_on(monkeypatch):
    """Not every system says what is free."""
    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    assert begin.build(DQN, ENV, seed=0)


def test_a_memory_that_the_system_will_not_promise_is_refused_in_the_same_way(monkeypatch):
    """Terabytes by a slip of the finger."""

    def build_algorithm(*_, **__):
        raise MemoryError("Unable to allocate 6.42 TiB for an array with shape (1000000000, 7056) and data type uint8")

    monkeypatch.setattr(begin, "build_algorithm", build_algorithm)
    with pytest.raises(
        ConfigError, match=r"cannot be allocated: found Unable to allocate 6\.42 TiB.*lower algorithm.replay_capacity"
    ):
        begin.build(DQN, ENV, seed=0)
