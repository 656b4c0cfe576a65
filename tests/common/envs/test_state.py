"""Tests of the state of environments: another environment continues from it bit for bit; states that do not fit."""

from __future__ import annotations

import copy
import enum
import functools
import itertools
import random
from collections import Counter, OrderedDict, defaultdict, namedtuple

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from common.envs.make import make
from common.envs.spec import EnvSettings
from common.envs.state import StateError, capture, restore, seed_generators, seed_spaces
from common.protocol.plain import is_plain, pack, unpack

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


def test_a_model_that_a_reset_changes_is_not_taken_for_the_same():
    """Masses that a reset draws are no part of MuJoCo's state: it is refused where the model has others, and so for options."""
    pytest.importorskip("mujoco")
    first, second = (gymnasium.make("InvertedPendulum-v5") for _ in range(2))
    for environment in (first, second):
        environment.reset(seed=1)
    state = unpack(pack(capture(first)))
    restore(second, state)
    second.unwrapped.model.body_mass[1] *= 2
    with pytest.raises(StateError, match="arrays of another model, wanted those of the model here, which no reset changes"):
        restore(second, state)
    second.unwrapped.model.body_mass[1] /= 2
    restore(second, state)
    second.unwrapped.model.opt.timestep = 0.01
    with pytest.raises(StateError, match="another model"):
        restore(second, state)


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


class Walk(gymnasium.Env):
    """Shows a position that it also has by another name."""

    observation_space, action_space = Box(-9, 9, (1,), np.float32), Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self.position = np.zeros(1, np.float32)
        self.shown = self.position
        return self.shown.copy(), {}

    def step(self, _action):
        self.position += 1
        return self.shown.copy(), 0.0, False, False, {}


def test_one_array_by_two_names_is_one_array_again():
    first, second = Walk(), Walk()
    first.reset(seed=1)
    second.reset(seed=2)
    first.step(0)
    restore(second, unpack(pack(capture(first))))
    assert first.step(0)[0] == second.step(0)[0] == 2


@pytest.mark.parametrize("share", ["board[0]", "history", "within"])
def test_attributes_that_copies_would_separate_are_named(share):
    game = Game()
    game.shared = {"board[0]": game.board[0], "history": (game.history,), "within": (game.turn, past := [], past)}[share]
    with pytest.raises(StateError, match=r"env\.(board|history|shared) and env\.shared, which share memory"):
        capture(game)


def test_environments_may_share_constants():
    """A list of the module, and views of one array; each environment begins with its own memory of its own position."""
    environment = make(EnvSettings(entry_point="common.envs.probes:matching_action", num_envs=2))
    environment.reset(1)
    moves, table = [[0, 1], [1, 0]], np.arange(6.0).reshape(2, 3)
    for env in environment.native.envs:
        vars(env.unwrapped).update(moves=moves, row=table[1])
    environment.load_state_dict(unpack(pack(environment.state_dict())))
    assert [env.unwrapped.moves for env in environment.native.envs] == [moves, moves]
    assert [env.unwrapped.row.tolist() for env in environment.native.envs] == [[3, 4, 5]] * 2


@pytest.mark.parametrize("inside", [lambda game: game, lambda _: Game()], ids=["one", "another"])
def test_a_wrapper_and_its_environment_are_compared(inside):
    """Attributes that share memory are found in all of one environment of a vector environment."""
    wrapper = gymnasium.Wrapper(game := Game())
    wrapper.inner = inside(game)
    wrapper.inner.past = wrapper.past = [1]
    vector = gymnasium.vector.SyncVectorEnv([lambda: wrapper])
    with pytest.raises(StateError, match="past, which share memory"):
        capture(vector)


def neighbours():
    """Two cells, each inside the other."""
    first = {"value": 1}
    first["next"] = {"value": 2, "next": first}
    return first


def entangled():
    """Lists from which 2**60 ways lead to the last one."""
    shared = []
    for _ in range(60):
        shared = [shared, shared]
    return shared


@pytest.mark.parametrize("value", [neighbours(), entangled(), [neighbours(), len]], ids=["cycle", "entangled", "constants"])
def test_data_that_contain_themselves_cost_a_reset_nothing_and_have_no_state(value):
    environment = make(EnvSettings(entry_point=PROBE, num_envs=1))
    env = environment.native.envs[0].unwrapped
    env.cells = value
    environment.reset(1)
    environment.step(np.zeros(1, np.int64))
    if is_plain(value):
        with pytest.raises(StateError, match=r"env\.envs\[0\].*\.cells, which share memory"):
            environment.state_dict()
    else:
        environment.state_dict()


def test_spaces_are_seeded_without_a_search_of_data():
    """Of a list only the first number is read."""
    game, read = Game(), []

    class Long(list):
        def __iter__(self):
            for number in super().__iter__():
                read.append(number)
                yield number

    game.data, game.more = Long(range(1000)), [Long(range(1000))]
    seed_spaces(game, 1)
    assert set(read) == {0}


def test_environments_that_refer_to_each_other_go_on():
    """Each is seeded, read and restored once."""
    first, second = (gymnasium.Wrapper(Game()) for _ in range(2))
    for wrapper in (first, second):
        wrapper.env.owner, wrapper.rooms = wrapper, {"other": Game(), "own": wrapper.env}
        seed_spaces(wrapper, 1)
        wrapper.reset(seed=1)
    first.env.history.append(5)
    first.rooms["other"].turn = "o"
    restore(second, unpack(pack(capture(first))))
    assert (second.env.history, second.rooms["other"].turn, second.env.owner) == ([5], "o", second)


class Draws(Walk):
    """Shows draws from everything but its own generator."""

    def __init__(self):
        self.observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)  # beside the space of the class
        self.choices = {"pair": gymnasium.spaces.Tuple([Discrete(1000), Discrete(1000)])}
        self.built = random.random()

    def step(self, action):
        numbers = random.random(), np.random.random(), *self.choices["pair"].sample()  # noqa: NPY002
        self.drawn = [*numbers, self.action_space.sample(), *self.observation_space.sample().tolist()]
        return super().step(action)


def draws(environment, number=4):
    """The draws of some steps, and the one of the construction."""
    env, drawn = environment.native.envs[0], []
    for _ in range(number):
        environment.step(np.zeros(1, np.int64))
        drawn.append((env.built, *env.drawn))
    return drawn


def drawing(seed):
    """An environment that draws, as a process builds it from its seed."""
    seed_generators(seed)
    environment = make(EnvSettings(entry_point=f"{__name__}:Draws", num_envs=1))
    environment.reset(seed)
    return environment


def test_a_seed_fixes_the_draws_from_spaces_and_from_global_generators():
    first, second, other = (draws(drawing(seed)) for seed in (3, 3, 4))
    assert first == second
    assert not {number for row in first for number in row[:3]} & {number for row in other for number in row[:3]}


def test_draws_from_spaces_and_from_global_generators_go_on():
    first = drawing(3)
    draws(first)
    state = pack(first.state_dict())
    wanted = draws(first)
    second = drawing(99)
    second.load_state_dict(unpack(state))
    found = draws(second)
    assert [row[1:] for row in found] == [row[1:] for row in wanted]


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.update({"numpy": None}),
        lambda state: state["numpy"]["state"].update({"pos": "far"}),
        lambda state: state["numpy"]["state"].update({"key": np.zeros(3, np.uint32)}),
        lambda state: state.update({"random": [3, np.zeros(3, np.uint32), None]}),
        lambda state: state["random"].__setitem__(1, np.full(625, -1)),
    ],
)
def test_states_of_global_generators_that_cannot_be_are_refused(damage):
    game = Game()
    state = unpack(pack(capture(game)))
    damage(state["process"])
    with pytest.raises(StateError, match="global generators"):
        restore(game, state)


def test_numpy_reads_no_word_beyond_its_words():
    state = unpack(pack(capture(Game())))
    state["process"]["numpy"]["state"]["pos"] = 10**6
    restore(Game(), state)
    assert capture(Game())["process"]["numpy"]["state"]["pos"] == 624


DRAWS = (np.random.default_rng(1).random, np.random.RandomState(1).rand, random.Random(1).random, np.random.PCG64(1).random_raw)
DRAWN = functools.partial(DRAWS[0], 3)


def holding(value):
    """Functions that hold `value` in each way."""
    return lambda: value, lambda held=value: held, lambda *, held=value: held, functools.partial(len, value)


HOLD = [function for value in (np.random.default_rng(1), Counter("a"), Game()) for function in holding(value)]
METHODS = (itertools.count().__next__, Counter("a").most_common, Game().step, [Game().step])

Point = namedtuple("Point", "x v")  # noqa: PYI024
Light = enum.Enum("Light", "RED GREEN")
OTHERS = (
    DRAWN,
    Point(0, 1),
    defaultdict(int),
    OrderedDict(a=1),
    Counter("a"),
    {(0, 1): 2},
    Light.RED,
    {"light": Light.RED, "steps": 3},
)


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, iter([1]), np.random.RandomState(1), [Game(), 1], *DRAWS, *OTHERS, *HOLD, *METHODS]
)
def test_what_cannot_be_read_is_named(value):
    """Half of a state would be worse than none."""
    game = Game()
    game.odd = value
    with pytest.raises(StateError, match=r"env\.odd"):
        capture(game)


@pytest.mark.parametrize("value", [np.random.rand, random.choice, np.random.default_rng, Game.step])
def test_functions_that_draw_from_global_generators_are_constants(value):
    """The state of those is saved with the process."""
    game, other = Game(), Game()
    game.draw = other.draw = value
    restore(other, unpack(pack(capture(game))))
    assert other.draw is value


def counts(game):
    """A function that changes a variable of its closure."""
    number = 0

    def count():
        nonlocal number
        number += 1

    game.run = count


def sums(game):
    total = np.zeros(1)
    game.run = lambda: np.add(total, 1, out=total)


def moves(game):
    def other():
        pass

    def one():
        game.run = other

    game.run = one


def appends(game):
    game.run = functools.partial(game.history.append, 5)


def appends_beside_a_number(game):
    game.run = functools.partial(lambda past: past.append(5), [])
    game.pair = (game.run, 3)


@pytest.mark.parametrize("prepare", [counts, sums, moves, appends, appends_beside_a_number])
def test_functions_and_their_data_that_a_step_changed_are_named(prepare):
    """They are no part of the state: another process would go on with its own."""
    first, second = Game(), Game()
    for game in (first, second):
        prepare(game)
    restore(second, unpack(pack(capture(first))))
    first.run()
    with pytest.raises(StateError, match=r"state of env\.(run|pair): found other functions, or other data in them, wanted those"):
        restore(second, unpack(pack(capture(first))))


def test_a_list_of_an_attribute_and_of_a_function_stays_one():
    first, second = Game(), Game()
    for game in (first, second):
        appends(game)
    restore(second, unpack(pack(capture(first))))
    second.run()
    assert second.history == [5]


class Seen(Walk):
    """Shows its position and more."""

    observation_space = gymnasium.spaces.Dict(position=Walk.observation_space, more=Discrete(2))

    def reset(self, **given):
        return {"position": super().reset(**given)[0], "more": 0}, {}

    def step(self, action):
        return {"position": super().step(action)[0], "more": 0}, 0.0, False, False, {}


def wrapped():
    """Wrappers of gymnasium whose functions hold lists, arrays and environments."""
    env = gymnasium.wrappers.FilterObservation(Seen(), ["position"])
    env = gymnasium.wrappers.RescaleObservation(gymnasium.wrappers.FlattenObservation(env), np.float32(-1), np.float32(1))
    return gymnasium.wrappers.TransformReward(env, lambda reward: reward + 0.5)


def test_wrappers_of_gymnasium_go_on():
    first, second = wrapped(), wrapped()
    for env in (first, second):
        env.reset(seed=1)
        seed_spaces(env, 1)
    first.step(0)
    restore(second, unpack(pack(capture(first))))
    assert first.step(0) == second.step(0)


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
        lambda state: state["env"].update({"_np_random": {"numpy generators": [{"bit_generator": "MT19937"}]}}),
        lambda state: state["env"].update({"_np_random": 3}),
        lambda state: state["env"]["_np_random"]["numpy generators"][0]["state"].update({"state": -1}),
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
