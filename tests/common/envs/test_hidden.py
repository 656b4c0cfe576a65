"""Environments that hide what a policy with memory has to find."""

import gymnasium
import numpy as np
import pytest

from common.envs.hidden import TMaze, cartpole

pytestmark = pytest.mark.pure

FORWARD, LEFT, RIGHT = range(3)


def walk(maze, actions):
    """Take the actions; return what the last one gave."""
    return [maze.step(np.int64(action)) for action in actions][-1]


def cued(cue, **kwargs):
    """Return a maze that has just shown this cue."""
    maze, seed = TMaze(**kwargs), 0
    while maze.reset(seed=seed)[0][0] != cue:
        seed += 1
    return maze


@pytest.mark.parametrize(("cue", "turn", "reward"), [(1, RIGHT, 1), (1, LEFT, 0), (-1, RIGHT, 0), (-1, LEFT, 1)])
def test_only_the_turn_that_the_cue_names_is_rewarded(cue, turn, reward):
    maze = cued(cue)
    assert walk(maze, [FORWARD] * 20)[1:] == (0.0, False, False, {})
    assert maze.step(np.int64(turn))[1:] == (reward, True, False, {})


def test_the_cue_is_in_the_first_observation_alone_even_where_the_agent_stays():
    """What follows it must be the same after both cues, or no memory is needed."""
    seen = {cue: [step[0].tolist() for step in map(cued(cue).step, [LEFT, RIGHT, *[FORWARD] * 21])] for cue in (-1, 1)}
    assert seen[1] == seen[-1] == [[0, 0]] * 21 + [[0, 1]] * 2


def test_an_agent_that_never_turns_is_truncated_and_pays_for_each_step_into_the_wall():
    assert walk(cued(1, limit=30), [FORWARD] * 20)[1:] == (0.0, False, False, {})
    assert walk(cued(1, limit=30), [FORWARD] * 29)[1:] == (-0.1, False, False, {})
    assert walk(cued(1, limit=30), [FORWARD] * 30)[1:] == (-0.1, False, True, {})


@pytest.mark.parametrize("action", [LEFT, RIGHT])
def test_a_turn_in_the_corridor_stays_where_it_is_and_costs_as_much(action):
    maze = cued(1)
    assert walk(maze, [FORWARD, action])[1:] == (-0.1, False, False, {})
    assert walk(maze, [FORWARD] * 19)[1:] == (0.0, False, False, {})
    assert maze.step(np.int64(RIGHT))[1:] == (1.0, True, False, {})


def test_a_turn_in_the_last_env_step_is_an_end_and_no_truncation():
    assert walk(cued(1, limit=21), [*[FORWARD] * 20, RIGHT])[1:] == (1.0, True, False, {})


def test_both_cues_are_equally_frequent():
    maze = TMaze()
    cues = [maze.reset(seed=seed)[0][0] for seed in range(400)]
    assert 160 < cues.count(1) < 240


def test_cartpole_shows_place_and_angle_alone():
    whole, part = gymnasium.make("CartPole-v1"), cartpole()
    np.testing.assert_array_equal(part.reset(seed=3)[0], whole.reset(seed=3)[0][[0, 2]])
    for action in (0, 1, 1):
        np.testing.assert_array_equal(part.step(action)[0], whole.step(action)[0][[0, 2]])
    assert part.observation_space.contains(part.step(1)[0])
    assert part.spec.max_episode_steps == 500
