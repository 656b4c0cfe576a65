"""Whole episodes: which of them count, and what the policy sees."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from common.envs.make import build
from common.envs.spec import EnvSettings
from common.envs.stacking import stack
from common.envs.vector import Transition
from common.policies.episodes import Episodes, Tally, of_all_agents

pytestmark = pytest.mark.pure


def transition(reward, ended, valid=None):
    valid = np.array([True] * len(reward) if valid is None else valid)
    ended, none = np.array(ended), np.zeros(len(reward), np.bool_)
    fields = {"terminated": ended, "truncated": none, "valid": valid, "start": ~valid, "life_lost": none}
    empty = np.zeros(0, np.int32)
    return Transition(
        observation=np.zeros((len(reward), 1)),
        reward=np.array(reward, np.float32),
        final_index=empty,
        final_observation=empty,
        **fields,
    )


def test_short_episodes_are_not_counted_more_often_than_long_ones():
    """Environment 0 ends after one step and begins again; its first return stands, and its later steps change none."""
    tally = Tally(2, 2)
    steps = [([1, 1], [True, False]), ([50, 1], [False, False]), ([50, 1], [True, False]), ([50, 1], [True, True])]
    assert [tally.add(transition(reward, ended)) for reward, ended in steps] == [2] * 4  # all that were played
    assert (tally.returns.tolist(), tally.lengths.tolist(), tally.complete) == ([1.0, 4.0], [1, 4], True)


def test_the_row_that_resets_is_no_step():
    tally = Tally(2, 1)
    steps = [([1.0], [True], [True]), ([0.0], [False], [False]), ([3.0], [True], [True])]
    assert [tally.add(transition(*step)) for step in steps] == [1, 0, 1]
    assert (tally.returns.tolist(), tally.lengths.tolist(), tally.ended) == ([1.0, 3.0], [1, 1], 2)


@pytest.mark.parametrize(("episodes", "num_envs", "each"), [(1, 2, [1]), (3, 4, [1, 1]), (5, 6, [1] * 3), (10, 8, [2, 1, 1, 1])])
def test_all_agents_of_an_environment_count_as_often(episodes, num_envs, each):
    """One earns what the other loses: their mean is 0, also where the episodes asked for do not make pairs."""
    tally = Tally(of_all_agents(episodes, 2), num_envs, agents=2)
    while not tally.complete:
        tally.add(transition([1.0, -1.0] * (num_envs // 2), [True] * num_envs))
    assert tally.returns.tolist() == [value for count in each for value in [1.0] * count + [-1.0] * count]


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize(("episodes", "num_envs", "lengths"), [(7, 3, [3, 1, 5, 3, 1, 3, 1]), (2, 2, [3, 3]), (3, 1, [3, 1, 5])])
def test_each_environment_plays_its_share(autoreset, episodes, num_envs, lengths):
    """The environments count their steps: an episode of n steps returns 0 + 1 + ... + n-1."""
    with closing(build(EnvSettings(entry_point="common.envs.probes:counting", autoreset=autoreset), num_envs)) as environment:
        played = Episodes(environment, episodes=episodes, seed=1)
        while not played.complete:
            played.step(np.zeros(num_envs, np.int64))
    assert played.tally.lengths.tolist() == lengths
    assert played.tally.returns.tolist() == [n * (n - 1) / 2 for n in lengths]


@pytest.mark.parametrize(("size", "image"), [(1, True), (4, True), (3, False), (1, False)])
def test_the_policy_sees_the_stacks_of_training(size, image):
    """Beside the function that the actor and the learner share, over several episodes."""
    settings = EnvSettings(entry_point="common.envs.probes:counting", kwargs={"image": image}, frame_stack=size)
    with closing(build(settings, 2)) as environment, closing(build(settings, 2)) as other:
        played = Episodes(environment, episodes=8, seed=1)
        first = other.reset(1)
        frames, starts = [np.zeros_like(first)] * (size - 1) + [first.copy()], [np.ones(2, np.bool_)]
        while not played.complete:
            wanted = stack(np.array(frames), np.array(starts))[-1]
            assert np.array_equal(played.observation, wanted)
            assert played.observation.shape[1:] == environment.spec.network_input_shape
            played.step(np.zeros(2, np.int64))
            step = other.step(np.zeros(2, np.int64))
            frames.append(step.observation.copy())
            starts.append(step.start.copy())
