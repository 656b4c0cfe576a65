"""Environments of every origin, in either autoreset mode, and what is said when one cannot be."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
import pytest
from ale_py.vector_env import AtariVectorEnv
from gymnasium.spaces import Box, Dict, Discrete, Graph, MultiBinary, MultiDiscrete, Space, Text, Tuple
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array
from pydantic import ValidationError

from common.conditions import unmet
from common.config.schema import Settings
from common.envs.leaves import split
from common.envs.make import make
from common.envs.probes import counting
from common.envs.spec import ActionSpec, EnvSettings
from common.envs.trial import example_frames, spec_of, trial
from common.envs.vector import VectorEnvironment
from common.errors import ConfigError, ResourceError
from tests.support.recording import recorded, unread

pytestmark = pytest.mark.service


class Echo(gymnasium.Env):
    """Any spaces; keeps the actions it gets; an episode is cut after four steps. The observation is `picture`, or zeros."""

    def __init__(self, observation: Space, action: Space, picture: np.ndarray | None = None) -> None:
        self.observation_space, self.action_space = observation, action
        self.picture, self.taken = picture, []

    def _look(self) -> Any:
        if self.picture is not None:
            return self.picture.copy()
        return self.observation_space.sample()

    def reset(self, *, seed=None, options=None):
        """Ignore the options."""
        super().reset(seed=seed, options=options)
        return self._look(), {}

    def step(self, action):
        """Keep the action."""
        self.taken.append(action)
        return self._look(), 1 / 3, False, len(self.taken) % 4 == 0, {}


DISCRETE = Discrete(3)
VECTOR = Box(-1, 1, (2,), np.float32)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Callable[..., EnvSettings]:
    """Return settings with the given function as entry point, as if it lay in a module of the user's."""

    def settings(function: Callable[..., Any], **kwargs: Any) -> EnvSettings:
        monkeypatch.setattr(importlib.import_module("common.envs.probes"), "own", function, raising=False)
        return EnvSettings(entry_point="common.envs.probes:own", **kwargs)

    return settings


def run(env: VectorEnvironment, rows: int) -> list[Any]:
    """Transitions of `rows` steps with action 0."""
    env.reset(seed=1)
    action = np.zeros((env.num_envs, *env.spec.action.shape), np.int64 if env.spec.action.discrete else np.float32)
    return [env.step(action) for _ in range(rows)]


# --- Atari -----------------------------------------------------------------------------------------------------------


def test_rows_cut_off_an_atari_image_are_gone_and_the_rest_is_as_it_was():
    """The scoreboard of Pong lies above its field; what is seen of the field must be the same picture."""
    whole, cut = (EnvSettings(id="ALE/Pong-v5", num_envs=2, height=55, width=42, crop=crop) for crop in [(0, 0), (9, 4)])
    frames = []
    for settings in (whole, cut):
        env = make(settings)
        env.reset(3)
        frames.append(np.stack([env.step(np.full(2, 2)).observation for _ in range(30)]))
        env.close()
    assert env.spec.observation_shape == (42, 42)
    np.testing.assert_array_equal(frames[1], frames[0][:, :, 9:51])


def test_a_crop_that_leaves_nothing_to_see_is_refused():
    """A typing slip: 55 rows, of which 50 are cut off."""
    with pytest.raises(ValidationError, match=r"leaves 5 of 55 rows; wanted at least 16"):
        EnvSettings(height=55, crop=(9, 41))


@pytest.mark.parametrize("crop", [(10, 7), (20, 20)])
def test_a_crop_of_the_image_of_a_function_is_measured_by_that_image(own, crop) -> None:
    """`env.height` has no effect on it."""

    def function(height: int) -> AtariVectorEnv:
        return AtariVectorEnv(game="pong", num_envs=1, stack_num=1, img_height=height, img_width=32)

    assert make(own(function, num_envs=1, crop=(60, 60), kwargs={"height": 136})).spec.observation_shape == (16, 32)
    assert make(own(function, num_envs=1, kwargs={"height": 12})).spec.observation_shape == (12, 32)
    said = f"env.crop leaves too few rows of the image: found {32 - sum(crop)} of 32, wanted at least 16; change env.crop"
    with pytest.raises(ConfigError, match=said):
        make(own(function, num_envs=1, crop=crop, kwargs={"height": 32}))


def test_atari_gives_single_grey_frames_of_the_size_asked_for() -> None:
    """Frames cross the wire once, so the environment must not stack them itself."""
    settings = EnvSettings(id="ALE/MsPacman-v5", num_envs=2, height=42, width=50, frame_stack=4, frame_skip=3)
    env = make(settings)
    assert (env.spec.observation_shape, env.spec.observation_dtype) == ((42, 50), "uint8")
    assert (env.spec.frame_stack, env.spec.frame_skip) == (4, 3)
    assert env.spec.action == ActionSpec(choices=(9,), shape=())
    assert env.reset(seed=2**40).shape == (2, 42, 50)
    env.close()
    assert spec_of(settings) == env.spec
    assert spec_of(settings.model_copy(update={"full_action_space": True})).action.n == 18


@pytest.mark.parametrize(("mode", "period"), [("next_step", 26), ("same_step", 25)])
def test_atari_episodes_are_cut_and_reset_as_the_mode_says(mode: Any, period: int) -> None:
    """100 emulator frames are 25 env steps; next_step adds a row for the reset, same_step hands over the last frame."""
    env = make(EnvSettings(id="ALE/Pong-v5", num_envs=2, autoreset=mode, height=42, width=42, max_episode_frames=100))
    rows = run(env, 60)
    env.close()
    ends = [row for row in range(60) if row % period == 24]
    assert [row for row, step in enumerate(rows) if step.truncated.all()] == ends
    assert [row for row, step in enumerate(rows) if step.truncated.any()] == ends
    starts = ends if mode == "same_step" else [row + 1 for row in ends]
    assert [row for row, step in enumerate(rows) if step.start.all()] == starts
    assert [row for row, step in enumerate(rows) if not step.valid.all()] == ([] if mode == "same_step" else starts)
    for row, step in enumerate(rows):
        assert step.final_index.tolist() == ([0, 1] if mode == "same_step" and row in ends else [])
        assert step.final_observation.shape == (len(step.final_index), 42, 42)
        assert step.reward.dtype == np.float32


def test_both_modes_play_the_same_atari_episode() -> None:
    """The last frame of a cut episode, which is bootstrapped from, is the same picture in either mode."""
    settings = EnvSettings(id="ALE/Pong-v5", num_envs=2, height=42, width=42, max_episode_frames=100)
    next_step, same_step = (make(settings.model_copy(update={"autoreset": mode})) for mode in ("next_step", "same_step"))
    one, other = run(next_step, 26), run(same_step, 25)
    np.testing.assert_array_equal(one[24].observation, other[24].final_observation)
    assert (one[24].observation != other[24].observation).any()
    for row in range(24):
        np.testing.assert_array_equal(one[row].observation, other[row].observation)
    next_step.close()
    same_step.close()


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_lost_lives_are_told_apart_from_ends_and_change_nothing_else(mode: Any) -> None:
    """Breakout's five lives: four are lost within a game, the fifth ends it, and a new game's five are no loss."""
    settings = EnvSettings(id="ALE/Breakout-v5", num_envs=2, autoreset=mode, height=42, width=42, max_episode_frames=600)
    unasked, asked = (settings.model_copy(update={"terminate_on_life_loss": asked}) for asked in (False, True))
    (plain, _), (marked, losses) = (_breakout(settings) for settings in (unasked, asked))
    for before, now in zip(plain, marked, strict=True):
        assert not before.life_lost.any()
        for name in set(before._fields) - {"life_lost"}:
            np.testing.assert_array_equal(getattr(before, name), getattr(now, name))
    ends = [step.terminated | step.truncated for step in marked]
    assert not any((step.life_lost & (end | step.start)).any() for step, end in zip(marked, ends, strict=True))
    assert set(losses["terminated"]) == {4}
    assert losses["truncated"]
    assert max(losses["truncated"]) <= 4


def test_a_new_game_with_fewer_lives_than_the_last_one_had_has_lost_none() -> None:
    """The games are cut short, and the next ones begin with a thousand steps of chance."""
    cut = {"max_episode_frames": 40, "noop_max": 1000, "terminate_on_life_loss": True, "height": 42, "width": 42}
    env = make(EnvSettings(id="ALE/Kangaroo-v5", num_envs=8, **cut))
    env.reset(seed=1)
    rows = [env.step(np.zeros(8, np.int64)) for _ in range(40)]
    env.close()
    assert not all(row.valid.all() for row in rows)
    assert not any((row.life_lost & ~row.valid).any() for row in rows)


def _breakout(settings: EnvSettings) -> tuple[list[Any], dict[str, list[int]]]:
    """Rows of Breakout by chance, and how many lives were lost within each game before its end."""
    env, random = make(settings), np.random.default_rng(1)
    env.reset(seed=1)
    rows = [env.step(random.integers(4, size=env.num_envs)) for _ in range(500)]
    env.close()
    losses: dict[str, list[int]] = {"terminated": [], "truncated": []}
    for b in range(env.num_envs):
        lost = 0
        for step in rows:
            lost += int(step.life_lost[b])
            for how, counts in losses.items():
                if getattr(step, how)[b]:
                    counts.append(lost)
                    lost = 0
    return rows, losses


def test_atari_rewards_are_raw() -> None:
    """Clipping belongs to the algorithm: Ms. Pac-Man's points come as tens, not as ones."""
    env = make(EnvSettings(id="ALE/MsPacman-v5", num_envs=2, height=42, width=42))
    rewards = np.concatenate([step.reward for step in run(env, 120)])
    env.close()
    assert rewards.max() >= 10


def test_atari_seeds_make_runs_alike_and_environments_differ() -> None:
    """Two actors with different seeds must not collect the same games; one seed twice must."""
    env = make(EnvSettings(id="ALE/Pong-v5", num_envs=2, height=42, width=42))
    first, again, other = ([step.observation for step in _reseeded(env, seed)] for seed in (5, 5, 50))
    env.close()
    np.testing.assert_array_equal(first, again)
    assert (np.array(first) != np.array(other)).any()
    assert (np.array(first)[:, 0] != np.array(first)[:, 1]).any()


def _reseeded(env: VectorEnvironment, seed: int) -> list[Any]:
    env.reset(seed=seed)
    return [env.step(np.full(2, 2)) for _ in range(20)]


# --- gymnasium ids ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_cartpole_ends_only_between_valid_rows(mode: Any) -> None:
    """CartPole has a vector environment of its own that knows only next_step; asked for same_step it is run side by side."""
    env = make(EnvSettings(id="CartPole-v1", num_envs=3, autoreset=mode))
    rows = run(env, 60)
    assert env.spec.observation_shape == (4,)
    ends = sum(int(step.terminated.sum()) for step in rows[:-1])
    assert ends > 6
    resets = sum(int((~step.valid).sum()) for step in rows)
    assert resets == (ends if mode == "next_step" else 0)
    assert sum(int(step.start.sum()) for step in rows) == (ends if mode == "next_step" else ends + rows[-1].terminated.sum())
    assert all(step.reward[step.valid].min(initial=1) == 1 for step in rows)
    assert all(step.reward[~step.valid].max(initial=0) == 0 for step in rows)
    assert all(abs(step.observation[step.start]).max(initial=0) <= 0.05 for step in rows)
    env.close()


def test_continuous_actions_are_clipped_to_their_bounds(own) -> None:
    """A Gaussian policy samples outside of the bounds; the environment never sees that."""
    built = []

    def function() -> Echo:
        built.append(Echo(VECTOR, Box(np.array([-1, -2]), np.array([1, 3]), dtype=np.float64)))
        return built[-1]

    env = make(own(function, num_envs=2))
    assert env.spec.action == ActionSpec(shape=(2,), low=(-1.0, -2.0), high=(1.0, 3.0))
    env.reset(seed=0)
    env.step(np.array([[5, -5], [0.5, 5]], np.float32))
    assert [env.taken[0].tolist() for env in built] == [[1, -2], [0.5, 3]]
    assert built[0].taken[0].dtype == np.float64


def test_discrete_actions_that_do_not_start_at_zero_are_shifted(own) -> None:
    """The policy counts actions from 0; the environment counts from its own start."""
    built = []
    env = make(own(lambda: built.append(Echo(VECTOR, Discrete(3, start=-1))) or built[-1], num_envs=1))
    assert env.spec.action.n == 3
    env.reset(seed=0)
    for action in range(3):
        env.step(np.array([action]))
    assert built[0].taken == [-1, 0, 1]


@pytest.mark.parametrize(
    ("space", "spec", "taken", "native"),
    [
        (MultiDiscrete([3, 2], start=[4, 0]), {"choices": (3, 2)}, [2, 1], [6, 1]),
        (MultiDiscrete([[3, 2], [2, 2]]), {"choices": (3, 2, 2, 2)}, [2, 0, 1, 0], [[2, 0], [1, 0]]),
        (MultiBinary((2, 2)), {"choices": (2, 2, 2, 2)}, [0, 1, 1, 1], [[0, 1], [1, 1]]),
        (MultiDiscrete([5]), {"choices": (5,)}, [3], [3]),
        (Box(-1, 2, (1, 2), np.float64), {"low": (-1.0, -1.0), "high": (2.0, 2.0)}, [3, 0.5], [[2, 0.5]]),
        (Box(-np.inf, 1, (2,)), {"low": (-np.inf, -np.inf), "high": (1.0, 1.0)}, [-500, 3], [-500, 1]),
    ],
)
def test_actions_of_several_components_arrive_in_the_form_of_their_space(own, space, spec, taken, native) -> None:
    built = []
    env = make(own(lambda: built.append(Echo(VECTOR, space)) or built[-1], num_envs=2))
    assert env.spec.action == ActionSpec(shape=(len(taken),), **spec)
    env.reset(seed=0)
    env.step(np.array([taken, taken], env.spec.action.dtype))
    for single in built:
        assert space.contains(single.taken[0])
        assert single.taken[0].tolist() == native


# --- observations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype", "seen"),
    [
        ((5,), np.float64, ((5,), "float32")),
        ((5,), np.uint8, ((5,), "float32")),
        ((2, 3), np.float32, ((6,), "float32")),
        ((2, 3, 4), np.int64, ((24,), "float32")),
        ((20, 30), np.uint8, ((20, 30), "uint8")),
        ((20, 30, 1), np.uint8, ((20, 30), "uint8")),
        ((1, 20, 30), np.uint8, ((20, 30), "uint8")),
        ((20, 30, 3), np.uint8, ((3, 20, 30), "uint8")),
        ((3, 20, 30), np.uint8, ((3, 20, 30), "uint8")),
        ((20, 30, 3), np.float64, ((3, 20, 30), "float32")),
        ((3, 7, 8), np.float32, ((3, 7, 8), "float32")),
        ((20, 30), np.float32, ((20, 30), "float32")),
        ((20, 30, 1), np.int64, ((20, 30), "float32")),
        ((15, 7), np.float32, ((105,), "float32")),
    ],
)
def test_observations_become_images_or_vectors(own, shape, dtype, seen) -> None:
    """Planes of bytes or of many numbers are images, channels first, grey without a channel; all else is a vector of float32.

    Numbers are scaled to 1 by the bounds, in images; their quotients are exact here.
    """
    picture = np.arange(np.prod(shape)).astype(dtype).reshape(shape)
    env = make(
        own(
            lambda: Echo(Box(0, 256 if dtype != np.uint8 else 255, shape, dtype), DISCRETE, picture),
            num_envs=2,
            autoreset="same_step",
        )
    )
    assert (env.spec.observation_shape, env.spec.observation_dtype) == seen
    wanted = np.moveaxis(picture, -1, 0) if shape == (20, 30, 3) else picture
    if seen[1] == "float32" and len(seen[0]) > 1:
        wanted = wanted / 256
    rows = run(env, 4)
    for observation in (env.reset(seed=0), rows[0].observation, rows[3].final_observation):
        assert str(observation.dtype) == seen[1]
        np.testing.assert_array_equal(observation, [wanted.reshape(seen[0])] * 2)
    assert rows[0].reward.dtype == np.float32
    assert rows[0].reward[0] == np.float32(1 / 3)


@pytest.mark.parametrize(
    ("observation", "action", "found"),
    [
        (
            Dict({"a": VECTOR, "b": Tuple([VECTOR, Text(5)])}),
            DISCRETE,
            r"observation space b/1 not supported: found Text.*, wanted a Box, .* of them; choose others with env.leaves",
        ),
        (Graph(VECTOR, None), DISCRETE, "observation space not supported: found Graph"),
        (
            Box(0, 255, (4, 84, 84, 3), np.uint8),
            DISCRETE,
            r"neither an image nor a vector: .*at most three axes of bytes; .*env.frame_stack",
        ),
        (Dict({"a/b": VECTOR, "a": Dict({"b": VECTOR})}), DISCRETE, r"leaves of one path: found \['a/b', 'a/b'\]"),
        (Dict({}), DISCRETE, "leaves of one path"),
        (VECTOR, Box(0, 5, (2,), np.int64), r"action space not supported: found Box.*, wanted Discrete, .* or a Box of floats"),
        (VECTOR, Dict({"a": DISCRETE}), "action space not supported: found Dict"),
    ],
)
def test_spaces_that_no_network_here_fits_are_refused(own, observation, action, found) -> None:
    """The user learns which space it is, and what would do, before anything starts."""
    with pytest.raises(ConfigError, match=found):
        spec_of(own(lambda: Echo(observation, action)))


@pytest.mark.parametrize(
    ("space", "choices", "shown", "seen"),
    [
        (Discrete(5, start=-2), (5,), np.int64(1), [3]),
        (MultiDiscrete([[3, 4]], start=[[0, 7]]), (3, 4), np.array([[2, 9]]), [2, 2]),
        (MultiBinary((2, 2)), (2, 2, 2, 2), np.eye(2, dtype=np.int8), [1, 0, 0, 1]),
    ],
)
def test_discrete_observations_count_from_zero(own, space, choices, shown, seen) -> None:
    env = make(own(lambda: Echo(space, DISCRETE, shown), num_envs=2))
    spec = env.spec
    assert (spec.observation_shape, spec.observation_dtype, spec.observation_choices) == ((len(choices),), "int32", choices)
    assert not spec.is_image
    for observation in (env.reset(seed=0), env.step(np.zeros(2, np.int64)).observation):
        assert observation.dtype == np.int32
        assert observation.tolist() == [seen, seen]


def test_a_number_outside_of_its_observation_space_is_found_before_a_run(own) -> None:
    with pytest.raises(ConfigError, match=r"outside its observation space: found \[5\], wanted 0 to below \(5,\)"):
        spec_of(own(lambda: Echo(Discrete(5), DISCRETE, np.int64(5))))


@pytest.mark.parametrize(
    ("env_id", "fix"),
    [("ale_py:ALE/Pong-v5", "ALE/Pong-v5"), ("BreakoutNoFrameskip-v4", "ALE/Breakout-v5"), ("Pong-v4", "ALE/Pong-v5")],
)
def test_an_atari_game_by_another_id_is_refused(env_id, fix) -> None:
    """Its rewards would be clipped and its frames not skipped, whatever the settings of Atari say."""
    with pytest.raises(ConfigError, match=rf"an Atari game by another id: found {env_id}, wanted ALE/GAME-v5; set env.id={fix}"):
        make(EnvSettings(id=env_id))


# --- entry points ----------------------------------------------------------------------------------------------------


class OwnVectorEnv(SyncVectorEnv):
    """A vector environment of the user's, that says in its metadata how it resets itself."""

    def __init__(self, num_envs: int, mode: Any, ends: str = "bool") -> None:
        super().__init__([lambda: counting((2,), (True,))] * num_envs, autoreset_mode=mode)
        self.ends = ends

    def step(self, actions):
        observation, reward, terminated, truncated, info = super().step(actions)
        return observation, reward, terminated.astype(self.ends), truncated.astype(self.ends), info


@pytest.mark.parametrize("ends", ["bool", "int8", "int64"])
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_a_vector_environment_of_the_users_is_taken_at_its_word(own, mode, ends) -> None:
    """Its mode is read, not set: the setting says otherwise here and is not asked. Simulators on GPUs return integers as ends."""
    asked = "next_step" if mode is AutoresetMode.SAME_STEP else "same_step"
    env = make(own(OwnVectorEnv, num_envs=3, autoreset=asked, kwargs={"mode": mode, "ends": ends}))
    rows = run(env, 3)
    assert {array.dtype for step in rows for array in (step.terminated, step.truncated, step.valid, step.start)} == {
        np.dtype(bool)
    }
    if mode is AutoresetMode.SAME_STEP:
        assert [step.start.all() for step in rows] == [False, True, False]
        assert all(step.valid.all() for step in rows)
        assert rows[1].final_observation.tolist() == [[2, 0]] * 3
        assert rows[1].observation.tolist() == [[0, 1]] * 3
    else:
        assert [step.start.all() for step in rows] == [False, False, True]
        assert [step.valid.all() for step in rows] == [True, True, False]


@pytest.mark.parametrize("mode", [AutoresetMode.DISABLED, None, "NextStep"])
def test_a_vector_environment_that_does_not_say_how_it_resets_is_refused(own, mode) -> None:
    """Without it a reset row looks like a step."""

    def function() -> OwnVectorEnv:
        env = OwnVectorEnv(2, AutoresetMode.NEXT_STEP)
        env.metadata = {} if mode is None else {"autoreset_mode": mode}
        return env

    with pytest.raises(ConfigError, match=r"does not reset itself: found .*autoreset_mode.*, wanted AutoresetMode.NEXT_STEP"):
        make(own(function, num_envs=2))


def test_a_reset_row_counts_for_nothing_whatever_it_says(own) -> None:
    """Some environments repeat the last reward and end in the row that only brings the reset."""

    class Repeats(OwnVectorEnv):
        def step(self, actions):
            observation, *_, info = super().step(actions)
            return observation, np.ones(2), np.ones(2, bool), np.zeros(2, bool), info

    rows = run(make(own(lambda: Repeats(2, AutoresetMode.NEXT_STEP), num_envs=2)), 4)
    assert [step.valid.all() for step in rows] == [True, False, True, False]
    assert [step.terminated.all() for step in rows] == [True, False, True, False]
    assert [step.reward.tolist() for step in rows] == [[1, 1], [0, 0], [1, 1], [0, 0]]


@pytest.mark.parametrize("vector", [False, True])
def test_the_last_observation_of_an_environment_that_writes_to_one_array_is_kept(own, vector) -> None:
    """In same_step it is reset before that observation is read: a time limit would be learned from the next episode's first."""

    class Reuses(Echo):
        shown = np.zeros(2, np.float32)

        def _look(self):
            self.shown[:] = len(self.taken) / 10
            return self.shown

        def reset(self, **given):
            super().reset(**given)
            self.shown[:] = -1.0
            return self.shown, {}

    def build() -> Reuses | SyncVectorEnv:
        single = Reuses(VECTOR, DISCRETE)
        return SyncVectorEnv([lambda: single], autoreset_mode=AutoresetMode.SAME_STEP) if vector else single

    rows = run(make(own(build, num_envs=1, autoreset="same_step")), 4)
    assert rows[3].final_observation.tolist() == [[np.float32(0.4)] * 2]
    assert rows[3].observation.tolist() == [[-1.0, -1.0]]


def test_the_largest_number_of_a_dtype_is_no_bound(own) -> None:
    """An image was divided by it, to zeros, and actions were multiplied with it, to infinity."""
    most = np.finfo(np.float32).max  # of float64, too: all numbers become float32
    picture = np.full((16, 16, 3), 0.5, np.float32)
    space, action = Box(-most, most, picture.shape, np.float32), Box(-most, most, (2,), np.float32)
    env = make(own(lambda: Echo(space, action, picture), num_envs=1))
    assert env.reset(seed=0).max() == 0.5
    assert (env.spec.action.low, env.spec.action.high) == ((-np.inf,) * 2, (np.inf,) * 2)
    wide = Box(-float(most), float(most), picture.shape, np.float64)
    assert make(own(lambda: Echo(wide, DISCRETE, picture.astype(np.float64)), num_envs=1)).reset(seed=0).max() == 0.5
    depth = Box(0, 65_535, picture.shape, np.uint16)
    assert (
        make(own(lambda: Echo(depth, DISCRETE, np.full(picture.shape, 65_535, np.uint16)), num_envs=1)).reset(seed=0).max() == 1.0
    )
    whole = Box(0, np.iinfo(np.int32).max, picture.shape, np.int32)
    assert make(own(lambda: Echo(whole, DISCRETE, 4 * picture.astype(np.int32) + 3), num_envs=1)).reset(seed=0).max() == 3.0


def test_bytes_that_end_below_255_are_divided_by_their_own_bound(own) -> None:
    """Planes of 0 and 1 were divided by 255: a network saw next to nothing, and learned nothing."""
    for bound in (1, 10):
        shown = np.full((3, 8, 8), bound, np.uint8)
        env = make(own(lambda bound=bound, shown=shown: Echo(Box(0, bound, shown.shape, np.uint8), DISCRETE, shown), num_envs=1))
        assert env.reset(seed=0).max() == 1.0
        assert (env.spec.observation_shape, env.spec.observation_dtype) == ((3, 8, 8), "float32")
    picture = np.full((3, 8, 8), 10, np.uint8)
    assert make(own(lambda: Echo(Box(0, 255, picture.shape, np.uint8), DISCRETE, picture), num_envs=1)).reset(seed=0).max() == 10


@pytest.mark.parametrize("changed", [{}, {"terminate_on_life_loss": True}, {"crop": (8, 4)}, {"frame_skip": 2}])
def test_a_setting_of_atari_that_an_environment_does_not_heed_is_known(own, changed) -> None:
    """A function that makes Atari's environments chooses their frame skip itself, which we cannot read."""
    assert make(own(lambda: Echo(VECTOR, DISCRETE), **changed)).unheeded == list(changed)
    native = make(own(lambda: AtariVectorEnv(game="pong", num_envs=2, stack_num=1), num_envs=2, **changed))
    assert (native.unheeded, native.spec.frame_skip) == (["frame_skip"] if "frame_skip" in changed else [], 1)


def test_ataris_environments_of_a_function_end_by_their_own_mode(own) -> None:
    """Their metadata show the mode of the environment that was made last."""
    function = lambda: AtariVectorEnv(game="pong", num_envs=1, stack_num=1, autoreset_mode=AutoresetMode.SAME_STEP)  # noqa: E731
    assert make(own(function, num_envs=1)).same_step
    other = make(own(lambda: AtariVectorEnv(game="pong", num_envs=1, stack_num=1), num_envs=1, autoreset="same_step"))
    assert (other.same_step, other.unheeded) == (False, ["autoreset"])


@pytest.mark.parametrize(
    ("shape", "seen"),
    [
        ((8, 8, 111), (111, 8, 8)),
        ((111, 8, 8), (111, 8, 8)),
        ((10, 10, 7), (7, 10, 10)),
        ((7, 3, 3), (3, 7, 3)),
        ((4, 8, 8), (4, 8, 8)),
    ],
)
def test_channels_are_the_axis_beside_a_square_or_else_the_shorter_one(own, shape, seen) -> None:
    space = Box(0, 255, shape, np.uint8)
    assert make(own(lambda: Echo(space, DISCRETE, space.sample()), num_envs=1)).spec.observation_shape == seen


def test_a_users_function_may_stack_ataris_frames(own) -> None:
    """As ale-py does by default."""
    env = make(own(lambda: AtariVectorEnv(game="pong", num_envs=1), num_envs=1, crop=(8, 4)))
    assert env.spec.observation_shape == (4, 72, 84)
    assert env.reset(seed=0).shape == (1, 4, 72, 84)


def test_an_error_of_a_first_reset_is_the_environments_own(own) -> None:
    """And not that the observation, which was never returned, lacks a key."""

    class Broken(Echo):
        def reset(self, **_):
            return {}["level"]

    with pytest.raises(KeyError, match="level"):
        make(own(lambda: Broken(Dict(a=VECTOR), DISCRETE), num_envs=1)).reset(seed=0)


def test_a_truncation_without_its_last_observation_is_refused(own) -> None:
    """Bootstrapping from the next episode's first observation would teach nonsense in silence."""

    class Forgets(OwnVectorEnv):
        def step(self, actions):
            return (*super().step(actions)[:4], {"score": 1})

    with pytest.raises(ConfigError, match=r"found info with \['score'\], wanted info\[\"final_obs\"\]"):
        run(make(own(lambda: Forgets(2, AutoresetMode.SAME_STEP), num_envs=2)), 2)


class Batches(SyncVectorEnv):
    """As simulators on a GPU: last observations are a batch. `final_info` is of the form before gymnasium 1.0."""

    def __init__(self) -> None:
        space = Dict(goal=Discrete(5), joints=Tuple((VECTOR, VECTOR)))
        super().__init__([lambda: Echo(space, DISCRETE)] * 3, autoreset_mode=AutoresetMode.SAME_STEP)

    def step(self, actions):
        *row, info = super().step(actions)
        if "final_obs" in info:
            self.last, space = list(info["final_obs"]), self.single_observation_space
            batch = concatenate(space, self.last, create_empty_array(space, 3))
            info = {"final_obs": batch, "final_info": np.array([{}] * 3, object)}
        return *row, info


def test_last_observations_may_be_a_batch_of_several_arrays(own) -> None:
    env = make(own(Batches, num_envs=3))
    *_, row = run(env, 4)
    assert row.final_index.tolist() == [0, 1, 2]
    leaves = {path: values for path, values, _ in split(env.spec, row.final_observation)}
    assert leaves["goal"].ravel().tolist() == [seen["goal"] for seen in env.native.last]
    for number in range(2):
        np.testing.assert_array_equal(leaves[f"joints/{number}"], [seen["joints"][number] for seen in env.native.last])


@pytest.mark.parametrize("wrong", [None, {"joints": np.zeros((3, 2))}, {"goal": 1, "joints": 1}, [1], [None] * 3])
def test_last_observations_of_another_form_are_refused(own, wrong: Any) -> None:
    class Wrong(Batches):
        def step(self, actions):
            return (*super().step(actions)[:4], {"final_obs": wrong})

    with pytest.raises(ConfigError, match=r"last observation of a truncated episode: found .*final_obs <class"):
        run(make(own(Wrong, num_envs=3)), 4)


def test_a_vector_environment_of_fixed_size_must_be_of_the_size_asked_for(own) -> None:
    """B is part of the run's schema, so it cannot be whatever the function made; a description needs no size."""
    settings = own(lambda: OwnVectorEnv(4, AutoresetMode.NEXT_STEP), num_envs=3)
    with pytest.raises(ConfigError, match=r"another number of environments: found 4, wanted 3; .*num_envs"):
        make(settings)
    assert make(settings.model_copy(update={"num_envs": 4})).num_envs == 4
    assert spec_of(settings).observation_shape == (2,)


def test_single_environments_are_built_once_each(own) -> None:
    """A user's simulator may be heavy or hold a licence: B environments are B calls, a description is one."""
    built = []
    settings = own(lambda: built.append(1) or counting(), num_envs=5)
    make(settings).close()
    assert len(built) == 5
    spec_of(settings)
    assert len(built) == 6


def test_an_environment_with_a_length_of_zero_is_built_once(own) -> None:
    """Python takes an object with `__len__` 0 for false."""
    built = []

    class Empty(Echo):
        def __len__(self) -> int:
            return 0

    make(own(lambda: built.append(Empty(VECTOR, DISCRETE)) or built[-1], num_envs=2)).close()
    assert len(built) == 2


def test_examples_close_an_environment_that_fails(own) -> None:
    closed = []

    class Fails(Echo):
        def step(self, action):  # noqa: ARG002
            raise RuntimeError("simulator lost")

        def close(self) -> None:
            closed.append(self)

    with pytest.raises(RuntimeError, match="simulator lost"):
        example_frames(own(lambda: Fails(VECTOR, DISCRETE)), seed=1)
    assert len(closed) == 2


def test_random_play_takes_actions_inside_of_one_bound(own) -> None:
    made = [Echo(VECTOR, Box(10, np.inf, (1,), np.float32)) for _ in range(2)]
    left = iter(made)
    example_frames(own(lambda: next(left)), seed=1)
    assert all(np.std([action[0] for action in env.taken]) > 0.5 for env in made)


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"id": "CartPol-v1"}, "unknown environment id: found CartPol-v1, wanted CartPole-v1"),
        ({"id": "CartPole-v9"}, "unknown environment id: found CartPole-v9, wanted CartPole-v1"),
        ({"id": "ALE/Pnog-v5"}, "unknown environment id: found ALE/Pnog-v5, wanted ALE/Pong-v5"),
        ({"id": "what"}, "unknown environment id: found what, wanted .*; or, .* or env.entry_point"),
        (
            {"id": "Pendulum-v1", "kwargs": {"gravity": 9}},
            r"Pendulum-v1 does not take env.kwargs: found {'gravity': 9} \(.*'gravity'",
        ),
        (
            {"id": "CartPole-v1", "kwargs": {"gravity": 9}},
            r"CartPole-v1 does not take env.kwargs: found {'gravity': 9} \(.*'gravity'",
        ),
        ({"id": "ALE/Pong-v5", "kwargs": {"stack_num": 4}}, r"not known for Atari: found \['stack_num'\]"),
        ({"entry_point": "common"}, "env.entry_point is not complete: found 'common', wanted package.module:function"),
        ({"entry_point": "no.such:thing"}, r"a module that does not exist: found no.such \(No module named 'no'\)"),
        ({"entry_point": "common.envs.probes:countin"}, "names no function of .*: found countin, wanted counting"),
        ({"entry_point": "common.envs.probes:counting", "kwargs": {"a": 1}}, "does not take env.kwargs: found {'a': 1}"),
        (
            {"entry_point": f"{__name__}:ByHand", "kwargs": {"num_envs": 64}},
            "kwargs has num_envs: found 64, .*; set env.num_envs",
        ),
        ({"entry_point": "common.envs.probes:Box", "kwargs": {"low": 0, "high": 1}}, "made no environment: found .*Box"),
    ],
)
def test_what_cannot_be_built_is_refused_with_a_way_out(settings, said) -> None:
    """A typing error in a preset: one line that names what was found and what would do."""
    with pytest.raises(ConfigError, match=said):
        make(EnvSettings(**settings))


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_a_function_that_returns_the_same_environment_twice_is_refused(own, mode: Any) -> None:
    """A global, or a function with a cache: one episode would have the steps of all rows."""
    kept = Echo(VECTOR, DISCRETE)
    with pytest.raises(ConfigError, match="returns an environment that it returned before: found 1, wanted 3 environments; let"):
        make(own(lambda: gymnasium.wrappers.TimeLimit(kept, 9), num_envs=3, autoreset=mode))
    assert make(own(lambda: kept, num_envs=1)).num_envs == 1


class Player(gymnasium.Wrapper[Any, Any, Any, Any]):
    """One of several in a simulator that they share."""


def test_views_of_one_simulator_are_environments_of_their_own(own) -> None:
    shared = Echo(VECTOR, DISCRETE)
    assert make(own(lambda: gymnasium.wrappers.TimeLimit(Player(shared), 9), num_envs=3)).num_envs == 3


@pytest.fixture
def mygames(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module that registers an environment id when it is imported."""
    (tmp_path / "mygames.py").write_text(
        "import gymnasium\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "gymnasium.register(id='Games/Pole-v0', entry_point=CartPoleEnv, max_episode_steps=5)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("mygames", None)
    gymnasium.registry.pop("Games/Pole-v0", None)


@pytest.mark.usefixtures("mygames")
@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_an_id_with_a_module_is_registered_by_its_import(mode: Any) -> None:
    with closing(make(EnvSettings(id="mygames:Games/Pole-v0", num_envs=2, autoreset=mode))) as environment:
        assert environment.reset(1).shape == (2, 4)
        assert environment.step(np.zeros(2, np.int64)).valid.all()


@pytest.mark.usefixtures("mygames")
@pytest.mark.parametrize(
    ("env_id", "said"),
    [
        ("mygames:Games/Pol-v0", "unknown environment id: found Games/Pol-v0, wanted Games/Pole-v0"),
        ("mygamez:Games/Pole-v0", "env.id names a module that does not exist: found mygamez"),
        (":Games/Pole-v0", "env.id is not complete: found ':Games/Pole-v0', wanted module:Env-v0"),
    ],
)
def test_an_id_with_a_module_that_cannot_be_built_is_refused(env_id: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(EnvSettings(id=env_id))
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("env_id", "module", "said"),
    [
        ("HalfCheetah-v5", "mujoco", 'found no gymnasium[mujoco]; pip install "gymnasium[mujoco]"'),
        ("LunarLander-v3", "Box2D", 'found no gymnasium[box2d]; pip install "gymnasium[box2d]"'),
        ("phys2d/CartPole-v1", "jax", 'found no jax; pip install "jax"'),
        ("Hopper-v3", "mujoco_py", "found The mujoco v2 and v3 based environments have been moved to the gymnasium-robotics"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*out of date")
def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, env_id: str, module: str, said: str) -> None:
    """As gymnasium itself reports it: an environment's module is imported when it is built."""
    package = str(gymnasium.spec(env_id).entry_point).partition(":")[0].rpartition(".")[0] or module
    for name in [name for name in sys.modules if name.startswith((package, module))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ResourceError) as caught:
        make(EnvSettings(id=env_id))
    assert str(caught.value).startswith(f"{env_id} needs a package that is not installed: {said}")


def test_other_refusals_of_gymnasium_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that is known and refuses its arguments says why."""

    def refuses(*_args: Any, **_kwargs: Any) -> None:
        raise gymnasium.error.Error("no such map")

    monkeypatch.setattr(gymnasium, "make_vec", refuses)
    with pytest.raises(ConfigError, match=r"Pendulum-v1 cannot be built: found no such map; look at env.kwargs"):
        make(EnvSettings(id="Pendulum-v1"))


def test_missing_roms_are_the_machines_fault(monkeypatch: pytest.MonkeyPatch, tmp_path, capsys) -> None:
    """ALE_ROMS_DIR points to a folder without the game."""
    monkeypatch.setenv("ALE_ROMS_DIR", str(tmp_path))
    with pytest.raises(ResourceError, match=r"no ROM for ALE/Pong-v5: found .*pong.bin.*ALE_ROMS_DIR"):
        make(EnvSettings(id="ALE/Pong-v5"))


def _raises(*_args: Any, **_kwargs: Any) -> Any:
    raise RuntimeError("no licence")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ({"reset": _raises}, "fails when it is built or begins an episode: found RuntimeError: no licence"),
        ({"_look": lambda: np.zeros(7, np.float32)}, "fails when it is built or begins an episode: found ValueError"),
        ({}, "probes:own fails when it is built or begins an episode: found RuntimeError: no licence, wanted an environment"),
    ],
)
def test_an_environment_that_fails_is_refused_with_its_fault(own, spoil: dict[str, Any], said: str) -> None:
    """A licence server that is away, frames of another size than the space says: found by the learner, before the run starts."""

    def build() -> Echo:
        if not spoil:
            _raises()
        env = Echo(VECTOR, DISCRETE)
        vars(env).update(spoil)
        return env

    with pytest.raises(ConfigError, match=said):
        spec_of(own(build))


def test_a_reward_that_is_an_array_is_refused_with_what_a_reward_is(own) -> None:
    def build() -> Echo:
        env = Echo(VECTOR, DISCRETE)
        step = env.step
        vars(env)["step"] = lambda action: (step(action)[0], np.array([1.0]), False, False, {})
        return env

    said = r"wanted observations of shape .*, a single number as each reward, and a bool as terminated and as truncated"
    with pytest.raises(ConfigError, match=said), trial(own(build), env_steps=1):
        pass


@pytest.mark.parametrize("ends", [(None, False), (False, None), ("no", False)])
def test_an_end_that_is_no_bool_is_refused(own, ends) -> None:
    """Gymnasium takes None for False: no episode would end."""

    class Endless(Echo):
        def step(self, action):
            return *super().step(action)[:2], *ends, {}

    said = rf"found TypeError: terminated {ends[0]!r}, truncated {ends[1]!r}, wanted .* a bool as terminated and as truncated"
    with pytest.raises(ConfigError, match=said), trial(own(lambda: Endless(VECTOR, DISCRETE)), env_steps=1):
        pass


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    ("space", "shown", "found"),
    [
        (Box(0, 255, (16, 16), np.uint8), np.full((16, 16), 300, np.uint16), "300, wanted integers of uint8"),
        (Box(-9, 9, (2,), np.int8), np.array([3, -129]), "-129, wanted integers of int8"),
        (
            Dict(a=VECTOR, b=MultiBinary(2)),
            {"a": np.zeros(2, np.float32), "b": np.array([0, 256])},
            "b 256, wanted integers of int8",
        ),
    ],
)
def test_an_integer_beyond_the_dtype_of_its_space_is_found_before_a_run(own, space, shown, found, later) -> None:
    """Gymnasium's cast wraps it around: 300 was 44."""

    class Wide(Echo):
        def _look(self):
            return shown if len(self.taken) >= later else space.sample()

    said = f"returns observations outside its observation space: found {found}"
    with pytest.raises(ConfigError, match=said), trial(own(lambda: Wide(space, DISCRETE)), env_steps=2):
        pass


@pytest.mark.parametrize("end", [True, 1, 1.0, np.True_, np.int8(1), np.array(True)])
def test_an_end_that_is_a_number_is_none_that_is_refused(own, end) -> None:
    class Ends(Echo):
        def step(self, action):
            return *super().step(action)[:2], end, False, {}

    with trial(own(lambda: Ends(VECTOR, DISCRETE)), env_steps=1) as environment:
        assert environment.step(np.zeros(1, int)).start.all()


def test_a_vector_environment_that_shows_another_shape_is_refused(own, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written by hand: its pictures are larger than its space says. Nothing else would notice."""
    built = SyncVectorEnv([lambda: Echo(Box(0, 255, (20, 16), np.uint8), DISCRETE)])
    monkeypatch.setattr(built, "reset", lambda **_: (np.zeros((1, 32, 16), np.uint8), {}))
    said = r"returns observations outside its observation space: found shape \(1, 32, 16\), wanted shape \(1, 20, 16\)"
    with pytest.raises(ConfigError, match=said):
        spec_of(own(lambda: built))


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_a_number_beyond_float32_is_refused_as_such(own) -> None:
    said = r"returns observations that are not finite as float32: found inf, wanted finite numbers"
    with pytest.raises(ConfigError, match=said):
        spec_of(own(lambda: Echo(Box(-np.inf, np.inf, (2,), np.float64), DISCRETE, np.array([1e300, 0.0]))))


class ByHand(VectorEnv):
    """Returns the same each time; `spoilt` replaces its observation, reward, terminated or truncated."""

    def __init__(self, num_envs: int, space: Space, **spoilt: Any) -> None:
        self.num_envs, self.metadata = num_envs, {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space, self.single_action_space = space, DISCRETE
        self.action_space = batch_space(DISCRETE, num_envs)
        good = {"observation": create_empty_array(space, num_envs), "reward": np.ones(num_envs)}
        self.row = good | dict.fromkeys(["terminated", "truncated"], np.zeros(num_envs, bool)) | spoilt

    def reset(self, **_):
        return self.row["observation"], {}

    def step(self, actions):  # noqa: ARG002
        return *self.row.values(), {}


PAIR = Dict(goal=Discrete(5), joints=VECTOR)


@pytest.mark.parametrize(
    ("space", "shown", "said"),
    [
        (Box(-1, 1, (3,), np.float32), np.zeros((3, 4)), r"found shape \(3, 4\), wanted shape \(4, 3\)"),
        (Box(-1, 1, (3,), np.float32), np.zeros(3), r"found shape \(3,\), wanted shape \(4, 3\)"),
        (Box(-1, 1, (3,), np.float32), np.zeros((1, 3)), r"found shape \(1, 3\), wanted shape \(4, 3\)"),
        (Discrete(5), np.zeros((1, 4), int), r"found shape \(1, 4\), wanted shape \(4,\)"),
        (
            Box(0, 255, (16, 16), np.uint8),
            np.zeros((16, 16, 4), np.uint8),
            r"found shape \(16, 16, 4\), wanted shape \(4, 16, 16\)",
        ),
        (Box(0, 255, (16, 16), np.uint8), np.ones((4, 16, 16)), "found dtype float64, wanted dtype uint8"),
        (Box(0, 255, (16, 16), np.uint8), np.full((4, 16, 16), 300), "found dtype int64, wanted dtype uint8"),
        (Discrete(5), np.full(4, 2.7), "found dtype float64, wanted integers"),
        (MultiBinary(2), np.full((4, 2), "0"), "found dtype <U1, wanted integers"),
        (PAIR, {"goal": np.zeros(4, int), "joints": np.zeros((2, 4))}, r"found joints shape \(2, 4\), wanted shape \(4, 2\)"),
    ],
)
def test_observations_of_another_form_than_their_space_are_refused(own, space, shown, said) -> None:
    """They would be cut into rows of any numbers, or repeated for all environments, or become bytes for the learner alone."""
    env = make(own(lambda: ByHand(4, space, observation=shown), num_envs=4))
    with pytest.raises(ConfigError, match=f"returns observations outside its observation space: {said}"):
        env.reset(0)


@pytest.mark.parametrize(
    ("spoilt", "found"),
    [
        ({"reward": 1.0}, r"\(\), \(4,\) and \(4,\)"),
        ({"reward": np.ones((4, 1))}, r"\(4, 1\), \(4,\) and \(4,\)"),
        ({"terminated": np.zeros((4, 1), bool)}, r"\(4,\), \(4, 1\) and \(4,\)"),
        ({"truncated": False}, r"\(4,\), \(4,\) and \(\)"),
    ],
)
def test_rewards_and_ends_that_are_not_one_for_each_environment_are_refused(own, spoilt, found) -> None:
    """They would be broadcast."""
    env = make(own(lambda: ByHand(4, VECTOR, **spoilt), num_envs=4))
    env.reset(0)
    said = rf"rewards, terminated and truncated of other shapes: found {found}, wanted \(4,\) of each"
    with pytest.raises(ConfigError, match=said):
        env.step(np.zeros(4, int))


def test_a_vector_environment_with_infos_in_a_list_is_refused(own) -> None:
    """It was stepped until its first episode ended, and then failed with an error of Python."""
    env = make(own(lambda: gymnasium.wrappers.vector.DictInfoToList(ByHand(2, VECTOR)), num_envs=2))
    with pytest.raises(ConfigError, match="returns infos in another form: found list, wanted a dict of arrays"):
        env.reset(0)


@pytest.mark.parametrize("name", ["terminated", "truncated"])
@pytest.mark.parametrize("ends", [[None] * 4, [False, None, False, False], np.array(["False"] * 4)])
def test_ends_of_a_vector_environment_that_are_no_numbers_are_refused(own, name, ends) -> None:
    env = make(own(lambda: ByHand(4, VECTOR, **{name: ends}), num_envs=4))
    env.reset(0)
    with pytest.raises(
        ConfigError, match=rf"returns other ends than bools: found \[.*{ends[1]}.*\], wanted bools, or other numbers"
    ):
        env.step(np.zeros(4, int))


def test_an_environment_that_is_refused_is_closed(own, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulators and simulators must not outlive the error, in a process that goes on to explain it."""
    closed = []
    monkeypatch.setattr(SyncVectorEnv, "close_extras", lambda *_, **__: closed.append(1))
    with pytest.raises(ConfigError):
        make(own(lambda: Echo(Text(5), DISCRETE), num_envs=1))
    assert closed == [1]


def test_atari_is_the_native_vector_environment() -> None:
    """Emulating side by side in Python would halve the actor's speed."""
    env = make(EnvSettings(id="ALE/Pong-v5", num_envs=1))
    assert type(env.native) is AtariVectorEnv
    env.close()


# --- all settings ----------------------------------------------------------------------------------------------------


def test_a_setting_that_only_some_environments_read_is_declared_so(own):
    """A setting that is added for Atari alone, without a condition, fails here."""
    native = own(lambda: AtariVectorEnv(game="pong", num_envs=2, stack_num=1), num_envs=2)
    environments = [EnvSettings(num_envs=2), EnvSettings(id="ALE/Pong-v5", num_envs=2), native]
    reads = []
    for settings in environments:
        copy, read = recorded(settings)
        with closing(make(copy)) as env:
            run(env, 2)
        reads.append((Settings().model_copy(update={"env": settings}), "env", read))
    assert unread(reads) == {"env.normalize_reward"}  # the learner reads it
    assert not {key for key, *_ in unmet(reads[-1][0])} & {f"env.{name}" for name in reads[-1][2]}
