"""One buffer for many tensors."""

import copy

import pytest
import torch
from torch import nn

from common.models.flat import Flat

pytestmark = pytest.mark.pure


def test_parameters_move_into_the_buffer_and_keep_their_values_and_layout():
    """Convolutions lie with their channels last; what changes the buffer changes the network."""
    net = nn.Sequential(nn.Conv2d(2, 3, 4), nn.Linear(5, 6))
    net[0].weight.data = net[0].weight.contiguous(memory_format=torch.channels_last)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    strides = [parameter.stride() for parameter in net.parameters()]
    flat = Flat.of(net.parameters())
    assert flat.whole.shape == (sum(tensor.numel() for tensor in before),)
    assert all(torch.equal(now, then) for now, then in zip(net.parameters(), before, strict=True))
    assert [parameter.stride() for parameter in net.parameters()] == strides
    flat.whole.mul_(2.0)
    assert all(torch.equal(now, 2.0 * then) for now, then in zip(net.parameters(), before, strict=True))


def test_a_likeness_is_zeros_of_the_dtype_that_was_asked_for():
    """Copies in bfloat16 have the same parts."""
    tensors = [torch.randn(2, 3), torch.randn(4), torch.randn(())]
    flat = Flat.like(tensors, dtype=torch.bfloat16)
    assert flat.whole.tolist() == [0.0] * 11
    assert flat.whole.dtype == torch.bfloat16
    assert [part.shape for part in flat.parts] == [tensor.shape for tensor in tensors]


def test_a_tensor_with_gaps_is_laid_out_without_them():
    """A parameter that is a slice of another tensor; and its copy in a target network has the same place."""
    sliced, whole = nn.Parameter(torch.randn(4, 6)[:, :3]), nn.Parameter(torch.randn(2))
    before = [sliced.detach().clone(), whole.detach().clone()]
    copied = copy.deepcopy([sliced, whole])
    flats = [Flat.of([sliced, whole]), Flat.of(copied)]
    assert [torch.equal(now, then) for now, then in zip((sliced, whole), before, strict=True)] == [True, True]
    assert torch.equal(flats[0].whole, flats[1].whole)
