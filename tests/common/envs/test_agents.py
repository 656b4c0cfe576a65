"""Environments of several agents: rows of agents that leave, actions, masks, states, and what is refused."""

from __future__ import annotations

import sys
from contextlib import closing

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from common.envs.leaves import action_mask
from common.envs.make import build, make
from common.envs.probes import Leaving, leaving_agents
from common.envs.spec import EnvSettings
from common.envs.trial import example_frames, trial
from common.errors import ConfigError, RookeryError
from common.protocol.plain import pack, unpack
from tests.common.envs.test_make import own  # noqa: F401 - a fixture

pytestmark = pytest.mark.service

PROBE = EnvSettings(entry_point="common.envs.probes:leaving_agents", num_envs=4)


def rows(environment, number, seed=3):
    """The first observation, and the transitions of `number` steps of the best action."""
    observation = environment.reset(seed)
    found = []
    for _ in range(number):
        found.append(environment.step((observation[:, 0] > 0).astype(np.int64)))
        observation = found[-1].observation.copy()
    return [step._replace(observation=step.observation.copy()) for step in found]


@pytest.mark.parametrize("ends", ["terminated", "truncated"])
def test_the_rows_of_an_agent_that_left_are_not_valid_until_its_copy_is_reset(ends):
    """One env step of `short`, then two of `long` alone, then the reset of both, in each of two copies."""
    with closing(make(PROBE.model_copy(update={"kwargs": {"truncates": ends == "truncated"}}))) as environment:
        steps = rows(environment, 8)
    expected = {
        "valid": [[1, 1], [0, 1], [0, 1], [0, 0]],
        "start": [[0, 0], [0, 0], [0, 0], [1, 1]],
        ends: [[1, 0], [0, 0], [0, 1], [0, 0]],
        ({"terminated", "truncated"} - {ends}).pop(): [[0, 0]] * 4,
        "reward": [[1, 1], [0, 1], [0, 1], [0, 0]],
    }
    for name, pattern in expected.items():
        np.testing.assert_array_equal([getattr(step, name) for step in steps], np.tile(pattern, (2, 2)), err_msg=name)
    left = np.array([step.observation[:, 1] for step in steps])
    np.testing.assert_array_equal(left, np.tile([[0, 2], [0, 1], [0, 0], [1, 3]], (2, 2)))
    for later in steps[1:3]:  # the last observation of `short`, although the environment has written over it
        np.testing.assert_array_equal(later.observation[::2], steps[0].observation[::2])


def test_each_copy_has_the_seed_of_its_first_row_and_its_own_actions():
    """Two copies side by side are the same as each of them alone."""
    with closing(make(PROBE)) as both, closing(build(PROBE, 1)) as one, closing(build(PROBE, 2)) as other:
        assert (both.num_envs, one.num_envs, both.agents) == (4, 2, 2)
        joined, apart = rows(both, 30), [rows(one, 30, seed=3), rows(other, 30, seed=5)]
    for step, left, right in zip(joined, *apart, strict=True):
        np.testing.assert_array_equal(step.observation, np.concatenate([left.observation, right.observation]))
        np.testing.assert_array_equal(step.reward, np.concatenate([left.reward, right.reward]))
    assert len({step.observation[3, 0] for step in joined}) == 2


@pytest.mark.parametrize("mask", ["info", "leaf"])
def test_masks_are_those_of_the_agents_that_are_there(mask):
    """The mask names the best action. That of the last observation is kept; in later rows without the agent, info allows all."""
    settings = PROBE.model_copy(update={"kwargs": {"mask": mask}, "action_mask": True})
    with trial(settings, env_steps=20):
        pass
    with closing(make(settings)) as environment:
        observation, seen = environment.reset(3), []
        for _ in range(8):
            allowed = action_mask(environment.spec, observation)
            seen.append(allowed.sum(axis=1)[:2].tolist())
            step = environment.step(allowed.argmax(axis=1))
            assert (step.reward == step.valid).all()
            observation = step.observation.copy()
    assert seen == {"info": [[1, 1], [1, 1], [2, 1], [2, 1]], "leaf": [[1, 1]] * 4}[mask] * 2


class Quiet(Leaving):
    """No agent has a mask on an observation with `silent` env steps left."""

    silent = 0

    def _look(self):
        observations, infos = super()._look()
        return observations, {agent: info for agent, info in infos.items() if self._seen[agent][1] != self.silent}


def test_an_agent_without_a_mask_is_an_error_where_it_acts_and_others_have_one(own):  # noqa: F811
    with closing(build(own(lambda: Quiet("info", truncates=False), action_mask=True), 2)) as environment:
        environment.reset(1)
        allowed = [action_mask(environment.spec, environment.step(np.zeros(2, np.int64)).observation) for _ in range(4)]
        assert [each.sum(axis=1).tolist() for each in allowed] == [[2, 1], [2, 1], [2, 2], [1, 1]]
        environment.native.copies[0].silent = 2
        with pytest.raises(ConfigError, match=r"or none, of environment 1"):
            environment.step(np.zeros(2, np.int64))


class Unsure(Leaving):
    """Gives something else than a mask."""

    given = (0.5, 1)

    def _look(self):
        observations, infos = super()._look()
        return observations, {agent: {"action_mask": np.array(self.given)} for agent in infos}


@pytest.mark.parametrize(("given", "found"), [((0.5, 1), "found one with 0.5"), ((1,), r"of several forms: found \(1,\)")])
def test_a_mask_that_is_none_is_refused_as_the_agent_gave_it(own, given, found):  # noqa: F811
    with closing(build(own(lambda: Unsure("info", truncates=False), action_mask=True), 2)) as environment:
        environment.native.copies[0].given = given
        environment.native._mask_size = 2
        with pytest.raises(ConfigError, match=found):
            environment.reset(1)


def test_another_environment_goes_on_bit_for_bit_with_the_agents_that_had_left():
    with closing(make(PROBE)) as first, closing(make(PROBE)) as second:
        first.reset(3)
        for number in range(13):  # one row after `short` left
            first.step(np.full(4, number % 2))
        second.reset(99)
        second.load_state_dict(unpack(pack(first.state_dict())))
        for number in range(40):
            for here, there in zip(first.step(np.full(4, number % 2)), second.step(np.full(4, number % 2)), strict=True):
                np.testing.assert_array_equal(here, there)


def test_the_state_of_an_environment_that_keeps_objects_is_refused_by_name(own):  # noqa: F811
    def keeps():
        env = leaving_agents()
        env.world = object()
        return env

    with closing(build(own(keeps), 2)) as environment:
        environment.reset(1)
        with pytest.raises(RookeryError, match=r"env\.copies\[0\]\.world, a object, in Leaving"):
            environment.state_dict()


def test_example_observations_are_those_of_agents_that_are_there():
    """An observation without a step left is seen once an episode by each agent, and not in each row that `short` waits."""
    frames = example_frames(PROBE, seed=1)
    assert frames.shape == (1024, 2)
    assert (frames[:, 1] == 0).mean() == pytest.approx(2 / 6, abs=0.01)


def wrong(**changes):
    """`leaving_agents` with other attributes, each of which is made of the environment."""
    env = leaving_agents()
    for name, made in changes.items():
        setattr(env, name, made(env))
    return env


def returns_at(age):
    """A `step` after which `short` is there again."""

    def changed(env):
        step = env.step

        def wrapped(actions):
            results = step(actions)
            env.agents = ["short", "long"] if env._age == age else env.agents
            return results

        return wrapped

    return changed


def vanishes(env):
    """A `step` after which nobody is there."""
    step = env.step

    def wrapped(actions):
        results = step(actions)
        env.agents = []
        return results

    return wrapped


def ends_with(end, place):
    """A `step` that returns `end` as terminated, place 2, or truncated, place 3, of each agent."""

    def changed(env):
        step = env.step

        def wrapped(actions):
            results = list(step(actions))
            results[place] = dict.fromkeys(results[place], end)
            return tuple(results)

        return wrapped

    return changed


def lacks(place, method="step"):
    """A method that returns nothing of `long` at a place."""

    def changed(env):
        before = getattr(env, method)

        def wrapped(*arguments, **named):
            results = list(before(*arguments, **named))
            results[place] = {agent: value for agent, value in results[place].items() if agent != "long"}
            return tuple(results)

        return wrapped

    return changed


def shows(observation):
    """A `reset` that returns `observation` of each agent."""

    def changed(env):
        reset = env.reset
        return lambda **given: (dict.fromkeys(env.possible_agents, observation), reset(**given)[1])

    return changed


def spaces(one, other):
    return lambda _: {"short": one, "long": other}.__getitem__


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"step": returns_at(1)},
            "lets agent 'short' play after its end, or without a place: found env.agents ['short', 'long']",
        ),
        ({"step": returns_at(2)}, "lets agent 'short' play after its end"),
        ({"step": ends_with(None, 2)}, "returns other ends than bools: found [None, None], wanted bools, or other numbers"),
        ({"step": ends_with("False", 3)}, "returns other ends than bools: found ['False', 'False'], wanted"),
        (
            {"reset": lacks(0, "reset")},
            "returns no first observation of agent 'long': found those of ['short'], wanted one of each of ['short', 'long']",
        ),
        (
            {"step": lacks(0)},
            "returns no observation of agent 'long': found those of ['short'], wanted one of each of ['short', ",
        ),
        ({"step": lacks(1)}, "returns no reward of agent 'long'"),
        (
            {"observation_space": lambda _: lambda _: Box(-1, 3, (2,), np.int8), "reset": shows(np.array([1, 300]))},
            "returns observations outside its observation space: found 300, wanted integers of int8",
        ),
        ({"step": vanishes}, "lets agent 'long' leave without an end: found env.agents [], wanted ['long']"),
        (
            {"observation_space": spaces(Box(-1, 3, (2,), np.float32), Box(-1, 3, (4,), np.float32))},
            "agents of different observation spaces: found 'short' Box(-1.0, 3.0, (2,), float32), 'long' Box(-1.0, 3.0, (4,)",
        ),
        (
            {"action_space": spaces(Discrete(2), Discrete(3))},
            "found 'short' Discrete(2), 'long' Discrete(3), wanted equal",
        ),
        (
            {"agent_iter": lambda _: print},
            "has agents that take turns: found <class 'common.envs.probes.Leaving'>, wanted a ParallelEnv",
        ),
        ({"possible_agents": lambda _: []}, "made no environment"),
    ],
    ids=[
        "returns at once",
        "returns later",
        "none",
        "string",
        "no first",
        "no next",
        "no reward",
        "integers",
        "vanishes",
        "observations",
        "actions",
        "aec",
        "nobody",
    ],
)
def test_agents_that_no_shared_policy_can_play_are_refused_by_name(own, changes, words):  # noqa: F811
    with pytest.raises(ConfigError) as error, trial(own(lambda: wrong(**changes)), env_steps=20):
        pass
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_number_of_rows_that_is_no_multiple_of_the_agents_is_refused():
    words = r"has 2 agents, of which each has a row: found 5 rows in a process, wanted a multiple of 2"
    with pytest.raises(ConfigError, match=words):
        make(PROBE.model_copy(update={"num_envs": 5}))


def test_copies_of_other_agents_are_refused(own):  # noqa: F811
    names = iter([["short", "long"], ["long", "short"]])
    with pytest.raises(ConfigError, match=r"copies of other agents: found \['long', 'short'\], wanted .*\['short', 'long'\]"):
        make(own(lambda: wrong(possible_agents=lambda _: next(names)), num_envs=4))


def test_a_function_that_returns_the_same_copy_twice_is_refused(own):  # noqa: F811
    kept = leaving_agents()
    with pytest.raises(ConfigError, match="returns an environment that it returned before: found 1, wanted 2 environments"):
        make(own(lambda: kept, num_envs=4))


@pytest.mark.parametrize("kwargs", [{}, {"mask": "info"}, {"mask": "leaf", "truncates": True}])
def test_the_probe_keeps_the_rules_of_pettingzoo(kwargs):
    tests = pytest.importorskip("pettingzoo.test")
    env = leaving_agents(**kwargs)
    env.unwrapped = env
    tests.parallel_api_test(env, num_cycles=50)


PETTINGZOO = """
from common.envs.probes import leaving_agents

def parallel_env(**kwargs):
    env = leaving_agents(mask=kwargs.get("mask", ""))
    env.render_mode = kwargs.get("render_mode")
    return env
"""


def test_an_id_of_pettingzoo_names_a_module_of_a_package(tmp_path, monkeypatch):
    """Its function takes any keywords, which its signature does not name."""
    (tmp_path / "zoo").mkdir()
    (tmp_path / "zoo" / "__init__.py").touch()
    (tmp_path / "zoo" / "leaving_v1.py").write_text(PETTINGZOO, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    settings = EnvSettings(id="zoo:leaving_v1", num_envs=4, kwargs={"mask": "info"}, action_mask=True)
    with closing(make(settings)) as environment, closing(build(settings, 1, render=True)) as drawn:
        assert (environment.agents, environment.spec.action_mask) == (2, True)
        assert (environment.native.render_mode, drawn.native.render_mode) == (None, "rgb_array")
    with pytest.raises(ConfigError, match=r"env.id names a module that does not exist: found zoo.other_v1 "):
        build(settings.model_copy(update={"id": "zoo:other_v1"}), 1)


def test_a_package_that_an_extra_installs_is_asked_for_by_its_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpe2", None)
    with pytest.raises(ConfigError, match=r"found mpe2 .*; pip install 'rookery\[pettingzoo\]'"):
        build(EnvSettings(id="mpe2:simple_spread_v3"), 1)


def test_an_environment_of_pettingzoo_is_known_by_its_attributes():
    pytest.importorskip("mpe2")
    settings = EnvSettings(id="mpe2:simple_spread_v3", kwargs={"max_cycles": 4}, num_envs=6)
    with closing(make(settings)) as environment:
        environment.reset(3)
        steps = [environment.step(np.ones(6, np.int64)) for _ in range(10)]
    assert [step.truncated.tolist() for step in steps] == [[row % 5 == 3] * 6 for row in range(10)]
    assert (steps[0].observation[:3] != steps[0].observation[3:]).any()
