"""The losses and targets of TD3 against numbers worked out by hand, and the shapes they refuse."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.algorithms.td3 import clipped_double_q, critic_loss, smoothed_action
from common.errors import InternalError

pytestmark = pytest.mark.pure


def test_noise_is_clipped_before_it_is_added_and_the_sum_to_the_bounds():
    """By hand, c = 0.5: within, beyond c on both sides, and beyond the bounds of the action."""
    action = torch.tensor([[0.0, 0.0, 0.0, 0.9]])
    noise = torch.tensor([[0.3, 0.8, -2.0, 0.4]])
    assert torch.allclose(smoothed_action(action, noise, clip=0.5), torch.tensor([[0.3, 0.5, -0.5, 1.0]]))


@given(st.floats(-1.0, 1.0), st.floats(-10.0, 10.0), st.floats(0.0, 2.0))
def test_smoothing_never_moves_an_action_further_than_its_clip_nor_out_of_bounds(action, noise, clip):
    """Whatever is drawn."""
    moved = smoothed_action(torch.tensor([[action]]), torch.tensor([[noise]]), clip=clip).item()
    assert abs(moved) <= 1.0
    assert abs(moved - action) <= clip + 1e-6


def test_noise_for_all_rows_alike_is_refused():
    """[A] in place of [N, A] would broadcast: one draw for the whole minibatch, and nobody would see it."""
    with pytest.raises(InternalError, match=r"found \(2,\), wanted \(3, 2\)"):
        smoothed_action(torch.zeros(3, 2), torch.zeros(2), clip=0.5)


def test_the_smaller_of_both_values_counts_row_by_row():
    """Not the critic that is smaller on average."""
    assert clipped_double_q(torch.tensor([[1.0, 5.0, -3.0], [2.0, 4.0, -2.0]])).tolist() == [1.0, 4.0, -3.0]


@pytest.mark.parametrize("shape", [(3,), (1, 3), (3, 2), (2, 3, 1)])
def test_values_that_are_not_of_two_critics_are_refused(shape):
    """[N, 2] would give one number for all rows of a critic, in silence."""
    with pytest.raises(InternalError, match=r"wanted \[2, N\]"):
        clipped_double_q(torch.zeros(shape))


def test_both_critics_are_trained_towards_the_target():
    """By hand: errors (1, 3) and (0, 2), so 5 + 2; the gradient of each value is 2 error / N."""
    values = torch.tensor([[2.0, 4.0], [1.0, 3.0]], requires_grad=True)
    loss = critic_loss(values, target=torch.tensor([1.0, 1.0]))
    assert loss.item() == pytest.approx((1.0 + 9.0) / 2 + (0.0 + 4.0) / 2)
    assert torch.autograd.grad(loss, values)[0].tolist() == [[1.0, 3.0], [0.0, 2.0]]


@pytest.mark.parametrize("shape", [(3, 1), (1,), (2, 3)])
def test_a_target_of_another_shape_is_refused(shape):
    """(N,) against (N, 1) would broadcast to (N, N)."""
    with pytest.raises(InternalError, match=r"wanted \(3,\), \[N\]"):
        critic_loss(torch.zeros(2, 3), target=torch.zeros(shape))
