"""The optimizers: TensorFlow's RMSprop by hand, and what a checkpoint keeps of each."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from common.algorithms import optimizers

pytestmark = pytest.mark.pure


def weight(net):
    """The only one."""
    return net.weight.item()


def one_weight(value=1.0):
    """A network of one weight."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, value)
    return net


def step(net, optimizer, gradient):
    """One step along a given gradient."""
    net.weight.grad = torch.full((1, 1), gradient)
    optimizer.step()


def test_rmsprop_begins_at_1_and_has_its_epsilon_inside_the_root():
    """Two steps by hand: g2 = 0.99 * 1 + 0.01 * 4 = 1.03, then 0.99 * 1.03 + 0.01 * 1."""
    net = one_weight()
    optimizer = optimizers.build("rmsprop", net, lr=0.1, eps=0.5)
    step(net, optimizer, 2.0)
    after_one = 1.0 - 0.1 * 2.0 / math.sqrt(1.03 + 0.5)
    assert weight(net) == pytest.approx(after_one)
    step(net, optimizer, -1.0)
    assert weight(net) == pytest.approx(after_one + 0.1 / math.sqrt(0.99 * 1.03 + 0.01 + 0.5))


def test_a_parameter_without_a_gradient_stands_still():
    """What is not trained (means of observations) has none."""
    net = one_weight()
    optimizers.build("rmsprop", net, lr=0.1, eps=0.1).step()
    assert weight(net) == 1.0


@pytest.mark.parametrize("name", ["adam", "rmsprop"])
def test_a_restored_optimizer_takes_the_very_same_step(name):
    """Its memory of past gradients comes back; that of a network laid out otherwise in memory too."""
    first, second = (nn.Conv2d(2, 3, 2).to(memory_format=layout) for layout in (torch.channels_last, torch.contiguous_format))
    second.load_state_dict(first.state_dict())
    optimizer, restored = (optimizers.build(name, net, lr=0.1, eps=1e-5) for net in (first, second))

    def along(net, made, seed):
        for parameter in net.parameters():
            parameter.grad = torch.empty_like(parameter).copy_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            )
        made.step()

    along(first, optimizer, 0)
    second.load_state_dict(first.state_dict())
    optimizers.restore(restored, second, optimizers.state_of(optimizer, first))
    along(first, optimizer, 1)
    along(second, restored, 1)
    assert all(torch.equal(*pair) for pair in zip(first.parameters(), second.parameters(), strict=True))


def test_what_was_copied_is_not_changed_by_the_next_step():
    """A checkpoint is written by another thread while training goes on."""
    net = one_weight()
    optimizer = optimizers.build("rmsprop", net, lr=0.1, eps=0.1)
    assert optimizers.state_of(optimizer, net) == {}
    step(net, optimizer, 2.0)
    state = optimizers.state_of(optimizer, net)
    step(net, optimizer, 5.0)
    assert state["weight"]["square"].item() == pytest.approx(1.03)
