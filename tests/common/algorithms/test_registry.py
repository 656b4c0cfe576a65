"""Algorithms by name."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest
import torch

from common.algorithms import registry
from common.algorithms.api import Place
from common.algorithms.policy import ActorCriticPolicy
from common.algorithms.ppo import PPO
from common.algorithms.registry import Entry
from common.algorithms.settings.a3c import A3CGradSettings
from common.algorithms.settings.ppo import PPOSettings
from common.errors import ConfigError, PeerError
from common.models import arithmetic
from common.models.arithmetic import CPU
from common.models.spec import ModelSettings
from common.wire.messages import Trajectory

pytestmark = pytest.mark.pure


def test_every_entry_is_found_by_the_name_its_settings_carry():
    """The configuration tells algorithms apart by `name` alone."""
    for name, entry in registry.ALGORITHMS.items():
        assert entry.settings().name == name


def test_settings_lead_to_both_sides_of_their_algorithm(vector_env):
    """A learner and an actor build from the same section of the configuration."""
    settings, model = PPOSettings(), ModelSettings(hidden=(4,))
    assert isinstance(registry.build_algorithm(settings, model=model, env=vector_env, seed=1), PPO)
    place = Place(index=0, peers=1, num_envs=1)
    policy = registry.build_policy(settings, model=model, env=vector_env, precision="fp32", seed=1, place=place)
    assert isinstance(policy, ActorCriticPolicy)


@pytest.mark.parametrize("has", ["fp32", "bf16"])
def test_both_sides_compute_in_what_their_processor_has(vector_env, monkeypatch, has):
    """A preset asks for bfloat16; a laptop may not have it."""
    monkeypatch.setattr(arithmetic, "native", lambda _, device: has if device == CPU else "bf16")
    settings, model, place = A3CGradSettings(precision="bf16"), ModelSettings(hidden=(4,)), Place(index=0, peers=1, num_envs=1)
    assert registry.build_algorithm(settings, model=model, env=vector_env, seed=1)._settings.precision == has
    policy = registry.build_policy(settings, model=model, env=vector_env, precision="bf16", seed=1, place=place)
    acts_in = {parameter.dtype for parameter in policy._net.parameters()}
    assert (policy._settings.precision, acts_in) == (has, {torch.float32 if has == "fp32" else torch.bfloat16})
    assert registry.in_native_precision(settings, torch.device("cuda")).precision == "bf16"


def test_an_actor_critic_ships_its_rollouts_with_the_log_probability_of_every_action(vector_env):
    """What is sent is what was written down, and it is checked as a trajectory."""
    settings, size = PPOSettings(), {"length": 2, "num_envs": 1}
    ships = registry.shipment(settings, model=ModelSettings(), env=vector_env, **size)
    assert ships.message is Trajectory
    assert ships.schema == registry.rollout_schema(settings, env=vector_env, **size)
    assert ships.schema[-1].name == "log_prob"
    broken = {spec.name: np.zeros([max(0, axis) for axis in spec.shape], spec.dtype) for spec in ships.schema}
    with pytest.raises(PeerError, match="action outside"):
        ships.check(Trajectory(seq=0, version=0, env_steps=2, shipped=2, arrays=broken | {"action": np.full((2, 1), 9)}))


class OwnSettings(PPOSettings):
    """A section of a user's own."""

    name: str
    patience: int = 3


class Lame(PPO):
    """Takes no step, and not what it is built with."""

    update = None

    def __init__(self, *, settings):
        """Too few."""


class Idle:
    """Does nothing at all."""

    def __init__(self, **_):
        """Whatever it is built with."""


class Unread(ActorCriticPolicy):
    """Cannot say what parameters it takes, which shows once it is built."""

    @property
    def layout(self):
        """Nothing."""
        raise AttributeError


@pytest.fixture
def own(monkeypatch):
    """A module `own_algorithms`, as a user's package would be; its attributes may be set."""
    module = ModuleType("own_algorithms")
    module.ENTRY = Entry(settings=OwnSettings, algorithm=PPO)
    monkeypatch.setitem(sys.modules, "own_algorithms", module)
    return module


@pytest.mark.usefixtures("own")
def test_an_entry_elsewhere_is_found_by_module_and_attribute(vector_env):
    """A user's package is as good as ours: learner, actor and what passes between them."""
    settings, model = OwnSettings(name="own_algorithms:ENTRY"), ModelSettings(hidden=(4,))
    assert isinstance(registry.build_algorithm(settings, model=model, env=vector_env, seed=1), PPO)
    ships = registry.shipment(settings, model=model, env=vector_env, length=2, num_envs=1)
    assert ships.schema == registry.shipment(PPOSettings(), model=model, env=vector_env, length=2, num_envs=1).schema


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        (PPO, r"algorithm.name names no ENTRY of own_algorithms: found ENTRY, a type, wanted one that exists"),
        (Entry(settings=OwnSettings, algorithm=Lame), r"Lame cannot be built: found .*'model', wanted arguments settings, model"),
        (
            Entry(settings=OwnSettings, algorithm=Idle),
            r"Idle is no Algorithm: found no calibrate, coll",
        ),
        (Entry(settings=OwnSettings, algorithm=PPO, policy=PPO), r"PPO cannot be built: found .*, wanted arguments settings"),
        (Entry(settings=dict, algorithm=PPO), r"the settings of an algorithm are a section: found .*dict.*, wanted a class der"),
    ],
    ids=["no entry", "other arguments", "no algorithm", "no policy", "no section"],
)
def test_an_entry_that_cannot_work_is_refused_when_it_is_named(own, entry, line):
    """Before anything is built or written."""
    own.ENTRY = entry
    with pytest.raises(ConfigError, match=line):
        registry.entry("own_algorithms:ENTRY")


def test_what_shows_only_when_it_is_built_is_refused_then(own, vector_env):
    """A policy without its fingerprint would fail at the first snapshot."""
    own.ENTRY = Entry(settings=OwnSettings, algorithm=PPO, policy=Unread)
    settings, place = OwnSettings(name="own_algorithms:ENTRY"), Place(index=0, peers=1, num_envs=1)
    with pytest.raises(ConfigError, match="Unread is no Policy: found no layout"):
        registry.build_policy(settings, model=ModelSettings(), env=vector_env, precision="fp32", seed=1, place=place)


def test_an_algorithm_that_knows_only_the_cpu_is_refused_elsewhere(own, vector_env):
    """A user's, written without a GPU in mind: it must not train on the CPU in silence, nor fail at its first update."""

    class OnTheCpu(PPO):
        def __init__(self, *, settings, model, env, seed):
            super().__init__(settings=settings, model=model, env=env, seed=seed)

    own.ENTRY = Entry(settings=OwnSettings, algorithm=OnTheCpu)
    built = {"model": ModelSettings(), "env": vector_env, "seed": 1}
    assert registry.build_algorithm(OwnSettings(name="own_algorithms:ENTRY"), **built)
    with pytest.raises(ConfigError, match=r"OnTheCpu cannot be built: .*device"):
        registry.build_algorithm(OwnSettings(name="own_algorithms:ENTRY"), **built, device=torch.device("meta"))
