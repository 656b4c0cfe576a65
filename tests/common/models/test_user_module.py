"""A network of the user's own under our heads: what it sees, how it begins, and what is refused."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

from common.envs.spec import ActionSpec, EnvSpec
from common.errors import ConfigError
from common.models import nets, snapshot
from common.models.snapshot import ParameterLayout
from common.models.spec import ModelSettings

pytestmark = pytest.mark.pure

BOX = ActionSpec(shape=(2,), low=(-1.0, -1.0), high=(1.0, 1.0))


def spec(frame=(3,), dtype="float32", action=None):
    """An environment's description."""
    action = action or ActionSpec(choices=(4,), shape=())
    return EnvSpec(observation_shape=frame, observation_dtype=dtype, action=action, frame_stack=1, frame_skip=1)


class Mixed(nn.Module):
    """Weights of several kinds, each begun in its own way; keeps what it saw."""

    def __init__(self, shape, *, width=5):
        """Random, plain and constant parameters, and a buffer that is the same everywhere."""
        super().__init__()
        self.linear = nn.Linear(int(np.prod(shape)), width)
        self.norm = nn.LayerNorm(width)
        self.drawn = nn.Parameter(torch.rand(width))
        self.register_buffer("table", torch.arange(width), persistent=False)
        self.seen = []

    def forward(self, observation):
        """[N, *shape] to [N, width, 1]."""
        self.seen.append(observation)
        return (self.norm(self.linear(observation.flatten(1))) * self.drawn).unsqueeze(-1)


@pytest.fixture(autouse=True)
def own(monkeypatch):
    """A module `own_nets`, as a user's package would be; its attributes may be set."""
    module = ModuleType("own_nets")
    module.Mixed = Mixed
    monkeypatch.setitem(sys.modules, "own_nets", module)
    return module


def settings(name="Mixed", **changed):
    """The section of the configuration."""
    return ModelSettings(entry_point=f"own_nets:{name}", **{"hidden": (6,)} | changed)


def test_it_serves_every_kind_of_network():
    """Actor-critic, action values, and actor with critics."""
    observation = torch.randn(7, 3)
    assert nets.build_actor_critic(settings(), spec())(observation).value.shape == (7,)
    assert nets.build_q_network(settings(), spec(), dueling=True)(observation)[0].shape == (7, 4)
    both = nets.build_td3_networks(settings(), spec(action=BOX))
    assert [critic(observation, both.actor(observation)).shape for critic in both.critics] == [(7, 1)] * 2


def test_the_layers_of_the_settings_follow_it():
    """`model.hidden` means what it says; without any, the heads sit on its features."""
    assert nets.build_actor_critic(settings(kwargs={"width": 9}), spec()).trunk.hidden[0].weight.shape == (6, 9)
    assert nets.build_actor_critic(settings(hidden=()), spec()).policy_head.weight.shape == (4, 5)


def test_it_begins_as_it_was_built_and_by_the_seed_alone():
    """Our initialisation is for our layers; torch's global generator is as it was before."""
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, again, other = (nets.build_actor_critic(settings(), spec(), seed=seed).trunk.user.module for seed in (7, 7, 8))
    assert torch.equal(torch.get_rng_state(), state)
    assert first.norm.weight.tolist() == [1.0] * 5
    assert first.linear.bias.any()
    for one, same, different in zip(first.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, same)
        assert one.dim() == 1 or not torch.equal(one, different)


def test_threads_that_build_it_at_once_get_the_weights_of_their_seeds():
    """Torch has one global generator, and two threads that read its state at once can stop for ever."""

    def drawn(seed):
        return nets.build_actor_critic(settings(), spec(), seed=seed).trunk.user.module.drawn.tolist()

    seeds = [1, 2, 3] * 20
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(drawn, seeds)) == [drawn(seed) for seed in seeds]


def test_its_parameters_travel_like_ours():
    """An actor that loads a snapshot acts as the learner would, whatever its own weights began with."""
    learner, actor = (nets.build_actor_critic(settings(), spec(), seed=seed) for seed in (1, 2))
    snapshot.load(actor, snapshot.to_tensor(snapshot.flatten(learner, "fp32")))
    observation = torch.randn(4, 3)
    torch.testing.assert_close(actor(observation).value, learner(observation).value)
    assert ParameterLayout.of(learner) == ParameterLayout.of(nets.outline_actor_critic(settings(), spec()))


def test_it_sees_bytes_as_fractions_and_colours_as_planes():
    """An image that our own convolutions have no place for."""
    net = nets.build_actor_critic(settings(), spec(frame=(3, 4, 5), dtype="uint8"))
    net(torch.full((2, 3, 4, 5), 51, dtype=torch.uint8))
    torch.testing.assert_close(net.trunk.user.module.seen[-1], torch.full((2, 3, 4, 5), 0.2))


def test_it_sees_normalised_observations_where_that_is_asked():
    """Centred, and within 1 for the liveliest."""
    net = nets.build_actor_critic(settings(normalize_observation=True), spec(frame=(1,)))
    net.set_moments(mean=torch.tensor([10.0]).double(), std=torch.tensor([4.0]).double())
    net(torch.tensor([[8.0], [12.0]]))
    assert net.trunk.user.module.seen[-1].mean().item() == pytest.approx(0.0)
    assert net.trunk.user.module.seen[-1].abs().max().item() < 1.0


def test_acting_in_bfloat16_stays_near():
    """Its weights and what it sees are rounded alike."""
    observation = torch.randn(4, 3)
    exact = nets.build_actor_critic(settings(), spec())
    rounded = nets.build_actor_critic(settings(), spec()).bfloat16()
    torch.testing.assert_close(rounded(observation).value, exact(observation).value, atol=5e-2, rtol=5e-2)


class Forgetful(nn.Module):
    """Makes something of the wrong kind or shape."""

    def __init__(self, shape, *, makes="rows"):
        """`makes` says what."""
        super().__init__()
        self.shape, self.makes = shape, makes

    def forward(self, observation):
        """Never features."""
        match self.makes:
            case "nothing":
                return None
            case "rows":
                return observation.sum(0, keepdim=True)
            case "numbers":
                return observation.long()
            case "one":
                return observation.sum(1)
            case "empty":
                return observation[:, :0]
            case _:
                return observation @ torch.zeros(99, 1)


class Noisy(nn.Module):
    """Features with dropout, in training alone or `always`."""

    def __init__(self, shape, *, always=False):
        super().__init__()
        self.linear, self.always = nn.Linear(*shape, 8), always

    def forward(self, observation):
        return nn.functional.dropout(self.linear(observation), 0.5, training=self.always or self.training)


@pytest.mark.parametrize("always", [False, True])
def test_a_module_with_dropout_is_refused(own, always):
    """The learner trains, actors evaluate: they would compute two policies from the same weights."""
    own.Noisy = Noisy
    with pytest.raises(ConfigError, match="own_nets:Noisy computes another output in training than in evaluation"):
        nets.build_actor_critic(settings("Noisy", kwargs={"always": always}), spec())


class Untrained(nn.Linear):
    """Computes in evaluation alone."""

    def __init__(self, shape):
        super().__init__(*shape, 8)
        self.calls = 0

    def forward(self, observation):
        self.calls += self.training
        if self.calls > 1:
            raise ValueError("no second pass")
        return super().forward(observation)


def test_a_module_that_fails_in_training_is_refused_with_its_error(own):
    own.Untrained = Untrained
    with pytest.raises(ConfigError, match="own_nets:Untrained fails on an observation: found ValueError: no second pass"):
        nets.build_actor_critic(settings("Untrained"), spec())


@pytest.mark.parametrize(
    ("makes", "line"),
    [
        (
            "nothing",
            r"makes no features: found <class 'NoneType'>, wanted features \[N, F\] of floats for observations \('N', 3\)",
        ),
        ("rows", r"makes no features: found torch.float32 \(1, 3\) of 2"),
        ("numbers", r"makes no features: found torch.int64 \(2, 3\) of 2"),
        ("one", r"makes no features: found torch.float32 \(2,\) of 2"),
        ("empty", r"makes no features: found torch.float32 \(2, 0\) of 2"),
        ("a fault", r"fails on an observation: found RuntimeError: mat1"),
    ],
)
def test_a_module_that_makes_no_features_is_refused_when_it_is_built(own, makes, line):
    """On two zeros, before any actor is started."""
    own.Forgetful = Forgetful
    with pytest.raises(ConfigError, match=f"own_nets:Forgetful {line}"):
        nets.build_actor_critic(settings("Forgetful", kwargs={"makes": makes}), spec())


def test_state_that_no_snapshot_carries_is_refused(own):
    """The running statistics of a BatchNorm would be the learner's alone, and its actors act by others."""
    own.normed = lambda shape: nn.Sequential(nn.BatchNorm1d(*shape))
    with pytest.raises(
        ConfigError, match=r"normed has state that no snapshot carries: found buffers 0.num_batches_tracked, 0.run"
    ):
        nets.build_actor_critic(settings("normed"), spec())


def test_a_parameter_of_whole_numbers_is_refused(own):
    """Snapshots in bfloat16 rounded it, and a network whose first parameter it was saw observations as whole numbers."""

    class Permuted(nn.Module):
        def __init__(self, shape):
            super().__init__()
            self.order = nn.Parameter(torch.randperm(*shape), requires_grad=False)

        def forward(self, observation):
            return observation[:, self.order]

    own.Permuted = Permuted
    with pytest.raises(ConfigError, match=r"Permuted has parameters .*: found \{'order': 'torch.int64'\}, wanted torch.float32"):
        nets.build_actor_critic(settings("Permuted"), spec())


class Drawn(nn.Module):
    """A fixed random projection, kept in one of several ways."""

    def __init__(self, shape, *, kept):
        super().__init__()
        projection = torch.randn(*shape, 4)
        if kept == "numpy":
            projection = torch.from_numpy(np.random.default_rng().random((*shape, 4), np.float32))
        if kept == "buffer":
            self.register_buffer("projection", projection, persistent=False)
        else:
            self.projection = nn.Parameter(projection, requires_grad=False) if kept == "parameter" else projection

    def forward(self, observation):
        return observation @ self.projection


def test_a_module_that_is_another_at_its_second_call_is_refused(own):
    """The learner's and an actor's would not fit each other."""
    widths = []

    def grown(shape):
        widths.append(4)
        return nn.Linear(*shape, sum(widths))

    own.grown = grown
    with pytest.raises(ConfigError, match=r"own_nets:grown builds another network at its second call: .*wanted \[\('weight'"):
        nets.build_actor_critic(settings("grown"), spec())


@pytest.mark.parametrize("kept", ["parameter", "buffer", "attribute", "numpy"])
def test_random_numbers_beside_its_parameters_are_refused(own, kept):
    """An actor builds a module of its own and loads parameters alone: it would act with another projection."""
    own.Drawn = Drawn
    with nullcontext() if kept == "parameter" else pytest.raises(ConfigError, match="draws numbers that no snapshot carries"):
        nets.build_actor_critic(settings("Drawn", kwargs={"kept": kept}), spec())


@pytest.mark.parametrize("first", [nn.ReLU(inplace=True), lambda x: x.div_(10)], ids=["relu", "division"])
def test_a_module_that_writes_to_its_input_is_refused(own, first):
    """It would write to the actor's stacks and to the learner's batch, which another critic or the target network sees next."""

    class Writes(nn.Module):
        def forward(self, x):
            return first(x)

    own.writes = lambda _: Writes()
    with pytest.raises(ConfigError, match="own_nets:writes writes to its input: found an observation changed in place"):
        nets.build_actor_critic(settings("writes"), spec())


def test_a_function_that_raises_is_refused_with_its_error(own):
    """Otherwise the learner would crash and be restarted until its restarts are spent."""
    own.raising = lambda shape: shape.width
    with pytest.raises(ConfigError, match=r"own_nets:raising fails when it is called: found AttributeError: 'tuple' object"):
        nets.build_actor_critic(settings("raising"), spec())


def test_what_is_no_module_or_takes_other_arguments_is_refused(own):
    """A function that forgot to return, a slip in kwargs."""
    own.nothing = lambda _: None
    with pytest.raises(
        ConfigError, match=r"own_nets:nothing made no network: found <class 'NoneType'>, wanted a torch.nn.Module"
    ):
        nets.build_actor_critic(settings("nothing"), spec())
    with pytest.raises(ConfigError, match=r"own_nets:Mixed does not take model.kwargs: found {'widht': 3}"):
        nets.build_actor_critic(settings(kwargs={"widht": 3}), spec())
