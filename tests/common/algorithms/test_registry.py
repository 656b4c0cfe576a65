"""Algorithms by name, and a user's classes that lack something."""

from __future__ import annotations

import sys
from abc import abstractmethod
from types import ModuleType, SimpleNamespace
from typing import Protocol

import numpy as np
import pytest
import torch

from common.algorithms import registry
from common.algorithms.api import Entry, NetworkPolicy, WorkerContext
from common.algorithms.on_policy import ActorCriticPolicy, recorded_log_prob
from common.algorithms.ppo import PPO
from common.algorithms.registry import require_arguments, require_protocol
from common.algorithms.sac import SAC
from common.algorithms.settings import A3CGradSettings, DQNSettings, PPOSettings
from common.errors import ConfigError, ProtocolError
from common.models import arithmetic
from common.models.arithmetic import CPU
from common.models.nets import build_actor_critic
from common.models.spec import ModelSettings
from common.protocol.messages import Trajectory

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("has", ["fp32", "bf16"])
def test_both_sides_compute_in_what_their_processor_has(vector_env, monkeypatch, has):
    """A preset asks for bfloat16; a laptop may not have it."""
    monkeypatch.setattr(arithmetic, "native", lambda _, device: has if device == CPU else "bf16")
    settings, model, context = (
        A3CGradSettings(precision="bf16"),
        ModelSettings(hidden=(4,)),
        WorkerContext(index=0, workers=1, num_envs=1),
    )
    assert registry.build_algorithm(settings, model=model, env=vector_env, seed=1)._settings.precision == has
    policy = registry.build_policy(settings, model=model, env=vector_env, precision="bf16", seed=1, context=context)
    acts_in = {parameter.dtype for parameter in policy._net.parameters()}
    assert (policy._settings.precision, acts_in) == (has, {torch.float32 if has == "fp32" else torch.bfloat16})
    assert registry.in_native_precision(settings, torch.device("cuda")).precision == "bf16"


def test_an_actor_critic_ships_its_rollouts_with_the_log_probability_of_every_action(vector_env):
    """Messages have the schema of the rollout and are checked as trajectories."""
    settings, size = PPOSettings(), {"length": 2, "num_envs": 1}
    ships = registry.build_payload(settings, model=ModelSettings(), env=vector_env, **size)
    assert ships.message_type is Trajectory
    assert ships.schema == registry.rollout_schema(settings, model=ModelSettings(), env=vector_env, **size)
    assert ships.schema[-1].name == "log_prob"
    broken = {spec.name: np.zeros([max(0, axis) for axis in spec.shape], spec.dtype) for spec in ships.schema}
    with pytest.raises(ProtocolError, match="action outside"):
        ships.check(Trajectory(seq=0, version=0, env_steps=2, env_steps_sent=2, arrays=broken | {"action": np.full((2, 1), 9)}))


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


def own_entry(**parts):
    """An algorithm as a user's package would have it; parts to differ by keyword."""
    ours = {"settings": OwnSettings, "algorithm": PPO, "policy": ActorCriticPolicy, "recorded": recorded_log_prob}
    return Entry(**(ours | parts))


@pytest.fixture
def own(monkeypatch):
    """A module `own_algorithms`, as a user's package would be; its attributes may be set."""
    module = ModuleType("own_algorithms")
    module.ENTRY = own_entry()
    monkeypatch.setitem(sys.modules, "own_algorithms", module)
    return module


@pytest.mark.usefixtures("own")
def test_an_entry_elsewhere_is_found_by_module_and_attribute(vector_env):
    """A user's package is as good as ours: learner, actor and what passes between them."""
    settings, model = OwnSettings(name="own_algorithms:ENTRY"), ModelSettings(hidden=(4,))
    assert isinstance(registry.build_algorithm(settings, model=model, env=vector_env, seed=1), PPO)
    ships = registry.build_payload(settings, model=model, env=vector_env, length=2, num_envs=1)
    assert ships.schema == registry.build_payload(PPOSettings(), model=model, env=vector_env, length=2, num_envs=1).schema


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        (PPO, r"algorithm.name names no ENTRY of own_algorithms: found ENTRY, a value of type type, wanted one that exists"),
        (
            own_entry(algorithm=Lame),
            r"Lame cannot be built: found .*'model', wanted arguments settings, model",
        ),
        (
            own_entry(algorithm=Idle),
            r"Idle is no Algorithm: found no calibrate, ingest",
        ),
        (own_entry(policy=SAC), r"SAC cannot be built: found .*, wanted arguments settings"),
        (own_entry(policy=PPO), r"PPO is no Policy: found no load, act, experience"),
        (
            own_entry(settings=dict),
            r"the settings of an algorithm are a section: found .*dict.*, wanted a class der",
        ),
    ],
    ids=["no entry", "other arguments", "no algorithm", "other arguments of a policy", "no policy", "no section"],
)
def test_an_entry_that_cannot_work_is_refused_when_it_is_named(own, entry, line):
    """Before anything is built or written."""
    own.ENTRY = entry
    with pytest.raises(ConfigError, match=line):
        registry.entry("own_algorithms:ENTRY")


def test_what_shows_only_when_it_is_built_is_refused_then(own, vector_env):
    """A policy without its fingerprint would fail at the first snapshot."""
    own.ENTRY = own_entry(policy=Unread)
    settings, context = OwnSettings(name="own_algorithms:ENTRY"), WorkerContext(index=0, workers=1, num_envs=1)
    with pytest.raises(ConfigError, match="Unread is no Policy: found no layout"):
        registry.build_policy(settings, model=ModelSettings(), env=vector_env, precision="fp32", seed=1, context=context)


def test_a_policy_without_the_memory_that_its_run_asks_for_is_refused(own, vector_env):
    """Its messages would hold states that nothing wrote."""

    class Forgetful(NetworkPolicy):
        def __init__(self, *, model, env, precision, seed, **_):
            super().__init__(build_actor_critic(model, env), precision=precision, seed=seed)

        def act(self, observation, *, greedy=False):
            raise NotImplementedError

    own.ENTRY = own_entry(policy=Forgetful)
    settings, context = OwnSettings(name="own_algorithms:ENTRY"), WorkerContext(index=0, workers=1, num_envs=1)
    model = ModelSettings(recurrent="gru", recurrent_size=8)
    with pytest.raises(ConfigError, match="the state of its policy: found 0, wanted 8; pass state_size="):
        registry.build_policy(settings, model=model, env=vector_env, precision="fp32", seed=1, context=context)


def test_an_algorithm_that_knows_only_the_cpu_is_refused_elsewhere(own, vector_env):
    """A user's, written without a GPU in mind: it must not train on the CPU in silence, nor fail at its first update."""

    class OnTheCpu(PPO):
        def __init__(self, *, settings, model, env, seed):
            super().__init__(settings=settings, model=model, env=env, seed=seed)

    own.ENTRY = own_entry(algorithm=OnTheCpu)
    built = {"model": ModelSettings(), "env": vector_env, "seed": 1}
    assert registry.build_algorithm(OwnSettings(name="own_algorithms:ENTRY"), **built)
    with pytest.raises(ConfigError, match=r"OnTheCpu cannot be built: .*device"):
        registry.build_algorithm(OwnSettings(name="own_algorithms:ENTRY"), **built, device=torch.device("meta"))


class OwnReplaySettings(DQNSettings):
    """A section of a user's own, of an algorithm with a replay memory."""

    name: str


@pytest.mark.parametrize(
    ("run", "fix"),
    [
        ({"device": torch.device("meta")}, "set learner.device=cpu, or let its constructor take `device`"),
        ({"ranks": SimpleNamespace(count=2)}, "set learner.ranks=1, or let its constructor take `ranks`"),
        ({"streams": 17}, "let actors step 16 environments at most, or let its constructor take `streams`"),
        ({"normalize_reward": True}, "set env.normalize_reward=false, or let its constructor take `normalize_reward`"),
        ({"model": ModelSettings(recurrent="gru")}, "set model.recurrent=null, or let its constructor take `length`"),
    ],
)
def test_a_run_that_a_constructor_cannot_do_is_refused_with_the_setting_to_change(own, vector_env, run, fix):
    class Plain(PPO):
        def __init__(self, *, settings, model, env, seed):
            raise NotImplementedError

    own.ENTRY = own_entry(settings=OwnReplaySettings, algorithm=Plain)
    arguments = {"model": ModelSettings(), "env": vector_env, "seed": 1} | run
    with pytest.raises(ConfigError) as refusal:
        registry.build_algorithm(OwnReplaySettings(name="own_algorithms:ENTRY"), **arguments)
    assert refusal.value.fix == fix


# --- classes against a protocol ---


class Bird(Protocol):
    """The members that are required."""

    @property
    def wings(self) -> int:
        """A number."""

    def fly(self) -> None:
        """A method."""

    def sing(self) -> None:
        """Another."""


class Rook:
    """Has it all, one part only when it is built."""

    def __init__(self):
        """Two of them."""
        self.wings = 2

    def fly(self):
        """Away."""

    def sing(self):
        """Loudly."""


class Wingless(Rook):
    """Built without."""

    def __init__(self):
        """None."""


class Stone:
    """Lacks methods too."""

    def sing(self):
        """Rolling."""


class Heir(Bird):
    """Derives from the protocol itself; its methods do nothing."""

    wings = 2

    def fly(self):
        """Away."""


class Sketch(Rook):
    """Leaves one to derived classes."""

    @abstractmethod
    def nest(self):
        """Somewhere."""


@pytest.mark.parametrize("thing", [Rook, Rook(), Wingless, lambda: None], ids=["class", "object", "not built yet", "function"])
def test_what_keeps_the_promise_or_still_may_passes(thing):
    """An attribute that `__init__` sets is not there before; what a function builds is judged when it is built."""
    require_protocol(thing, Bird, of="own")


@pytest.mark.parametrize(
    ("thing", "lacks"),
    [(Stone, "fly"), (Stone(), "wings, fly"), (Wingless(), "wings"), (Heir, "sing"), (Heir(), "sing"), (Sketch, "nest")],
)
def test_what_is_missing_is_named(thing, lacks):
    """Also where it is inherited from a class that only says what there should be."""
    with pytest.raises(ConfigError, match=rf"own: \w+ is no Bird: found no {lacks}, wanted the members"):
        require_protocol(thing, Bird, of="own")


def test_a_class_that_takes_other_arguments_is_refused():
    """It would fail in the learner, after the run has begun."""
    require_arguments(dict, ("settings", "env"), of="own")
    require_arguments(lambda **_: None, ("settings", "env"), of="own")
    with pytest.raises(ConfigError, match=r"own: Rook cannot be built: found .*'settings', wanted arguments settings, env"):
        require_arguments(Rook, ("settings", "env"), of="own")
