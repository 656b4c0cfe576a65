"""Networks: shapes for every kind of space, initial weights, what acting in bfloat16 costs in accuracy."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from common.envs.spec import ACTION_MASK, ActionSpec, EnvSpec, Leaf
from common.errors import ConfigError
from common.models import layers, nets
from common.models.arithmetic import autocast
from common.models.distributions import Categorical, DiagonalGaussian
from common.models.snapshot import ParameterLayout
from common.models.spec import ModelSettings

pytestmark = pytest.mark.pure

FIVE = ActionSpec(choices=(5,), shape=())
SMALL = ModelSettings(conv=((8, 4, 2), (8, 3, 2)), hidden=(16,))


def env_spec(*, frame=(20, 24), dtype="uint8", stack=4, action=FIVE):
    """An environment's description with what the test is about."""
    return EnvSpec(observation_shape=frame, observation_dtype=dtype, action=action, frame_stack=stack, frame_skip=1)


def observations(env, count=3):
    """Stacked observations as an actor would see them."""
    shape = (count, *env.network_input_shape)
    generator = torch.Generator().manual_seed(5)
    if env.observation_dtype == "uint8":
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return torch.randn(shape, generator=generator)


BOX = ActionSpec(shape=(2,), low=(-1.0, -1.0), high=(1.0, 1.0))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    "env",
    [
        env_spec(),
        env_spec(stack=1),
        env_spec(frame=(4,), dtype="float32", stack=1),
        env_spec(frame=(4,), dtype="float32", stack=3),
        env_spec(frame=(128,), stack=1),
    ],
    ids=["images", "one image", "vector", "stacked vectors", "bytes"],
)
def test_every_observation_gets_a_distribution_and_a_value(env, shared):
    """The kinds of observation that environments have, with one trunk and with two."""
    net = nets.build_actor_critic(SMALL.model_copy(update={"shared_trunk": shared}), env)
    output = net(observations(env))
    assert isinstance(output.policy, Categorical)
    assert output.policy.log_probs.shape == (3, 5)
    assert output.value.shape == (3,)
    torch.testing.assert_close(net.policy(observations(env))[0].log_probs, output.policy.log_probs)


def test_a_box_of_actions_gets_a_gaussian_with_one_deviation_per_component():
    """Continuous control."""
    env = env_spec(frame=(3,), dtype="float32", stack=1, action=BOX)
    policy = nets.build_actor_critic(SMALL, env).policy(observations(env))[0]
    assert isinstance(policy, DiagonalGaussian)
    assert policy.mean.shape == (3, 2)
    assert policy.log_std.tolist() == [0.0, 0.0]


def test_continuous_actions_are_scaled_to_their_bounds():
    """The first policy acts around the centre, and its deviation is a share of half the range; the same in bfloat16."""
    action = ActionSpec(shape=(3,), low=(-1.0, 0.0, 99.9), high=(3.0, 100.0, 100.1))
    env = env_spec(frame=(3,), dtype="float32", stack=1, action=action)
    net = nets.build_actor_critic(SMALL.model_copy(update={"initial_log_std": -1.0}), env)
    for policy, _ in (net.policy(observations(env)), net.bfloat16().policy(observations(env))):
        half_range = torch.tensor([2.0, 50.0, 0.1])
        torch.testing.assert_close(policy.log_std.exp(), half_range * math.exp(-1.0))
        assert ((policy.mean - torch.tensor([1.0, 50.0, 100.0])).abs() < 0.2 * half_range).all()


def test_a_component_without_bounds_keeps_its_unit():
    """Its range is unknown."""
    action = ActionSpec(shape=(2,), low=(-4.0, -math.inf), high=(4.0, 1.0))
    env = env_spec(frame=(3,), dtype="float32", stack=1, action=action)
    assert nets.build_actor_critic(SMALL, env).policy(observations(env))[0].log_std.exp().tolist() == pytest.approx([4.0, 1.0])


def test_a_component_with_one_bound_begins_inside_it():
    """At 0 where that is 1 inside; else all actions were clipped to the bound, and none was better than another."""
    inf = math.inf
    action = ActionSpec(shape=(6,), low=(10.0, -inf, 0.0, -10.0, -inf, -inf), high=(inf, -10.0, inf, inf, 10.0, inf))
    bounds = nets.ActionBounds.where_finite(action)
    assert bounds.center.tolist() == [11, -11, 1, 0, 0, 0]
    assert bounds.half_range.tolist() == [1] * 6


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_layer_normalisation_makes_features_of_one_size_from_inputs_of_any(precision):
    """By initial biases of 0; without normalisation features are as large as the input."""
    env = env_spec(frame=(4,), dtype="float32", stack=1)
    near = observations(env, count=16)
    far = near * 100.0
    for layer_norm in (True, False):
        net = nets.build_actor_critic(SMALL.model_copy(update={"hidden": (32, 32), "layer_norm": layer_norm}), env)
        with autocast(precision, torch.device("cpu")):
            features = net.trunk(torch.cat([near, far]), net.compute_dtype(near))
        sizes = [half.float().norm().item() for half in features.chunk(2)]
        assert sizes[1] / sizes[0] == pytest.approx(1.0 if layer_norm else 100.0, rel=0.02)


def test_the_output_of_each_convolution_is_normalised_over_channels_and_places():
    """So that a picture with half the contrast has the same features."""
    image = observations(env_spec(), count=4).float() // 2 * 2
    conv = nets.build_actor_critic(SMALL.model_copy(update={"layer_norm": True}), env_spec()).trunk.conv
    x = image
    for first in (0, 3):
        before, normalised = conv[first](x), conv[first : first + 2](x)
        torch.testing.assert_close(normalised, functional.layer_norm(before, before.shape[1:]), atol=1e-5, rtol=1e-5)
        x = normalised.relu()
    torch.testing.assert_close(conv(image), conv(image / 2), atol=1e-3, rtol=1e-3)


def with_leaves(*leaves, mask):
    """An environment that shows an image of 20x24 and these leaves beside it, the last one a mask of actions where `mask`."""
    leaves = (Leaf(path="image", shape=(3, 20, 24), dtype="uint8"), *leaves)
    size = sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in leaves)
    return dataclasses.replace(env_spec(frame=(size,), stack=1), leaves=leaves, action_mask=mask)


@pytest.mark.parametrize(
    ("build", "env"),
    [
        (nets.build_actor_critic, env_spec()),
        (nets.build_actor_critic, with_leaves(Leaf(path="number", shape=(1,), dtype="float32"), mask=False)),
        (nets.build_actor_critic, with_leaves(Leaf(path=ACTION_MASK, shape=(5,), dtype="uint8", choices=(2,) * 5), mask=True)),
        (partial(nets.build_q_network, dueling=False), env_spec()),
        (partial(nets.build_q_network, dueling=True), env_spec()),
        (nets.build_td3_networks, env_spec(action=BOX)),
        (nets.build_sac_networks, env_spec(action=BOX)),
    ],
)
@pytest.mark.parametrize("layer_norm", [True, False])
def test_convolutions_of_all_networks_but_actors_of_td3_and_sac_are_normalised(build, env, layer_norm):
    """Whatever else a network has: streams, leaves, an action as input."""
    net = build(SMALL.model_copy(update={"shared_trunk": False, "layer_norm": layer_norm}), env)
    modules = [module for name, module in net.named_modules() if not name.startswith("actor.")]
    convolutions = [module for module in modules if isinstance(module, nn.Conv2d)]
    norms = [module for module in modules if isinstance(module, nn.GroupNorm)]
    assert len(convolutions) in {2, 4}  # of two trunks or critics
    assert [norm.num_channels for norm in norms] == [conv.out_channels for conv in convolutions if layer_norm]
    if hasattr(net, "actor"):
        assert not any(isinstance(module, nn.GroupNorm) for module in net.actor.modules())


@pytest.mark.parametrize("stack", [1, 2])
def test_one_row_of_leaves_is_seen_as_it_is_among_others(stack):
    """The numbers lie behind 7 bytes, where no number of four bytes may begin."""
    leaves = (Leaf(path="bytes", shape=(7,), dtype="uint8"), Leaf(path="numbers", shape=(2,), dtype="float32"))
    env = dataclasses.replace(env_spec(frame=(15,), stack=stack), leaves=leaves)
    net = nets.build_actor_critic(ModelSettings(hidden=(8,)), env)
    numbers = torch.randn(3, stack, 2, generator=torch.Generator().manual_seed(2)).view(torch.uint8)
    rows = torch.cat([torch.full((3, stack, 7), 9, dtype=torch.uint8), numbers], dim=2)
    rows = rows.reshape(3, *env.network_input_shape)
    torch.testing.assert_close(net(rows[2:]).value, net(rows).value[2:])


def test_an_image_is_seen_as_bytes_over_255():
    """The scale is folded into the first weights: the result must be that of scaling the image."""
    env = env_spec()
    net = nets.build_actor_critic(SMALL, env)
    image = observations(env)
    x = image.float() / 255.0
    for layer in (net.trunk.conv[0], net.trunk.conv[2]):
        x = functional.conv2d(x, layer.weight, layer.bias, layer.stride).relu()
    x = net.trunk.hidden(x.permute(0, 2, 3, 1).flatten(1))
    torch.testing.assert_close(net.trunk(image, torch.float32), x, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [8, 84])
def test_an_image_beside_a_number_does_not_drown_it(size):
    """All its features together are about as long as the number."""
    image = Leaf(path="image", shape=(3, size, size), dtype="uint8")
    leaves = (image, Leaf(path="number", shape=(1,), dtype="float32"))
    env = dataclasses.replace(env_spec(frame=(3 * size**2 + 4,), stack=1), leaves=leaves)
    trunk = nets.build_actor_critic(ModelSettings(), env).trunk
    picture = torch.randint(0, 256, (5, 3, size, size), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    lengths = trunk.trunks()[0](picture, torch.float32).norm(dim=1)
    assert ((lengths > 0.1) & (lengths < 2.0)).all(), lengths


def test_a_vector_of_bytes_is_scaled_too():
    """Atari's RAM as observation: 255 counts as 1."""
    env = env_spec(frame=(3,), stack=1)
    net = nets.build_actor_critic(ModelSettings(hidden=()), env)
    features = net.trunk(torch.tensor([[0, 51, 255]], dtype=torch.uint8), torch.float32)
    torch.testing.assert_close(features, torch.tensor([[0.0, 0.2, 1.0]]))


def test_initial_weights_are_orthogonal_and_the_first_policy_nearly_uniform():
    """The PPO recipe: gain sqrt(2), 0.01 for the policy head, 1 for the value head, zero biases."""
    net = nets.build_actor_critic(ModelSettings(conv=((8, 4, 2),), hidden=(16,)), env_spec())
    for weight, gain in ((net.trunk.conv[0].weight, 2**0.5), (net.policy_head.weight, 0.01), (net.value_head.weight, 1.0)):
        rows = weight.detach().flatten(1)
        torch.testing.assert_close(rows @ rows.T, torch.eye(len(rows)) * gain**2, atol=1e-5, rtol=1e-4)
    assert all(not parameter.any() for name, parameter in net.named_parameters() if name.endswith("bias"))


def test_the_seed_alone_decides_the_initial_weights():
    """Whatever drew from torch's global generator before, a run's first policy is its seed's."""
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = nets.build_actor_critic(SMALL, env_spec(), seed=7)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    for one, other in zip(first.parameters(), nets.build_actor_critic(SMALL, env_spec(), seed=7).parameters(), strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(first.value_head.weight, nets.build_actor_critic(SMALL, env_spec(), seed=8).value_head.weight)


def test_bfloat16_answers_are_float32_and_near_those_of_float32():
    """Acting in bf16, and training under bf16 autocast, against the same weights in fp32."""
    env = env_spec()
    exact = nets.build_actor_critic(SMALL, env)(observations(env))
    with torch.autocast("cpu", torch.bfloat16):
        mixed = nets.build_actor_critic(SMALL, env)(observations(env))
    acting = nets.build_actor_critic(SMALL, env).bfloat16()(observations(env))
    for output in (mixed, acting):
        assert output.value.dtype == output.policy.log_probs.dtype == torch.float32
        torch.testing.assert_close(output.value, exact.value, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(output.policy.log_probs, exact.policy.log_probs, atol=2e-3, rtol=2e-3)


def test_convolutions_that_shrink_the_image_to_nothing_are_refused():
    """A preset for 84x84 used with 16x16 images."""
    nature = ModelSettings(conv=((32, 8, 4), (64, 4, 2), (64, 3, 1)))
    with pytest.raises(ConfigError, match=r"model.conv does not fit the image.*\(16, 16\)"):
        nets.build_actor_critic(nature, env_spec(frame=(16, 16)))


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("size", "layers"), [((84, 84), 3), ((30, 40), 3), ((16, 12), 2), ((7, 7), 3), ((5, 9), 0)])
def test_images_of_any_size_and_channels_get_convolutions_that_fit(size, layers, normalize, dtype):
    """Alone and stacked; the network stays far below the 12 million weights of a perceptron on 84x84x3."""
    for stack in (1, 2):
        env = env_spec(frame=(3, *size), dtype=dtype, stack=stack)
        net = nets.build_actor_critic(ModelSettings(normalize_observation=normalize), env)
        assert sum(isinstance(layer, torch.nn.Conv2d) for layer in net.trunk.conv) == layers
        assert sum(parameter.numel() for parameter in net.parameters()) < 5e6
        assert net(observations(env)).value.shape == (3,)


def test_the_largest_images_keep_the_network_of_the_paper():
    """From 52x52 on."""
    env = env_spec(frame=(52, 60))
    named = ModelSettings(conv=((32, 8, 4), (64, 4, 2), (64, 3, 1)))
    shapes = [
        [parameter.shape for parameter in nets.build_actor_critic(model, env).parameters()] for model in (named, ModelSettings())
    ]
    assert shapes[0] == shapes[1]


def test_images_may_be_flattened():
    """No convolutions with `model.conv: []`: 20 x 24 pixels and 4 frames into the first layer."""
    net = nets.build_actor_critic(SMALL.model_copy(update={"conv": ()}), env_spec())
    assert net.trunk.hidden[0].in_features == 4 * 20 * 24
    assert net(observations(env_spec())).value.shape == (3,)


def test_after_calibration_what_stands_still_is_0_and_the_liveliest_pixel_stays_within_1():
    """Example frames of random play: a background of 100, one pixel that is 0 or 200; the means travel with the weights."""
    env = env_spec(stack=2)
    net = nets.build_actor_critic(SMALL.model_copy(update={"normalize_observation": True}), env)
    frames = torch.full((4, 20, 24), 100, dtype=torch.uint8)
    frames[:, 3, 5] = torch.tensor([0, 200, 0, 200])
    net.calibrate(frames)
    seen = net.trunk.normalisation(frames[:, None].expand(4, 2, 20, 24), torch.float32)
    assert seen.abs().sum(dim=(2, 3)).eq(seen[:, :, 3, 5].abs()).all()
    torch.testing.assert_close(seen[:, :, 3, 5].std(0), torch.full((2,), 0.5))
    assert {"trunk.normalisation.mean", "trunk.normalisation.divisor"} <= dict(net.named_parameters()).keys()
    assert net(frames[:, None].expand(4, 2, 20, 24)).value.shape == (4,)


class PlainResNet(torch.nn.Module):
    """The network of Espeholt et al. 2018, figure 3 (large), up to its dense layers, as a script would write it."""

    def __init__(self, channels, widths):
        super().__init__()
        self.sections = torch.nn.ModuleList()
        for width in widths:
            layers = [torch.nn.Conv2d(channels, width, 3, padding=1)]
            layers += [torch.nn.Conv2d(width, width, 3, padding=1) for _ in range(4)]
            self.sections.append(torch.nn.ModuleList(layers))
            channels = width

    def forward(self, x):
        for conv, first, second, third, fourth in self.sections:
            x = functional.max_pool2d(conv(x), 3, stride=2, padding=1)
            x = x + second(functional.relu(first(functional.relu(x))))
            x = x + fourth(functional.relu(third(functional.relu(x))))
        return functional.relu(x)


@pytest.mark.parametrize(("name", "widths"), [("impala", (16, 32, 32)), ("impala-2", (32, 64, 64)), ("impala-4", (64, 128, 128))])
@pytest.mark.parametrize("frame", [(84, 84), (21, 9)])
def test_the_resnet_of_impala_is_the_published_one(name, widths, frame):
    """Values of the trunk equal those of a plain network with the same weights; features are in the order [H, W, C]."""
    env = env_spec(frame=frame)
    trunk = nets.build_actor_critic(ModelSettings(conv=name, hidden=()), env, seed=1).trunk.double()
    plain = PlainResNet(4, widths).double()
    with torch.no_grad():
        for own, other in zip(trunk.conv.parameters(), plain.parameters(), strict=True):
            other.copy_(own)
        features = trunk(observations(env), torch.float64)
        wanted = plain(observations(env).double() / 255.0).permute(0, 2, 3, 1).flatten(1)
    assert trunk.features == features.shape[1] == math.prod(math.ceil(side / 8) for side in frame) * widths[-1]
    torch.testing.assert_close(features, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("activation", ["relu", "elu", "tanh", "silu"])
def test_a_residual_block_adds_its_input_as_it_was(activation):
    """An activation in place would change the input first; the gradient tells too."""
    block = layers._ResidualBlock(3, activation)
    torch.nn.init.zeros_(block.branch[3].weight)
    torch.nn.init.zeros_(block.branch[3].bias)
    image = torch.randn(2, 3, 4, 5, requires_grad=True)
    added = block(image)
    added.sum().backward()
    assert torch.equal(added, image)
    assert torch.equal(image.grad, torch.ones_like(image))


def test_the_resnet_acts_in_bfloat16_and_has_the_initial_weights_of_all_convolutions():
    env, model = env_spec(frame=(24, 24)), ModelSettings(conv="impala", hidden=(32,))
    net = nets.build_actor_critic(model, env, seed=4)
    convolutions = [module for module in net.modules() if isinstance(module, torch.nn.Conv2d)]
    assert len(convolutions) == 15
    for layer in convolutions:
        weight = layer.weight.flatten(1)
        assert layer.weight.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(weight @ weight.T, 2.0 * torch.eye(len(weight)), atol=1e-5, rtol=0.0)
        assert not layer.bias.any()
    exact = net(observations(env))
    acting = nets.build_actor_critic(model, env, seed=4).bfloat16()(observations(env))
    torch.testing.assert_close(acting.value, exact.value, atol=5e-2, rtol=5e-2)
    torch.testing.assert_close(acting.policy.log_probs, exact.policy.log_probs, atol=1e-2, rtol=1e-2)


def test_the_parameters_of_the_resnet_keep_their_names_and_shapes():
    """Otherwise checkpoints of a version before could not be read: this fingerprint must not change."""
    outlined = nets.outline_actor_critic(ModelSettings(conv="impala", hidden=(256,)), env_spec(frame=(84, 84)))
    assert ParameterLayout.of(outlined).size == 1_090_774
    assert ParameterLayout.of(outlined).fingerprint == "35223852edc454a1"


@pytest.mark.parametrize("side", ["rows", "columns"])
def test_the_resnet_refuses_an_image_that_it_cannot_halve_three_times(side):
    frame = (7, 30) if side == "rows" else (30, 7)
    with pytest.raises(ConfigError) as caught:
        nets.build_actor_critic(ModelSettings(conv="impala"), env_spec(frame=frame))
    wanted = f"found {frame}, wanted at least 8 rows and columns for impala, which halves them 3 times"
    assert str(caught.value) == f"model.conv does not fit the image: {wanted}; set model.conv to auto"
    assert nets.build_actor_critic(ModelSettings(conv="impala"), env_spec(frame=(8, 8))).trunk.features == 512
