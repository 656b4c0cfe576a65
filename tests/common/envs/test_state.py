"""Tests of the state of environments: another environment continues from it bit for bit; states that do not fit."""

from __future__ import annotations

import copy

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from common.envs.make import make
from common.envs.spec import EnvSettings
from common.envs.state import StateError, capture, restore
from common.protocol.plain import pack, unpack

pytestmark = pytest.mark.service

PROBE = "common.envs.probes:matching_action"
READABLE = [
    EnvSettings(id="CartPole-v1", num_envs=4),
    EnvSettings(id="CartPole-v1", num_envs=4, autoreset="same_step"),
    EnvSettings(id="Pendulum-v1", num_envs=2),
    EnvSettings(id="Acrobot-v1", num_envs=1),
    EnvSettings(id="MountainCarContinuous-v0", num_envs=2),
    EnvSettings(entry_point=PROBE, num_envs=3),
]


def actions(environment, number):
    """Random actions, the same for each call."""
    random, action = np.random.default_rng(1), environment.spec.action
    for _ in range(number):
        if action.discrete:
            yield random.integers(action.n, size=environment.num_envs)
        else:
            yield random.uniform(-2, 2, (environment.num_envs, *action.shape)).astype(np.float32)


@pytest.mark.parametrize("settings", READABLE, ids=lambda settings: settings.entry_point or settings.id)
def test_another_environment_goes_on_bit_for_bit(settings):
    """Taken in the middle of episodes, through many of their ends, by an environment that had other seeds."""
    first, second = make(settings), make(settings)
    first.reset(3)
    second.reset(99)
    for action in actions(first, 57):
        first.step(action)
    second.load_state_dict(unpack(pack(first.state_dict())))
    for action in actions(first, 600):
        for here, there in zip(first.step(action), second.step(action), strict=True):
            assert here.dtype == there.dtype
            assert np.array_equal(here, there)
    first.close()
    second.close()


@pytest.mark.parametrize("name", ["HalfCheetah-v5", "Ant-v5", "Humanoid-v5", "Hopper-v5", "InvertedPendulum-v5"])
def test_a_simulation_goes_on_bit_for_bit(name):
    """MuJoCo's, with contacts, and rewards that are computed from what the last step left."""
    pytest.importorskip("mujoco")
    test_another_environment_goes_on_bit_for_bit(EnvSettings(id=name, num_envs=2))


def test_emulators_in_native_code_keep_their_state_to_themselves():
    """The vector environment of ale-py offers no state: the error names the attribute."""
    environment = make(EnvSettings(id="ALE/Pong-v5", num_envs=1))
    environment.reset(1)
    with pytest.raises(StateError, match=r"env\.ale, a ALEVectorInterface, in AtariVectorEnv"):
        environment.state_dict()
    environment.close()


class Game(gymnasium.Env):
    """An environment as a user writes one."""

    def __init__(self):
        """Set attributes of many types."""
        self.observation_space, self.action_space = Box(-1, 1, (1,), np.float32), Discrete(2)
        self.board, self.turn, self.history, self.score = np.zeros((2, 2)), "x", [], np.float32(0)
        self.rules = {"size": 2, "check": len}  # constants beside constants

    def step(self, action):
        """Never called."""
        raise NotImplementedError(action)


def test_attributes_of_a_users_environment_are_its_state():
    """Arrays, strings, scalars and lists that grow; what is a constant is left alone."""
    first, second = Game(), Game()
    first.board[1, 1], first.turn, first.score = 5, "o", np.float32(0.1)
    first.history += [1, 2]
    first.late = True  # set first by a step
    restore(second, unpack(pack(capture(first))))
    assert (second.board[1, 1], second.turn, second.history, second.late) == (5, "o", [1, 2], True)
    assert (type(second.score), second.score) == (np.float32, np.float32(0.1))
    assert second.rules["check"] is len
    first.history.append(3)
    assert second.history == [1, 2]


@pytest.mark.parametrize("value", [object(), {1, 2}, iter([1]), np.random.RandomState(1), [Game(), 1]])
def test_what_cannot_be_read_is_named(value):
    """Half of a state would be worse than none."""
    game = Game()
    game.odd = value
    with pytest.raises(StateError, match=r"env\.odd"):
        capture(game)


def damaged(state, damage):
    """A copy with one thing changed."""
    changed = copy.deepcopy(state)
    damage(changed)
    return changed


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.clear(),
        lambda state: state.update({"env.more": {}}),
        lambda state: state.update({"env": 3}),
        lambda state: state["env"].update({"step": 3}),  # a method
        lambda state: state["env"].update({"rules": {}}),  # a constant
        lambda state: state["env"].update({"action_space": None}),
        lambda state: state["env"].update({"__class__": "x"}),
        lambda state: state["env"].update({"not a name": 1}),
        lambda state: state["env"].update({7: 1}),
        lambda state: state["env"].update({"board": np.zeros((3, 3))}),
        lambda state: state["env"].update({"board": np.zeros((2, 2), np.int64)}),
        lambda state: state["env"].update({"board": "x"}),
        lambda state: state["env"].update({"turn": 1}),
        lambda state: state["env"].update({"_np_random": {"numpy generator": {"bit_generator": "MT19937"}}}),
        lambda state: state["env"].update({"_np_random": 3}),
        lambda state: state["env"]["_np_random"]["numpy generator"]["state"].update({"state": -1}),
    ],
)
def test_a_state_of_unknown_origin_replaces_nothing_but_data(damage):
    """No state that a learner sends replaces a method, space, class or shape; one error names the attribute."""
    game = Game()
    game.reset(seed=1)
    state = unpack(pack(capture(game)))
    with pytest.raises(StateError):
        restore(game, damaged(state, damage))
    assert game.step.__func__ is Game.step
    assert isinstance(game.action_space, Discrete)


@pytest.mark.parametrize("saved", [{}, {"ended": None}, {"ended": np.zeros(3, np.bool_), "lives": np.zeros(2, np.int32)}])
def test_a_state_of_another_number_of_environments_is_refused(saved):
    """Before anything is set."""
    environment = make(EnvSettings(entry_point=PROBE, num_envs=2))
    environment.reset(1)
    with pytest.raises(StateError):
        environment.load_state_dict(saved)
    environment.close()
