"""The environment of a run as gymnasium knows environments: observations as in training, pictures in colour."""

from __future__ import annotations

import re
from contextlib import closing

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from common.envs.make import build
from common.envs.spec import EnvSettings
from common.errors import ConfigError
from common.policies.environment import RunEnvironment
from common.policies.episodes import Episodes
from common.policies.load import load_policy

pytestmark = pytest.mark.wire  # emulators

PONG = EnvSettings(id="ALE/Pong-v5", frame_stack=4, crop=(10, 4), sticky_actions=0.25, max_episode_frames=200)
DRAWN = """
import gymnasium
import numpy as np

class Drawn(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 12}
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode, self.count = render_mode, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.count += 1
        return np.zeros(2, np.float32), 1.0, self.count == 3, False, {}

    def render(self):
        return np.full((4, 6, 3), self.count, np.uint8)

def painted(render_mode=None):
    env = Drawn(render_mode)
    env.render = lambda: "a picture"
    return env

def plain():
    return Drawn()

class Table(Drawn):
    action_space = gymnasium.spaces.MultiDiscrete([[3, 2], [2, 2]], start=[[5, 7], [0, 1]])

    def step(self, action):
        return np.zeros(2, np.float32), float(self.action_space.contains(action)), False, False, {}

class Pair:
    possible_agents, metadata, render_mode = ["a", "b"], {}, None

    def observation_space(self, agent):
        return gymnasium.spaces.Box(-1, 1, (2,), np.float32)

    def action_space(self, agent):
        return gymnasium.spaces.MultiDiscrete([3, 2], start=[5, 7])

    def reset(self, seed=None, options=None):
        self.agents = self.possible_agents
        return self._seen(), {agent: {} for agent in self.agents}

    def _seen(self):
        return {agent: np.zeros(2, np.float32) for agent in self.agents}

    def step(self, actions):
        earned = {agent: float(self.action_space(agent).contains(action)) for agent, action in actions.items()}
        ends = dict.fromkeys(self.agents, False)
        return self._seen(), earned, ends, ends, {agent: {} for agent in self.agents}

    def close(self):
        pass
"""


@pytest.mark.parametrize(
    ("kind", "best"),
    [("multi_discrete", {1.0: [6, 1], -1.0: [4, 0]}), ("multi_binary", {1.0: [[1, 0], [0, 1]], -1.0: [[0, 1], [1, 0]]})],
)
def test_an_action_is_taken_in_the_form_of_its_space(kind, best):
    """A policy answers with numbers of the space, which the environment gets back as they are."""
    with closing(RunEnvironment(EnvSettings(entry_point="common.envs.probes:joint_action", kwargs={"kind": kind}))) as env:
        observation, _ = env.reset(seed=1)
        for _ in range(10):
            action = np.array(best[observation.item()])
            assert env.action_space.contains(action.astype(env.action_space.dtype))
            assert env.step(action)[1] == action.size
            observation, _ = env.reset()


@pytest.mark.parametrize("wrong", [6, -1, 0.5, [0, 0]])
def test_an_action_that_the_environment_does_not_have_is_refused(wrong):
    """The emulator's thread ended on it, and the step waited for ever."""
    with closing(RunEnvironment(PONG)) as env:
        env.reset(seed=1)
        with pytest.raises(
            ConfigError, match=rf"no action of ALE/Pong-v5: found {re.escape(str(wrong))}, wanted one of Discrete\(6\)"
        ):
            env.step(wrong)
        env.step(5)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_continuous_action_that_is_not_finite_is_refused(wrong):
    with closing(RunEnvironment(EnvSettings(entry_point="common.envs.probes:joint_action", kwargs={"kind": "box"}))) as env:
        env.reset(seed=1)
        with pytest.raises(ConfigError, match=r"no action of common\.envs\.probes:joint_action: found"):
            env.step(np.array([[1.0, wrong]]))


def test_numbers_of_several_axes_are_taken_flat_too(games):
    """As a batch of one action is: the size decides."""
    with closing(RunEnvironment(EnvSettings(entry_point="drawn_games:Table"))) as env:
        env.reset(seed=1)
        assert [env.step(np.array(action))[1] for action in ([[7, 8], [0, 2]], [7, 8, 0, 2])] == [1.0, 1.0]


@pytest.mark.parametrize("mode", [None, "rgb_array"])
def test_an_action_from_a_batch_of_one_observation_is_taken_as_one(mode):
    """With pictures, which a second emulator draws, it ended in Python's own error."""
    with closing(RunEnvironment(PONG, render_mode=mode)) as env:
        env.reset(seed=1)
        assert env.observation_space.contains(env.step(np.array([5]))[0])


@pytest.mark.parametrize("mask", ["", "leaf"])
def test_several_agents_act_together_until_the_last_one_leaves(mask):
    """One earns 1 and leaves, the other earns 3; a mean of 2. Pictures show the age of the episode."""
    settings = EnvSettings(entry_point="common.envs.probes:leaving_agents", kwargs={"mask": mask}, action_mask=bool(mask))
    with closing(RunEnvironment(settings, render_mode="rgb_array_list")) as env:
        check_spaces = env.observation_space, env.action_space
        for episode in range(3):
            observation, _ = env.reset(seed=episode)
            rewards, ends = [], []
            while not any(ends[-1:]):
                assert check_spaces[0].contains(observation)
                coins = (observation["observation"] if mask else observation)[:, 0]
                action = (coins > 0).astype(check_spaces[1].dtype)
                assert check_spaces[1].contains(action)
                observation, reward, terminated, _, _ = env.step(action)
                rewards.append(reward)
                ends.append(terminated)
            assert rewards == [1.0, 0.5, 0.5]
            assert [picture[0, 0, 0] for picture in env.render()] == [0, 1, 2, 3]


@pytest.fixture
def games(tmp_path, monkeypatch):
    """Environments of a user's own."""
    (tmp_path / "drawn_games.py").write_text(DRAWN, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)


def test_actions_of_several_agents_begin_where_their_space_does(games):
    with closing(RunEnvironment(EnvSettings(entry_point="drawn_games:Pair"))) as env:
        env.reset(seed=1)
        assert env.step(np.array([[5, 7], [7, 8]]))[1] == 1.0


def played(env, actions, seed):
    """The observations and pictures of one episode."""
    seen, pictures = [env.reset(seed=seed)[0]], [env.render()]
    for action in actions:
        observation, _, terminated, truncated, _ = env.step(action)
        seen.append(observation)
        pictures.append(env.render())
        if terminated or truncated:
            break
    return np.array(seen), pictures


def test_observations_are_those_of_the_evaluator():
    actions = np.random.default_rng(2).integers(6, size=100)
    with closing(RunEnvironment(PONG)) as env, closing(build(PONG, 1)) as vector:
        seen, _ = played(env, actions, seed=5)
        episodes = Episodes(vector, episodes=1, seed=5)
        wanted = [episodes.observation[0].copy()]
        for action in actions[: len(seen) - 1]:
            episodes.step(np.array([action]))
            wanted.append(episodes.observation[0].copy())
    assert 30 < len(seen) < 60
    assert np.array_equal(seen, wanted)
    assert env.observation_space.contains(seen[0])


def test_every_emulator_frame_is_shown_in_colour_and_belongs_to_the_observation():
    """Full size, without a crop and without the maximum of two frames, an observation is the last frame of its step in grey."""
    settings = PONG.model_copy(update={"height": 210, "width": 160, "crop": (0, 0), "kwargs": {"maxpool": False}})
    actions = np.random.default_rng(2).integers(6, size=100)
    with closing(RunEnvironment(settings, render_mode="rgb_array_list")) as env:
        seen, pictures = played(env, actions, seed=5)
        assert env.metadata["render_fps"] == 60.0
    assert [len(step) for step in pictures[:-1]] == [1] + [4] * (len(seen) - 2)
    last = np.array([step[-1] for step in pictures[:-1]], np.float64)
    grey = last @ [0.299, 0.587, 0.114]
    assert np.abs(grey - seen[:-1, -1]).max() < 2.0
    assert np.abs(np.diff(grey, axis=0)).max() > 50.0  # the game moves
    assert np.ptp(last, axis=3).max() > 50.0  # and is no grey


def test_one_picture_a_step_comes_at_the_speed_of_steps():
    with closing(RunEnvironment(PONG, render_mode="rgb_array")) as env:
        _, (first, second) = played(env, [0], seed=1)
        assert first.shape == second.shape == (210, 160, 3)
        assert env.metadata["render_fps"] == 15.0


def test_a_reset_without_a_seed_begins_another_episode_of_the_same_stream():
    with closing(RunEnvironment(EnvSettings())) as env:
        env.reset(seed=1)
        first, second = env.reset()[0], env.reset()[0]
        env.reset(seed=1)
        assert np.array_equal(env.reset()[0], first)
        assert not np.array_equal(first, second)


def test_options_of_a_reset_are_refused():
    """They reach no vector environment: an episode would begin as any other, without a word."""
    with closing(RunEnvironment(EnvSettings(id="CartPole-v1"))) as environment:
        environment.reset(seed=1, options={})
        with pytest.raises(ConfigError, match=r"reset takes no options: found \['low'\]"):
            environment.reset(seed=1, options={"low": 0.0})


def test_it_is_an_environment_by_the_rules_of_gymnasium():
    with closing(RunEnvironment(PONG)) as env:
        check_env(env, skip_render_check=True)


def test_the_last_observation_of_an_episode_is_seen():
    settings = EnvSettings(entry_point="common.envs.probes:counting", autoreset="same_step")
    with closing(RunEnvironment(settings)) as env:
        seen, _ = played(env, [0] * 9, seed=1)
    assert seen[:, 0].tolist() == [0, 1, 2, 3]


def test_own_environments_are_drawn(games):
    settings = EnvSettings(entry_point="drawn_games:Drawn", num_envs=3)
    with closing(RunEnvironment(settings, render_mode="rgb_array_list")) as env:
        _, pictures = played(env, [0] * 9, seed=1)
        assert env.metadata["render_fps"] == 12
    assert [[picture.max() for picture in step] for step in pictures] == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    ("function", "fact"), [("plain", "draws no pictures: found render_mode None"), ("painted", "draws no pictures: found str")]
)
def test_an_environment_that_cannot_be_drawn_says_so(games, function, fact):
    settings = EnvSettings(entry_point=f"drawn_games:{function}")
    with pytest.raises(Exception, match=fact) as refusal:
        played(RunEnvironment(settings, render_mode="rgb_array"), [0], seed=1)
    assert refusal.value.exit_code == 2


@pytest.mark.parametrize(
    "change",
    [
        {"frame_stack": 2},
        {"entry_point": "common.envs.probes:aimed_action"},
        {"num_env": 2},
        {"sticky_actions": 0.25},
        {"autoreset": "same_step"},
        {"num_envs": 2},
        {"normalize_reward": True},
    ],
)
def test_an_environment_that_does_not_fit_the_policy_is_refused(make_run, change):
    run, _ = make_run("model.hidden=[8]")
    with pytest.raises(ConfigError, match=next(iter(change))):
        load_policy(run.path).make_env(**change)


@pytest.mark.parametrize("value", [np.int64(5), len])
def test_a_value_that_settings_do_not_have_is_refused(make_run, value):
    """It ended in an error of the module json."""
    kind = type(value).__name__
    with pytest.raises(ConfigError, match=rf"settings of env \(argument\): found .*{kind}.*, wanted text, numbers"):
        load_policy(make_run("model.hidden=[8]")[0].path).make_env(kwargs={"limit": value})


def test_settings_of_the_environment_can_differ_from_those_of_the_run(make_run):
    run, _ = make_run("model.hidden=[8]")
    env = load_policy(run.path).make_env(kwargs={"max_episode_steps": 3})
    seen, _ = played(env, [0] * 9, seed=1)
    assert len(seen) == 4
    assert isinstance(env, gymnasium.Env)


def test_kwargs_add_to_those_of_the_run_as_on_the_command_line(make_run):
    """They replaced them: the same override gave two environments."""
    run, _ = make_run("model.hidden=[8]", "env.kwargs={max_episode_steps: 3, sutton_barto_reward: true}")
    for given, text, wanted in (
        ({"max_episode_steps": 2}, "{max_episode_steps: 2}", {"max_episode_steps": 2, "sutton_barto_reward": True}),
        ({}, "{}", {}),
    ):
        assert load_policy(run.path).env_settings(kwargs=given).kwargs == wanted
        assert load_policy(run.path, overrides=f"env.kwargs={text}").settings.env.kwargs == wanted
