"""Networks for continuous actions, and the bounds they are scaled to."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.envs.spec import ActionSpec, EnvSpec
from common.errors import ConfigError
from common.models.nets import (
    ActionBounds,
    DeterministicActor,
    GaussianActor,
    build_actor,
    build_sac_networks,
    build_td3_networks,
)
from common.models.snapshot import ParameterLayout
from common.models.spec import ModelSettings

pytestmark = pytest.mark.pure

MODEL = ModelSettings(hidden=(16,), conv=((4, 4, 2),))
both = pytest.mark.parametrize("build", [build_td3_networks, build_sac_networks])


def an_env(*, low=(-1.0, 0.0), high=(3.0, 10.0), image=False):
    """Actions of two components by default; vectors of three numbers, or small images in stacks of two."""
    action = ActionSpec(shape=(len(low),), low=low, high=high)
    observation, dtype = ((10, 12), "uint8") if image else ((3,), "float32")
    return EnvSpec(
        observation_shape=observation, observation_dtype=dtype, action=action, frame_stack=2 if image else 1, frame_skip=1
    )


def test_the_ends_and_the_middle_of_the_bounds_are_minus_1_and_1_and_0():
    """Bounds that are not centred on 0: the fault that a symmetric environment hides."""
    bounds = ActionBounds.of(an_env().action)
    unit = torch.tensor([[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0]])
    assert bounds.scale(unit).tolist() == [[-1.0, 0.0], [1.0, 5.0], [3.0, 10.0]]


@given(st.floats(-1e3, 1e3), st.floats(0.01, 1e3), st.floats(-1.0, 1.0))
def test_what_was_scaled_comes_back(low, width, unit):
    """The replay holds the environment's actions, the critics see the networks': for any bounds the same number."""
    bounds = ActionBounds.of(ActionSpec(shape=(1,), low=(low,), high=(low + width,)))
    back = bounds.unscale(bounds.scale(torch.tensor([[unit]])))
    assert back.item() == pytest.approx(unit, abs=2e-6 * (1.0 + abs(low) / width))


@pytest.mark.parametrize(
    ("env", "found"),
    [
        (an_env(low=(-math.inf,), high=(1.0,)), r"low \[-inf\]"),
        (an_env(low=(0.0, 0.0), high=(1.0, math.inf)), r"high \[1.0, inf\]"),
        (an_env(low=(2.0,), high=(2.0,)), r"low \[2.0\], high \[2.0\]"),
    ],
)
def test_actions_that_cannot_be_scaled_are_refused_before_anything_is_built(env, found):
    """A torque without limit, a component that cannot move: what was found, what is wanted, what to do."""
    with pytest.raises(ConfigError, match=rf"found .*{found}.*, wanted .*; "):
        ActionBounds.of(env.action)


def acted(nets, observation):
    """The actor's actions in -1..1, of SAC drawn ones."""
    chosen = nets.actor(observation)
    return chosen if isinstance(chosen, torch.Tensor) else chosen.sample(torch.randn_like(chosen.mean))[0]


@both
@pytest.mark.parametrize("image", [False, True])
def test_actions_lie_between_minus_1_and_1_and_both_critics_rate_them(build, image):
    """Vectors and images take the same way; weights and observations of any size do not leave the bounds."""
    env = an_env(image=image)
    nets = build(MODEL, env)
    for parameter in nets.actor.parameters():
        parameter.data.mul_(50.0)
    observation = torch.randn(7, 3) * 100 if not image else torch.randint(256, (7, 2, 10, 12), dtype=torch.uint8)
    action = acted(nets, observation)
    values = [critic(observation, action) for critic in nets.critics]
    assert action.shape == (7, 2)
    assert action.abs().max() <= 1.0
    assert [value.shape for value in values] == [(7, 1), (7, 1)]
    assert [value.dtype for value in values] == [torch.float32] * 2
    assert not torch.equal(*values)


def test_the_value_depends_on_the_action():
    """An action that were lost on the way in would leave the actor without a gradient."""
    nets = build_td3_networks(MODEL, an_env())
    observation, action = torch.randn(5, 3), torch.zeros(5, 2, requires_grad=True)
    (gradient,) = torch.autograd.grad(nets.critics[1](observation, action).sum(), action)
    assert (gradient.abs() > 0).all()


@pytest.mark.parametrize("build", [build_td3_networks, build_sac_networks])
def test_initial_weights_and_biases_are_uniform_within_the_root_of_the_inputs(build):
    """As in the published recipes; of another seed other ones."""
    nets, other = (build(ModelSettings(hidden=(64, 64)), an_env(), seed=seed) for seed in (1, 2))
    assert len(linear(nets)) == 9
    for layer, different in zip(linear(nets), linear(other), strict=True):
        bound = layer.in_features**-0.5
        for drawn, again in ((layer.weight, different.weight), (layer.bias, different.bias)):
            assert drawn.abs().max() <= bound
            assert not torch.equal(drawn, again)
        assert layer.weight.abs().max() > 0.9 * bound


def linear(nets):
    """All layers of the actor and of both critics."""
    return [module for module in nets.modules() if isinstance(module, torch.nn.Linear)]


def test_the_deviation_of_sac_is_bounded_whatever_the_observation_is():
    """e^-20 to e^2: outside, log-probabilities and actions would not be finite."""
    actor = build_sac_networks(MODEL, an_env()).actor
    actor.head.weight.data.mul_(1e6)
    log_std = actor(torch.randn(100, 3)).log_std
    assert (log_std.min().item(), log_std.max().item()) == (-20.0, 2.0)


def test_the_target_critics_of_sac_are_a_copy_with_the_names_of_the_critics():
    nets = build_sac_networks(MODEL, an_env())
    targets, critics = dict(nets.target_critics().named_parameters()), dict(nets.named_parameters())
    assert {name.split(".")[0] for name in targets} == {"critics"}
    for name, target in targets.items():
        assert torch.equal(target, critics[name])
        assert target.data_ptr() != critics[name].data_ptr()
        assert not target.requires_grad


@both
def test_layer_normalisation_is_for_those_that_rate(build):
    """The critics alone (docs/decisions/0021)."""
    nets = build(ModelSettings(hidden=(16,), layer_norm=True), an_env())
    normalised = {name.split(".")[0] for name, module in nets.named_modules() if isinstance(module, torch.nn.LayerNorm)}
    assert normalised == {"critics"}


@both
def test_a_seed_fixes_the_weights_and_another_one_changes_them(build):
    """Runs with one seed begin alike, whatever torch's own random state is."""
    weights = [torch.cat([p.flatten() for p in build(MODEL, an_env(), seed=seed).parameters()]) for seed in (1, 1, 2)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(("actor", "build"), [(DeterministicActor, build_td3_networks), (GaussianActor, build_sac_networks)])
def test_the_actor_alone_has_the_layout_of_the_actor_that_is_trained(actor, build):
    """A worker builds no critics, and still takes the learner's snapshot."""
    assert ParameterLayout.of(build_actor(actor, MODEL, an_env())) == ParameterLayout.of(build(MODEL, an_env(), seed=3).actor)
