"""Targets, losses and first priorities of Q-learning, against identities, hand numbers and a slow reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.algorithms import q_learning
from common.errors import InternalError

pytestmark = pytest.mark.pure

N, ACTIONS = 16, 5


def values(seed):
    """Random action values [N, n]."""
    return torch.randn(N, ACTIONS, generator=torch.Generator().manual_seed(seed))


def test_one_network_alone_gives_its_largest_value():
    """Mnih et al. 2015."""
    target = values(0)
    torch.testing.assert_close(q_learning.next_value(target), target.amax(dim=1))


def test_a_network_that_selects_for_itself_gives_its_largest_value_too():
    """Double Q-learning with two equal networks is plain Q-learning."""
    target = values(0)
    torch.testing.assert_close(q_learning.next_value(target, target.clone()), q_learning.next_value(target))


def test_the_online_network_selects_and_the_target_network_rates():
    """Equation 4 of van Hasselt et al. 2016, by a loop."""
    target, online = values(0), values(1)
    expected = [target[i, int(online[i].argmax())] for i in range(N)]
    found = q_learning.next_value(target, online)
    assert found.tolist() == [float(value) for value in expected]
    assert (found <= q_learning.next_value(target)).all()
    assert (found < q_learning.next_value(target)).any()


def test_only_the_order_of_the_selecting_values_counts():
    """The online network's own scale does not enter the target."""
    target, online = values(0), values(1)
    torch.testing.assert_close(q_learning.next_value(target, 100.0 * online - 7.0), q_learning.next_value(target, online))


def test_double_q_learning_is_not_too_hopeful_where_plain_q_learning_is():
    """All actions are worth 0, the estimates are noise: the largest of one net is far above, the double estimate is not."""
    generator = torch.Generator().manual_seed(0)
    target, online = (torch.randn(20_000, ACTIONS, generator=generator) for _ in range(2))
    assert q_learning.next_value(target).mean() > 1.0
    assert q_learning.next_value(target, online).mean().abs() < 0.03


def test_a_target_is_the_reward_and_the_discounted_rest():
    """Three env steps at gamma 0.5; the second transition terminated."""
    reward, discount, value = torch.tensor([1.75, 2.0]), torch.tensor([0.125, 0.0]), torch.tensor([8.0, 100.0])
    assert q_learning.td_target(reward=reward, discount=discount, value=value).tolist() == [2.75, 2.0]


@pytest.mark.parametrize(("huber", "losses", "gradients"), [(None, [0.125, 4.5], [-0.5, 3.0]), (1.0, [0.125, 2.5], [-0.5, 1.0])])
def test_a_loss_pulls_the_value_of_the_action_taken_towards_its_target(huber, losses, gradients):
    """Errors of 0.5 and -3, with and without Huber's bound of 1; actions that were not taken are left alone."""
    q = torch.tensor([[1.0, 9.0], [9.0, 3.0]], requires_grad=True)
    target, weight = torch.tensor([1.5, 0.0]), torch.ones(2)
    result = q_learning.q_loss(q, torch.tensor([0, 1]), target=target, weight=weight, huber=huber)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(np.mean(losses))
    assert result.td_error.tolist() == [0.5, -3.0]
    assert result.value.tolist() == [1.0, 3.0]
    assert q.grad.tolist() == [[gradients[0] / 2, 0.0], [0.0, gradients[1] / 2]]


def test_a_weight_scales_the_gradient_of_its_own_transition():
    """Importance sampling: weight 0 takes a transition out, and the mean is over all of them all the same."""
    q = torch.tensor([[1.0], [2.0]], requires_grad=True)
    action, target = torch.zeros(2, dtype=torch.int64), torch.zeros(2)
    q_learning.q_loss(q, action, target=target, weight=torch.tensor([0.5, 0.0]), huber=None).loss.backward()
    assert q.grad.tolist() == [[0.25], [0.0]]


def test_numbers_of_two_shapes_are_refused():
    """The (N,) against (N, 1) class of mistake, which would broadcast and train on nonsense."""
    with pytest.raises(InternalError, match="vectors of one length"):
        q_learning.td_target(reward=torch.zeros(N), discount=torch.zeros(N), value=torch.zeros(N, 1))
    with pytest.raises(InternalError, match="action values of different shapes"):
        q_learning.next_value(values(0), values(0)[:, :3])


def reference(rows, gamma, n_step):
    """|delta| of each row, one window at a time, written from the definition."""
    length, num_envs = rows["reward"].shape
    errors = np.zeros((length, num_envs))
    for b in range(num_envs):
        for t in range(length):
            if not rows["valid"][t, b]:
                continue
            target = 0.0
            for k in range(n_step):
                target += gamma**k * rows["reward"][t + k, b]
                if rows["terminated"][t + k, b]:
                    break
                if rows["truncated"][t + k, b] or k == n_step - 1 or t + k == length - 1:
                    target += gamma ** (k + 1) * rows["next_value"][t + k, b]
                    break
            errors[t, b] = abs(target - rows["value"][t, b])
    return errors


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10_000), length=st.integers(1, 9), n_step=st.integers(1, 12), gamma=st.sampled_from([0.0, 0.5, 1.0]))
def test_first_priorities_agree_with_a_slow_reference(seed, length, n_step, gamma):
    """Ends of both kinds, reset rows after them, windows longer than the rollout."""
    rng = np.random.default_rng(seed)
    shape = (length, 3)
    rows = {name: rng.normal(size=shape).astype(np.float32) for name in ("reward", "value", "next_value")}
    ends, kind = rng.random(shape) < 0.3, rng.random(shape) < 0.5
    rows["valid"] = np.ones(shape, bool)
    for t in range(1, length):  # next-step autoreset: the row after an end is none, and ends nothing
        rows["valid"][t] = ~ends[t - 1]
        ends[t] &= rows["valid"][t]
    rows |= {"terminated": ends & kind, "truncated": ends & ~kind}
    found = q_learning.window_errors(**{k: torch.from_numpy(v) for k, v in rows.items()}, gamma=gamma, n_step=n_step)
    np.testing.assert_allclose(found.numpy(), reference(rows, gamma, n_step), atol=1e-5)
