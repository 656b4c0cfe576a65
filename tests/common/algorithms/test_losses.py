"""The parts of the loss against hand numbers and finite differences."""

from __future__ import annotations

import math

import pytest
import torch

from common.algorithms import losses
from common.errors import InternalError

pytestmark = pytest.mark.pure


def surrogate(ratio, advantage, *, importance=None, clip=0.2):
    """The policy loss of given ratios, in float64."""
    log_prob = torch.tensor(ratio, dtype=torch.float64).log().requires_grad_()
    weight = torch.ones_like(log_prob) if importance is None else torch.tensor(importance, dtype=torch.float64)
    found = losses.policy_loss(
        log_prob=log_prob,
        proximal_log_prob=torch.zeros_like(log_prob),
        importance=weight,
        advantage=torch.tensor(advantage, dtype=torch.float64),
        clip=clip,
    )
    return log_prob, found


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.5, 2.0, -2.4, 0.0),  # better already: clipped, nothing more to gain
        (1.5, -2.0, 3.0, 3.0),  # worse: not clipped, the way back stays open
        (0.5, 2.0, -1.0, -1.0),
        (0.5, -2.0, 1.6, 0.0),
    ],
)
def test_the_clip_holds_only_where_the_policy_would_gain(ratio, advantage, loss, gradient):
    """The five cases of figure 1 in the PPO paper; the gradient is by log pi."""
    log_prob, found = surrogate([ratio], [advantage])
    found.loss.backward()
    assert found.loss.item() == pytest.approx(loss)
    assert log_prob.grad.item() == pytest.approx(gradient)


def test_each_row_has_its_importance_in_the_loss():
    _, found = surrogate([1.0, 1.5], [2.0, -1.0], importance=[0.5, 4.0])
    assert found.loss.item() == pytest.approx(-(0.5 * 2.0 - 4.0 * 1.5) / 2)


def test_the_gradient_is_the_slope_of_the_loss():
    """Central finite differences on a batch on both sides of the clip, with importance weights."""
    ratio, advantage, importance = [0.7, 0.95, 1.1, 1.4], [1.0, -2.0, 0.5, -1.0], [1.0, 0.5, 2.0, 10.0]
    log_prob, found = surrogate(ratio, advantage, importance=importance)
    found.loss.backward()
    for index, value in enumerate(ratio):
        sides = [
            surrogate([*ratio[:index], value * math.exp(step), *ratio[index + 1 :]], advantage, importance=importance)[
                1
            ].loss.item()
            for step in (1e-6, -1e-6)
        ]
        assert log_prob.grad[index].item() == pytest.approx((sides[0] - sides[1]) / 2e-6, abs=1e-6)


def test_what_is_watched_has_its_known_values():
    """Ratios 1/2, 1, 3/2, clip 0.2: fraction beyond the clip, largest distance from 1."""
    _, found = surrogate([0.5, 1.0, 1.5], [1.0, 1.0, 1.0])
    assert found.clip_fraction.item() == pytest.approx(2 / 3)
    assert found.ratio_error.item() == pytest.approx(0.5)
    assert not found.ratio_error.requires_grad


def test_the_kl_estimate_approaches_the_kl_divergence():
    """Two categorical policies; the estimate over many samples of the first against the sum over actions."""
    old, new = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
    action = torch.multinomial(old, 100_000, replacement=True, generator=torch.Generator().manual_seed(0))
    exact = (old * (old / new).log()).sum().item()
    found = losses.approximate_kl(log_prob=new.log()[action], before=old.log()[action])
    assert found.item() == pytest.approx(exact, abs=5e-4)


def test_the_importance_weight_is_the_ratio_of_the_two_old_policies_up_to_the_cap():
    """Experience of a stale actor: the rare action that became likely does not blow up the loss."""
    proximal, behaviour = torch.tensor([0.5, 0.1, 0.9]).log(), torch.tensor([0.25, 0.2, 0.01]).log()
    weight = losses.importance_weight(proximal_log_prob=proximal, behaviour_log_prob=behaviour, cap=10.0)
    torch.testing.assert_close(weight, torch.tensor([2.0, 0.5, 10.0]))


def test_the_value_loss_is_half_the_mean_squared_error():
    """Hand numbers."""
    assert losses.value_loss(value=torch.tensor([1.0, 2.0]), target=torch.tensor([3.0, 1.0])).item() == pytest.approx(1.25)


@pytest.mark.parametrize(
    ("value", "target", "explained"),
    [([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], 1.0), ([2.0, 2.0, 2.0], [1.0, 2.0, 3.0], 0.0), ([3.0, 2.0, 1.0], [1.0, 2.0, 3.0], -3.0)],
)
def test_explained_variance_is_1_when_right_0_when_constant_and_negative_when_wrong(value, target, explained):
    """The measure of the value function in the learning curve."""
    assert losses.explained_variance(value=torch.tensor(value), target=torch.tensor(target)).item() == pytest.approx(explained)


def test_constant_targets_leave_nothing_to_explain():
    """An environment without rewards: 0, not a division by zero."""
    assert losses.explained_variance(value=torch.tensor([1.0, 2.0]), target=torch.ones(2)).item() == 0.0


@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (1e-3, 5.0), (100.0, -7.0)])
def test_standardized_advantages_keep_their_order_and_lose_scale_and_shift(scale, shift):
    """Only which actions were better than the others of the step counts: 1, 2, 3, 6 lie at -2, -1, 0, 3 over sqrt(3.5)."""
    standardized = losses.standardized(torch.tensor([1.0, 2.0, 3.0, 6.0]) * scale + shift)
    torch.testing.assert_close(standardized, torch.tensor([-2.0, -1.0, 0.0, 3.0]) / math.sqrt(3.5), rtol=1e-3, atol=1e-3)


def test_equal_advantages_move_nothing_and_stay_finite():
    """A minibatch without a surprise, or of a single env step, has no deviation to divide by."""
    assert losses.standardized(torch.full((3,), 0.7)).tolist() == [0.0, 0.0, 0.0]
    assert losses.standardized(torch.tensor([5.0])).tolist() == [0.0]


@pytest.mark.parametrize(("scale", "found"), [(4.0, 1.0), (0.5, 1.0), (0.1, 0.2)])
def test_small_advantages_stay_small_where_asked(scale, found):
    """Their deviation is `scale`; one below 0.5 counts as 0.5."""
    advantage = torch.tensor([-1.0, 1.0, 1.0, -1.0]) * scale + 7.0
    standardized = losses.standardized(advantage, least_std=0.5)
    torch.testing.assert_close(standardized, torch.tensor([-1.0, 1.0, 1.0, -1.0]) * found)


def test_a_column_among_vectors_is_refused_everywhere():
    """(N,) against (N, 1) would broadcast to (N, N), and the baseline would be a batch mean: it learns, badly."""
    vector, column = torch.zeros(3), torch.zeros(3, 1)
    with pytest.raises(InternalError, match=r"vectors of one length.*\(3, 1\)"):
        losses.policy_loss(log_prob=vector, proximal_log_prob=vector, importance=vector, advantage=column, clip=0.2)
    with pytest.raises(InternalError):
        losses.value_loss(value=column, target=vector)
    with pytest.raises(InternalError):
        losses.explained_variance(value=column, target=column)
    with pytest.raises(InternalError):
        losses.importance_weight(proximal_log_prob=vector, behaviour_log_prob=torch.zeros(2), cap=1.0)
