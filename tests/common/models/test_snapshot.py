"""Parameters there and back through the flat buffer of a Snapshot message."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.envs.spec import ActionSpec, EnvSpec
from common.errors import ProtocolError
from common.models import nets, snapshot
from common.models.spec import ModelSettings

pytestmark = pytest.mark.pure

ENV = EnvSpec(
    observation_shape=(12, 12), observation_dtype="uint8", action=ActionSpec(choices=(3,), shape=()), frame_stack=2, frame_skip=1
)


def build(width=8, seed=0):
    """A small network for images."""
    return nets.build_actor_critic(ModelSettings(conv=((4, 4, 2),), hidden=(width,)), ENV, seed=seed)


def test_float32_parameters_come_back_bit_for_bit():
    """A learner's weights reach an actor; the buffer from the wire is read-only."""
    source, target = build(seed=1), build(seed=2)
    buffer = snapshot.flatten(source, "fp32")
    buffer.setflags(write=False)
    snapshot.load(target, buffer)
    assert buffer.dtype == np.float32
    for one, other in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(one, other)


def test_bfloat16_parameters_come_back_as_the_nearest_bfloat16():
    """Half the bytes on the wire, into an actor that acts in fp32 and into one that acts in bf16."""
    source = build(seed=1)
    buffer = snapshot.flatten(source, "bf16")
    assert buffer.dtype == np.uint16
    exact, rounded = build(seed=2), build(seed=2).bfloat16()
    snapshot.load(exact, buffer)
    snapshot.load(rounded, snapshot.to_tensor(buffer))
    for origin, one, other in zip(source.parameters(), exact.parameters(), rounded.parameters(), strict=True):
        assert torch.equal(one, origin.bfloat16().float())
        assert torch.equal(other, origin.bfloat16())


def test_a_snapshot_is_a_copy():
    """The learner trains on while the buffer waits to be sent."""
    net = build()
    buffer = snapshot.flatten(net, "fp32")
    before = buffer.copy()
    with torch.no_grad():
        net.value_head.weight.add_(1.0)
    assert np.array_equal(buffer, before)


def test_a_gradient_comes_back_as_it_was_sent():
    """In the order of the snapshot; a parameter without a gradient is zeros, and what is not trained gets none."""
    source, target = build(seed=1), build(seed=2)
    source.value_head.bias.requires_grad_(requires_grad=False)
    target.value_head.bias.requires_grad_(requires_grad=False)
    for number, parameter in enumerate(source.parameters()):
        parameter.grad = torch.full_like(parameter, number) if parameter.requires_grad else None
    buffer = snapshot.flatten_gradient(source, "fp32")
    assert buffer.shape == snapshot.flatten(source, "fp32").shape
    snapshot.load_gradient(target, torch.from_numpy(buffer))
    for origin, copy in zip(source.parameters(), target.parameters(), strict=True):
        assert (origin.grad is None) == (copy.grad is None)
        assert origin.grad is None or torch.equal(origin.grad, copy.grad)
    assert snapshot.flatten_gradient(build(), "bf16").tolist() == [0] * buffer.size


def test_a_gradient_of_another_network_is_refused():
    """Three numbers for a network of more."""
    with pytest.raises(ProtocolError, match="snapshot of another network"):
        snapshot.load_gradient(build(), torch.zeros(3))


def test_a_layout_is_told_by_shapes_not_by_weights_or_precision():
    """Two processes compare fingerprints before they exchange parameters."""
    layout = snapshot.ParameterLayout.of(build(seed=1))
    assert layout.fingerprint == snapshot.ParameterLayout.of(build(seed=2).bfloat16()).fingerprint
    assert layout.fingerprint != snapshot.ParameterLayout.of(build(width=9)).fingerprint
    assert layout.size == snapshot.flatten(build(), "fp32").size


@pytest.mark.parametrize("wrong", [np.zeros(3, np.float32), np.zeros((2, 2), np.float32), np.zeros(3, np.float64)])
def test_a_buffer_that_does_not_fit_is_refused_and_changes_nothing(wrong):
    """A worker with another network, or another idea of the dtype."""
    net = build()
    before = snapshot.flatten(net, "fp32")
    with pytest.raises(ProtocolError, match="snapshot of another"):
        snapshot.load(net, wrong)
    assert np.array_equal(snapshot.flatten(net, "fp32"), before)


def test_a_digest_tells_networks_apart_that_differ_in_one_bit():
    """Two runs are compared by it: equal weights have one digest, the nearest other weight has another."""
    one, other = build(seed=1), build(seed=1)
    assert snapshot.digest(one) == snapshot.digest(other) != snapshot.digest(build(seed=2))
    bias = list(other.parameters())[1].data
    bias[0] = torch.nextafter(bias[0], torch.tensor(1.0))
    assert snapshot.digest(one) != snapshot.digest(other)
