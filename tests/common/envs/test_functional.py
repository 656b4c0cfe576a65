"""Environments in JAX: rows of the same meaning as those of other origins, from one compiled step."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode

from common.config.load import load_settings
from common.envs.make import make
from common.envs.spec import EnvSettings
from common.envs.vector import VectorEnvironment
from common.errors import ConfigError
from common.protocol.plain import pack, unpack

pytest.importorskip("jax", reason="jax is not installed (make jax)")
functional = pytest.importorskip("common.envs.functional")
jnp = pytest.importorskip("jax.numpy")

pytestmark = pytest.mark.pure
LIMIT = 4


def begin(_key):
    state = {"walked": jnp.int32(0)}
    return state, jnp.zeros(1)


def step(_key, state, action):
    """Walk; action 1 terminates."""
    walked = state["walked"] + 1
    return {"walked": walked}, walked[None].astype(float), 10.0 * walked, action == 1, jnp.bool_(False)


@pytest.fixture
def walkers():
    """Three environments whose observation is the age of the episode."""
    rules = functional.Rules(observation_space=Box(0, 9, (1,), np.float32), action_space=Discrete(2), begin=begin, step=step)
    env = functional.FunctionalVectorEnv(rules, 3, limit=LIMIT)
    return VectorEnvironment(env, settings=EnvSettings(), mode=AutoresetMode.NEXT_STEP)


def test_rows_mean_the_same_as_those_of_other_environments(walkers):
    """The first never ends but by the limit, the second at its second step, the third at each one."""
    assert walkers.reset(seed=1).tolist() == [[0], [0], [0]]
    rows = [walkers.step(np.array([0, age % 2, 1])) for age in range(6)]
    seen = np.array([row.observation[:, 0] for row in rows])
    assert seen.T.tolist() == [[1, 2, 3, 4, 0, 1], [1, 2, 0, 1, 0, 1], [1, 0, 1, 0, 1, 0]]
    assert np.array([row.terminated for row in rows]).T.astype(int).tolist() == [[0] * 6, [0, 1, 0, 1, 0, 1], [1, 0] * 3]
    assert np.array([row.truncated for row in rows]).T.astype(int).tolist() == [[0, 0, 0, 1, 0, 0], [0] * 6, [0] * 6]
    assert np.array([row.valid for row in rows]).T.astype(int).tolist() == [[1, 1, 1, 1, 0, 1], [1, 1, 0, 1, 0, 1], [1, 0] * 3]
    starts = np.array([row.start for row in rows])
    assert np.array_equal(starts, ~np.array([row.valid for row in rows]))
    assert np.array([row.reward for row in rows])[:, 0].tolist() == [10, 20, 30, 40, 0, 10]


def made(num_envs=8, *more):
    overrides = "env.id=phys2d/CartPole-v1", f"env.num_envs={num_envs}", *more
    return make(load_settings(preset="cartpole", overrides=overrides, environ={}).settings.env)


def play(env, actions):
    return [np.concatenate([row.observation.ravel(), row.reward, row.terminated]) for row in map(env.step, actions)]


def test_an_id_of_gymnasium_in_jax_is_compiled_and_takes_the_steps_of_its_functions():
    env = made(4)
    assert isinstance(env.native, functional.FunctionalVectorEnv)
    rules, states = gymnasium.make("phys2d/CartPole-v1").unwrapped.func_env, env.reset(seed=1)
    for _ in range(9):
        found = env.step(np.array([0, 1, 1, 0]))
        states = [np.asarray(rules.transition(state, action, None)) for state, action in zip(states, (0, 1, 1, 0), strict=True)]
        np.testing.assert_allclose(found.observation, states, atol=1e-5)
        np.testing.assert_array_equal(found.terminated, [bool(rules.terminal(state, None)) for state in states])
        if found.terminated.any():
            return
    pytest.fail("no pole fell")


def test_it_is_refused_where_it_would_not_be_compiled():
    with pytest.raises(ConfigError, match=r"phys2d/CartPole-v1, which is written in JAX: found same_step, wanted next_step"):
        made(2, "env.autoreset=same_step")


def test_an_id_without_a_vector_environment_is_compiled_too():
    env = made(2, "env.id=tabular/Blackjack-v0")
    assert isinstance(env.native, functional.FunctionalVectorEnv)
    assert env.reset(seed=1).shape == (2, *env.spec.observation_shape)


@pytest.fixture
def own_id(monkeypatch):
    """Return the id of an environment that a function makes of phys2d/Pendulum-v0."""

    def registered(function, **named):
        monkeypatch.setattr(gymnasium.envs.registration, "registry", dict(gymnasium.registry))
        monkeypatch.setattr(gymnasium, "registry", gymnasium.envs.registration.registry)
        gymnasium.register("Mine-v0", lambda **kwargs: function(gymnasium.make("phys2d/Pendulum-v0", **kwargs).env), **named)
        return EnvSettings(id="Mine-v0", num_envs=2)

    return registered


@pytest.mark.filterwarnings("ignore:.*numpy array")  # gymnasium's of an array of JAX
@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_an_id_with_a_wrapper_of_ones_own_is_not_compiled_and_keeps_it(own_id, mode):
    """The wrapper turns rewards and hides the velocity."""

    def wrapped(env):
        env = gymnasium.wrappers.TransformReward(env, lambda reward: reward + 1000)
        hidden = gymnasium.wrappers.TransformObservation(env, lambda seen: seen[:2], Box(-1, 1, (2,), np.float32))
        return gymnasium.wrappers.TimeLimit(hidden, 3)

    env = make(own_id(wrapped).model_copy(update={"autoreset": mode}))
    assert env.reset(seed=1).shape == (2, 2)
    rows = [env.step(np.zeros((2, 1), np.float32)) for _ in range(3)]
    assert all((row.reward > 900).all() for row in rows)
    assert [row.truncated.all() for row in rows] == [False, False, True]


def test_an_id_with_nothing_around_its_functions_is_compiled_with_its_time_limit(own_id):
    env = make(own_id(lambda env: env, max_episode_steps=2))
    assert isinstance(env.native, functional.FunctionalVectorEnv)
    env.reset(seed=1)
    assert [env.step(np.zeros((2, 1), np.float32)).truncated.all() for _ in range(2)] == [False, True]


def test_a_seed_fixes_the_rows_and_a_saved_state_continues_bit_for_bit():
    actions = np.random.default_rng(1).integers(2, size=(60, 8))
    first, second = made(), made()
    assert np.array_equal(first.reset(seed=5), second.reset(seed=5))
    before = play(first, actions[:30])
    assert np.array_equal(before, play(second, actions[:30]))
    saved = unpack(pack(first.state_dict()))
    wanted = play(first, actions[30:])
    assert np.array(wanted)[:, -8:].any()  # poles fell, and were begun anew
    again = made()
    again.reset(seed=6)
    again.load_state_dict(saved)
    assert np.array_equal(play(again, actions[30:]), wanted)


def test_each_episode_begins_elsewhere_by_the_seed():
    begins = []
    for seed in (1, 2):
        env = made()
        begins += list(env.reset(seed=seed))
        rows = [env.step(np.zeros(8, int)) for _ in range(40)]  # a pole falls within ten
        begins += [observation for row in rows for observation in row.observation[row.start]]
    assert len(begins) > 48
    assert len(np.unique(begins, axis=0)) == len(begins)


def test_gymnax_is_named_by_its_ids():
    pytest.importorskip("gymnax", reason="gymnax is not installed")
    assert functional.gymnax(id="Seaquest-MinAtar", num_envs=1).reset(seed=1)[0].shape == (1, 10, 10, 10)
    assert functional.gymnax(id="Breakout-MinAtar", num_envs=1).reset(seed=1)[0].shape == (1, 4, 10, 10)
    env = functional.gymnax(id="CartPole-v1", num_envs=5, max_steps_in_episode=3)
    env.reset(seed=1)
    ends = [env.step(np.zeros(5, int))[3] for _ in range(5)]
    assert [end.all() for end in ends] == [False, False, True, False, False]
    with pytest.raises(Exception, match=r"unknown environment of gymnax: found CartPole-v9, wanted .*CartPole-v1"):
        functional.gymnax(id="CartPole-v9", num_envs=1)
