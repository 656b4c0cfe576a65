"""Targets and losses of Q-learning, against identities and hand numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.algorithms import dqn
from common.algorithms.action_values import q_loss
from common.algorithms.off_policy import td_target
from common.errors import InternalError

pytestmark = pytest.mark.pure

N, ACTIONS = 16, 5


def values(seed):
    """Random action values [N, n]."""
    return torch.randn(N, ACTIONS, generator=torch.Generator().manual_seed(seed))


def test_one_network_alone_gives_its_largest_value():
    """Mnih et al. 2015."""
    target = values(0)
    torch.testing.assert_close(dqn.next_value(target), target.amax(dim=1))


def test_a_network_that_selects_for_itself_gives_its_largest_value_too():
    """Double Q-learning with two equal networks is plain Q-learning."""
    target = values(0)
    torch.testing.assert_close(dqn.next_value(target, target.clone()), dqn.next_value(target))


def test_the_online_network_selects_and_the_target_network_rates():
    """Equation 4 of van Hasselt et al. 2016, by a loop."""
    target, online = values(0), values(1)
    expected = [target[i, int(online[i].argmax())] for i in range(N)]
    found = dqn.next_value(target, online)
    assert found.tolist() == [float(value) for value in expected]
    assert (found <= dqn.next_value(target)).all()
    assert (found < dqn.next_value(target)).any()


def test_only_the_order_of_the_selecting_values_counts():
    """The online network's own scale does not enter the target."""
    target, online = values(0), values(1)
    torch.testing.assert_close(dqn.next_value(target, 100.0 * online - 7.0), dqn.next_value(target, online))


def test_double_q_learning_is_not_too_hopeful_where_plain_q_learning_is():
    """All actions are worth 0, the estimates are noise: the largest of one net is far above, the double estimate is not."""
    generator = torch.Generator().manual_seed(0)
    target, online = (torch.randn(20_000, ACTIONS, generator=generator) for _ in range(2))
    assert dqn.next_value(target).mean() > 1.0
    assert dqn.next_value(target, online).mean().abs() < 0.03


def test_a_target_is_the_reward_and_the_discounted_rest():
    """Three env steps at gamma 0.5; the second transition terminated."""
    reward, discount, value = torch.tensor([1.75, 2.0]), torch.tensor([0.125, 0.0]), torch.tensor([8.0, 100.0])
    assert td_target(reward=reward, discount=discount, value=value).tolist() == [2.75, 2.0]


@pytest.mark.parametrize(("huber", "losses", "gradients"), [(None, [0.125, 4.5], [-0.5, 3.0]), (1.0, [0.125, 2.5], [-0.5, 1.0])])
def test_a_loss_pulls_the_value_of_the_action_taken_towards_its_target(huber, losses, gradients):
    """Errors of 0.5 and -3, with and without Huber's bound of 1; actions that were not taken are left alone."""
    q = torch.tensor([[1.0, 9.0], [9.0, 3.0]], requires_grad=True)
    result = q_loss(q, torch.tensor([0, 1]), target=torch.tensor([1.5, 0.0]), huber=huber)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(np.mean(losses))
    assert result.td_error.tolist() == [0.5, -3.0]
    assert result.value.tolist() == [1.0, 3.0]
    assert q.grad.tolist() == [[gradients[0] / 2, 0.0], [0.0, gradients[1] / 2]]


def test_numbers_of_two_shapes_are_refused():
    """The (N,) against (N, 1) class of mistake, which would broadcast and train on nonsense."""
    with pytest.raises(InternalError, match="vectors of one length"):
        td_target(reward=torch.zeros(N), discount=torch.zeros(N), value=torch.zeros(N, 1))
    with pytest.raises(InternalError, match="action values of different shapes"):
        dqn.next_value(values(0), values(0)[:, :3])
