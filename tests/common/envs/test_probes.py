"""The probe environments give the answers that they promise."""

from __future__ import annotations

import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from common.envs.probes import (
    aimed_action,
    counting,
    discounted_value,
    joint_action,
    matching_action,
    named_action,
    observed_value,
    pictured_action,
    recalled_action,
)

pytestmark = pytest.mark.pure


def play(env: gymnasium.Env, actions: list[int]) -> list[tuple[float, float, bool]]:
    """(observation acted on, reward, over) of each step, with resets between episodes."""
    seen, _ = env.reset(seed=5)
    steps = []
    for action in actions:
        observation, reward, terminated, truncated, _ = env.step(np.int64(action))
        steps.append((float(seen[0]), reward, terminated or truncated))
        seen = env.reset()[0] if terminated or truncated else observation
    return steps


PROBES = [
    joint_action,
    named_action,
    observed_value,
    discounted_value,
    matching_action,
    recalled_action,
    aimed_action,
    pictured_action,
    counting,
]


@pytest.mark.parametrize("function", PROBES)
def test_a_probe_is_a_proper_environment(function) -> None:
    """Probes go the way of a user's own environment, so they keep gymnasium's rules, the same seed giving the same play."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(infinity|render|spec|symmetric).*")  # advice to authors, not rules
        check_env(function(), skip_render_check=True)


def test_the_observed_probe_earns_what_is_seen() -> None:
    """A critic that gets blank or shifted observations can do no better than 0 here."""
    steps = play(observed_value(), [0] * 50)
    assert all(over and reward == seen for seen, reward, over in steps)
    assert {seen for seen, _, _ in steps} == {-1.0, 1.0}


def test_the_discount_probe_earns_at_its_second_step() -> None:
    """The value of the first observation is the discount itself."""
    assert play(discounted_value(), [0, 1, 1, 0]) == [(0.0, 0.0, False), (1.0, 1.0, True)] * 2


def test_the_memory_probe_pays_at_its_last_step_for_the_action_that_its_first_observation_named() -> None:
    """All observations but the first are equal: without a memory there is nothing to go by."""
    for action in (0, 1):
        steps = play(recalled_action(), [1 - action, 1 - action, 1 - action, action] * 20)
        episodes = [steps[begin : begin + 4] for begin in range(0, len(steps), 4)]
        for (cue, *first), *middle, last in episodes:
            assert [first, *middle] == [[0.0, False], (0.0, 0.0, False), (0.0, 0.0, False)]
            assert last == (0.0, 1.0 if (cue > 0) == (action == 1) else -1.0, True)
        assert {episode[0][0] for episode in episodes} == {-1.0, 1.0}


def test_the_action_probe_pays_for_the_action_that_matches() -> None:
    """A policy has to look before it acts: either constant action earns nothing on average."""
    for action in (0, 1):
        steps = play(matching_action(), [action] * 50)
        assert {(seen, reward) for seen, reward, _ in steps} == {(2.0 * action - 1, 1.0), (1 - 2.0 * action, -1.0)}


def test_the_aiming_probe_pays_for_actions_that_are_near() -> None:
    """Nothing is lost on the action it aims at, 0 or 2, neither of which is in the middle of -1 to 3."""
    env = aimed_action()
    seen, _ = env.reset(seed=5)
    for _ in range(20):
        best = 1.0 + seen
        assert env.step(best)[1] == 0.0
        seen, _ = env.reset()
        assert env.step(1.0 + seen + np.float32(0.5))[1] == pytest.approx(-0.25)
        seen, _ = env.reset()


@pytest.mark.parametrize(
    ("kind", "best"),
    [
        ("multi_discrete", {1.0: [6, 1], -1.0: [4, 0]}),
        ("multi_binary", {1.0: [[1, 0], [0, 1]], -1.0: [[0, 1], [1, 0]]}),
        ("box", {1.0: [[1, -2]], -1.0: [[-1, 2]]}),
    ],
)
def test_the_joint_probe_pays_for_each_component(kind, best) -> None:
    """All of it for the action that is best on each observation, and less where the components are exchanged."""
    env = joint_action(kind)
    seen, _ = env.reset(seed=5)
    for _ in range(20):
        wanted = np.array(best[seen.item()])
        most = 0.0 if kind == "box" else wanted.size
        assert env.step(wanted)[1] == most
        seen, _ = env.reset()
        assert env.step(np.array(best[seen.item()])[..., ::-1])[1] < most
        seen, _ = env.reset()


def test_the_counting_probe_ends_by_its_plan() -> None:
    """Episodes of 2 and 1 steps, the second kind truncated: what the recorder's tests rely on."""
    env = counting((2, 1), (False, True))
    env.reset(seed=0)
    rows = []
    for _ in range(6):
        observation, reward, terminated, truncated, _ = env.step(np.int64(0))
        rows.append((*map(int, observation), reward, terminated, truncated))
        if terminated or truncated:
            env.reset()
    first = [(1, 0, 0.0, False, False), (2, 0, 1.0, True, False), (1, 1, 0.0, False, True)]
    assert rows == [*first, *[(count, episode + 2, *rest) for count, episode, *rest in first]]


def test_no_two_pictures_of_the_counting_probe_are_alike() -> None:
    """A frame in the wrong place of a stack must show, and so must a zero that stacking did not make."""
    env = counting((4,), image=True)
    pictures = []
    for episode in range(3):
        pictures.append(env.reset(seed=0 if episode == 0 else None)[0])
        pictures += [env.step(np.int64(0))[0] for _ in range(4)]
    assert len({picture.tobytes() for picture in pictures}) == 15
    assert all(picture.min() > 0 for picture in pictures)


@pytest.mark.parametrize("layout", ["hwc", "chw", "hw"])
def test_the_picture_names_the_action_that_earns_one(layout) -> None:
    """By its brightest channel, or its brightest half."""
    env = pictured_action(layout)
    image, _ = env.reset(seed=3)
    for _ in range(20):
        parts = {"hwc": image[..., ::2], "chw": np.moveaxis(image[::2], 0, -1), "hw": np.stack(np.hsplit(image, 2), -1)}[layout]
        named = parts.mean((0, 1)).argmax()
        image, reward, over, _, _ = env.step(named)
        assert (reward, over) == (1.0, True)
        image, _ = env.reset()
        assert env.step(1 - env._kind)[1] == -1.0
        image, _ = env.reset()
