"""Parameters in a checkpoint and back."""

import pytest
import torch
from torch import nn

from common.algorithms import parameters
from common.errors import ResourceError

pytestmark = pytest.mark.pure


def test_a_network_takes_the_parameters_of_another_bit_for_bit():
    """Out and in again."""
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    parameters.restore(second, parameters.state_of(first))
    assert torch.equal(first.weight, second.weight)
    assert torch.equal(first.bias, second.bias)


def test_what_was_taken_is_not_changed_by_training_on():
    """A checkpoint is written by another thread while the next update runs."""
    net = nn.Linear(3, 2)
    state = parameters.state_of(net)
    before = state["weight"].clone()
    net.weight.data.add_(1.0)
    assert torch.equal(state["weight"], before)


def test_another_architecture_is_refused_by_what_differs_and_changes_nothing():
    """Resumed with another model section: what is equal is not named."""
    net = nn.Linear(3, 2)
    before = net.weight.clone()
    with pytest.raises(ResourceError, match=r"another network: found {'weight': \[2, 4\]}, wanted {'weight': \[2, 3\]}; resume"):
        parameters.restore(net, parameters.state_of(nn.Linear(4, 2)))
    assert torch.equal(net.weight, before)


def test_a_target_goes_a_part_of_the_way_and_its_network_stays():
    """A rate of 0.25 from 0 to 8: 2, then 3.5; a rate of 1 copies."""
    target, online = nn.Linear(2, 1), nn.Linear(2, 1)
    for net, value in ((target, 0.0), (online, 8.0)):
        for parameter in net.parameters():
            parameter.data.fill_(value)
    for rate, wanted in ((0.25, 2.0), (0.25, 3.5), (1.0, 8.0)):
        parameters.follow(target, online, rate)
        assert target.weight.tolist() == [[wanted, wanted]]
        assert target.bias.tolist() == [wanted]
    assert online.weight.tolist() == [[8.0, 8.0]]
