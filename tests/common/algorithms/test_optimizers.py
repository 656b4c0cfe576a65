"""The optimizers: TensorFlow's RMSprop by hand, and what a checkpoint keeps of each."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from common.algorithms import optimizers
from common.models import snapshot
from common.models.flat import Flat

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


@pytest.mark.parametrize("eps", [1e-8, 1e-2])
def test_adam_of_one_buffer_is_torchs_own(eps):
    """Five steps at changing rates, of a network of four tensors."""
    flat_net, net = (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)) for _ in range(2))
    net.load_state_dict(flat_net.state_dict())
    flat = optimizers.FlatAdam(Flat.of(flat_net.parameters()), eps=eps)
    torchs = torch.optim.Adam(net.parameters(), eps=eps)
    for rate in (0.1, 0.1, 0.01, 0.2, 0.0):
        gradient = torch.randn(sum(p.numel() for p in net.parameters()))
        flat.step(gradient, lr=rate)
        snapshot.load_gradient(net, gradient)
        optimizers.step(torchs, lr=rate)
    assert torch.allclose(nn.utils.parameters_to_vector(flat_net.parameters()), nn.utils.parameters_to_vector(net.parameters()))


def test_adam_of_one_buffer_goes_on_where_it_was():
    """A resumed run, and one that resumes before its first step; by the names that torch's own has."""
    nets = [nn.Linear(3, 2) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    first, second = (optimizers.FlatAdam(Flat.of(net.parameters()), eps=1e-8) for net in nets)
    names = [name for name, _ in nets[0].named_parameters()]
    second.restore(names, first.state(names))
    second.step(torch.ones(8), lr=0.5)  # what it must forget
    for steps in range(2):
        second.restore(names, first.state(names))
        nets[1].load_state_dict(nets[0].state_dict())
        for adam in (first, second):
            adam.step(torch.full((8,), 1.0 + steps), lr=0.1)
        assert torch.equal(nets[0].weight, nets[1].weight)
        assert torch.equal(nets[0].bias, nets[1].bias)
    torchs = torch.optim.Adam(nets[0].parameters())
    nets[0](torch.ones(1, 3)).sum().backward()
    torchs.step()
    kept, wanted = first.state(names), optimizers.state_of(torchs, nets[0])
    assert {name: set(state) for name, state in kept.items()} == {name: set(state) for name, state in wanted.items()}
