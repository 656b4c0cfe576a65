"""Tests of an actor's state that another process continues from; and of states from a hostile learner."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from common.algorithms.api import WorkerContext, states
from common.algorithms.registry import build_policy, rollout_schema
from common.algorithms.settings import PPOSettings
from common.envs.make import make
from common.envs.spec import EnvSettings
from common.envs.state import StateError
from common.errors import DecodeError
from common.models.spec import ModelSettings
from common.protocol.messages import ACTOR_STATE
from common.protocol.plain import pack, unpack
from services.acting.incarnation import Incarnation, begin_incarnation
from services.acting.rollout import Rollout

pytestmark = pytest.mark.service

T, B = 5, 3


def build(*, seed=1, env=None, stack=1, cell=None):
    """Environments, policy and rollout of a PPO actor, whose policy has memory where `cell` names one."""
    model = ModelSettings(hidden=(8,), recurrent=cell, recurrent_size=4)
    environment = make(env or EnvSettings(id="CartPole-v1", num_envs=B, frame_stack=stack))
    settings, context = PPOSettings(), WorkerContext(index=0, workers=1, num_envs=B)
    policy = build_policy(settings, model=model, env=environment.spec, precision="fp32", seed=seed, context=context)
    weights = sum(parameter.numel() for parameter in policy._net.parameters())
    policy.load(0, torch.linspace(-0.5, 0.5, weights), env_steps=0)
    schema = rollout_schema(settings, model=model, env=environment.spec, length=T, num_envs=B)
    return Incarnation(environment=environment, policy=policy, rollout=Rollout(schema, environment.reset(seed)))


def collect(setup):
    """One rollout, as the actor's loop makes it."""
    for t in range(T):
        setup.policy.begin_episodes(torch.from_numpy(setup.rollout.start(t)))
        acted = {name: value.numpy() for name, value in setup.policy.act(torch.from_numpy(setup.rollout.observation)).items()}
        action = acted.pop("action")
        setup.rollout.record(t, action, acted, setup.environment.step(action))
    arrays = setup.rollout.finish(states(setup.policy))
    setup.rollout.begin_next()
    return arrays


def welcome(state=None):
    """As far as it matters here."""
    return SimpleNamespace(arrays={} if state is None else {ACTOR_STATE: state})


@pytest.mark.parametrize(("stack", "cell"), [(1, None), (3, None), (1, "lstm"), (1, "gru")])
@pytest.mark.parametrize("rollouts", [0, 1, 7])
def test_an_actor_that_goes_on_collects_the_very_rollouts_of_the_one_before_it(rollouts, stack, cell):
    """Observations, stacks over the boundary, drawn actions, memories, episode ends and the returns under way."""
    first = build(stack=stack, cell=cell)
    for _ in range(rollouts):
        collect(first)
    assert first.rollout.memory.any() == bool(cell and rollouts)
    second = begin_incarnation(lambda: build(seed=9, stack=stack, cell=cell), welcome(first.state()))
    for _ in range(12):
        here, there = collect(first), collect(second)
        assert here.keys() == there.keys()
        assert all(np.array_equal(here[name], there[name]) for name in here)
    assert second.readable


def test_without_a_state_an_incarnation_begins_as_its_seeds_say():
    """The first of its slot."""
    here, there = collect(build()), collect(begin_incarnation(build, welcome()))
    assert all(np.array_equal(here[name], there[name]) for name in here)


def test_a_state_that_cannot_be_read_is_empty():
    """A policy of a user's own that draws from somewhere; and a state that is too large for a message."""
    setup = build()
    setup.policy = SimpleNamespace()
    assert setup.state().size == 0
    assert not setup.readable


def test_a_state_too_large_for_a_message_is_empty(monkeypatch):
    """The limit of a free length on the wire."""
    monkeypatch.setattr("services.acting.incarnation.FREE_LENGTH", 100)
    assert build().state().size == 0


def changed(**parts):
    """A good state with other parts."""
    return pack(unpack(build().state()) | parts)


def remembering(memory):
    """A good state of an actor of a policy with another memory."""
    parts = unpack(build().state())
    return pack(parts | {"rollout": parts["rollout"] | {"memory": memory}})


def stepping_from(**attributes):
    """A good state in which CartPole has other attributes, each of a form that some environment has."""
    parts = unpack(build().state())
    inside = parts["environment"]["environment"]
    (path,) = [path for path, found in inside.items() if "state" in found]
    inside[path] |= attributes
    return pack(parts)


BAD = {
    "no step from it: an empty dict": stepping_from(state={}),
    "no step from it: an empty list": stepping_from(state=[]),
    "no step from it: None": stepping_from(state=None),
    "memories of another size": remembering(np.zeros((B, 4), np.float32)),
    "no memories": remembering(None),
    "random": np.random.default_rng(1).integers(0, 256, 500).astype(np.uint8),
    "another dtype": np.zeros(4, np.float32),
    "another rank": np.zeros((2, 2), np.uint8),
    "too large": np.zeros((1 << 20) + 1, np.uint8),
    "no parts": pack([1, 2]),
    "other environments": changed(environment={"env": {}}),
    "no generator": changed(policy=np.zeros(7, np.uint8)),
    "a generator of other numbers": changed(policy=np.zeros(3)),
    "other episodes": changed(rollout={}),
    "frames of another shape": changed(rollout={"frames": np.zeros((1, 1), np.float32)}),
    "another number of environments": pack(unpack(build(env=EnvSettings(id="Acrobot-v1", num_envs=B)).state())),
}


class Lingering(gymnasium.Env):
    """Keeps an attribute from its second step on, and a constant by the seed of its reset; both decide what is seen."""

    observation_space, action_space = Box(-9.0, 9.0, (2,)), Discrete(2)

    def reset(self, *, seed=None, **_):
        """Draw the constant, which is no plain data."""
        self.drawn = partial(abs, seed) if seed is not None else self.drawn
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, _):
        """Show whether the attribute is there."""
        late, self.steps = hasattr(self, "late"), self.steps + 1
        if self.steps == 2:
            self.late = 1
        return np.array([late, self.drawn() % 9], np.float32), 0.0, False, False, {}


def test_the_steps_on_trial_leave_no_trace():
    """Attributes and constants that a state does not hold are those of an environment that took no step."""
    env = EnvSettings(entry_point=f"{__name__}:Lingering", num_envs=B)
    first = build(env=env)
    second = begin_incarnation(lambda: build(env=env), welcome(first.state()))
    here, there = collect(first), collect(second)
    assert all(np.array_equal(here[name], there[name]) for name in here)


def test_the_steps_on_trial_go_beyond_a_reset():
    """After an end the first step only resets."""
    env = EnvSettings(id="MountainCar-v0", num_envs=B)
    parts = unpack(build(env=env).state())
    parts["environment"]["ended"][:] = parts["environment"]["environment"]["env"]["_autoreset_envs"][:] = True
    assert begin_incarnation(lambda: build(env=env), welcome(pack(parts))).readable
    for path in (path for path, inside in parts["environment"]["environment"].items() if "gravity" in inside):
        parts["environment"]["environment"][path]["gravity"] = None
    assert not begin_incarnation(lambda: build(env=env), welcome(pack(parts))).readable


@pytest.mark.parametrize("state", BAD.values(), ids=BAD)
def test_a_bad_state_costs_a_line_and_lockstep_and_nothing_else(state):
    """The actor begins as its seeds say, and hands over no state, by which the learner sees it."""
    bad = build()
    with pytest.raises((StateError, DecodeError)):
        bad.restore(state) or bad.try_steps()
    setup = begin_incarnation(build, welcome(state))
    here, there = collect(build()), collect(setup)
    assert all(np.array_equal(here[name], there[name]) for name in here)
    assert setup.state().size == 0
