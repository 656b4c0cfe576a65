"""Passes that are written out beside those that autograd records: outputs, gradients, and which network has which."""

import sys
from types import ModuleType

import pytest
import torch

from common.envs.spec import ActionSpec, EnvSpec
from common.models import deterministic
from common.models.flat import Flat
from common.models.passes import Recorded, Written
from common.models.spec import ModelSettings

pytestmark = pytest.mark.pure

BOUNDS = {"n": 0, "shape": (2,), "low": (-1.0, -1.0), "high": (1.0, 1.0)}
VECTORS = EnvSpec(observation_shape=(3,), observation_dtype="float32", action=ActionSpec(**BOUNDS), frame_stack=1, frame_skip=1)
IMAGES = EnvSpec(observation_shape=(10, 12), observation_dtype="uint8", action=ActionSpec(**BOUNDS), frame_stack=2, frame_skip=1)
BYTES = EnvSpec(observation_shape=(3,), observation_dtype="uint8", action=ActionSpec(**BOUNDS), frame_stack=1, frame_skip=1)
TOLERANCE = {"fp32": {"rtol": 1e-5, "atol": 1e-6}, "bf16": {"rtol": 0.05, "atol": 0.02}}


def both(net, precision):
    """Written and recorded passes through one network, and a place for gradients."""
    weights = Flat.of(parameter for parameter in net.parameters() if parameter.requires_grad)
    written = deterministic.passes(net, weights, precision=precision)
    assert isinstance(written, Written)
    return written, Recorded(net, precision=precision), Flat.like(weights.parts)


def an_actor_and_a_critic(hidden=(16, 8), *, layer_norm=False):
    """Float32, with biases and outputs that are not near 0."""
    nets = deterministic.build(ModelSettings(hidden=hidden, layer_norm=layer_norm), VECTORS)
    with torch.no_grad():
        for parameter in nets.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return nets.actor, nets.critics[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("hidden", [(), (16,), (16, 8), (8, 8, 8)])
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("layer_norm", [False, True])
def test_what_is_written_is_what_autograd_finds(hidden, precision, rows, layer_norm):
    """Outputs and all gradients of actor and critic, of some of the rows that were prepared."""
    observation, action = torch.randn(rows + 2, 3), torch.rand(rows + 2, 2) * 2.0 - 1.0
    for net, inputs in zip(
        an_actor_and_a_critic(hidden, layer_norm=layer_norm), ((observation,), (observation, action)), strict=True
    ):
        written, recorded, gradients = both(net, precision)
        found = []
        for passes in (written, recorded):
            prepared = passes.prepare(*inputs)[1:-1]
            output, tape = passes.forward(prepared)
            gradient = torch.linspace(-1.0, 2.0, output.numel()).view_as(output)
            passes.gradients(tape, gradient, into=gradients)
            _, tape = passes.forward(prepared)  # a record serves one backward pass
            found.append((output, passes.evaluate(prepared), gradients.whole.clone(), passes.input_gradient(tape, gradient)))
        assert found[0][0].dtype == found[0][3].dtype == torch.float32
        for mine, autograds in zip(*found, strict=True):
            assert mine.shape == autograds.shape
            assert torch.allclose(mine, autograds, **TOLERANCE[precision])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_that_changed_are_noted_by_renew(precision):
    """An optimizer's step, a checkpoint."""
    _, critic = an_actor_and_a_critic(layer_norm=True)
    written, recorded, _ = both(critic, precision)
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.mul_(-0.5)
    written.renew()
    inputs = torch.randn(4, 3), torch.rand(4, 2)
    outputs = [passes.evaluate(passes.prepare(*inputs)) for passes in (written, recorded)]
    assert torch.allclose(*outputs, **TOLERANCE[precision])


@pytest.mark.parametrize(
    ("env", "settings"),
    [
        (IMAGES, {"conv": ((4, 3, 2),), "hidden": (8,)}),
        (BYTES, {"hidden": (8,)}),
        (VECTORS, {"hidden": (8,), "activation": "tanh"}),
        (VECTORS, {"hidden": (8,), "normalize_observation": True}),
        (VECTORS, {"entry_point": "own_layers:linear", "hidden": (8,)}),
    ],
    ids=["convolutions", "bytes", "tanh", "normalisation", "a user's own"],
)
def test_any_other_network_is_recorded(env, settings, monkeypatch):
    """What is written out would leave something of it out."""
    own = ModuleType("own_layers")
    own.linear = lambda shape: torch.nn.Linear(*shape, 3)  # even where it looks like one of ours
    monkeypatch.setitem(sys.modules, "own_layers", own)
    for net in deterministic.build(ModelSettings(**settings), env).children():
        for one in net if isinstance(net, torch.nn.ModuleList) else [net]:
            weights = Flat.of(parameter for parameter in one.parameters() if parameter.requires_grad)
            assert isinstance(deterministic.passes(one, weights, precision="fp32"), Recorded)
