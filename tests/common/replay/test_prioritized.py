"""Priorities and importance weights against their definition."""

from __future__ import annotations

import numpy as np
import pytest

from common.errors import InternalError
from common.replay.prioritized import Prioritized, PrioritySettings

pytestmark = pytest.mark.pure

UNKNOWN = np.full(1, np.nan, np.float32)


def entered(errors: list[float], *, alpha: float = 0.5, epsilon: float = 0.01) -> Prioritized:
    """Slots 0.. with these errors, of twice as many."""
    sampler = Prioritized(2 * len(errors), PrioritySettings(alpha=alpha, epsilon=epsilon))
    sampler.enter(np.arange(len(errors)), np.array(errors, np.float32))
    return sampler


def test_slots_are_drawn_in_proportion_to_their_priorities() -> None:
    """(|error| + 0.01)^0.5; stratified draws come closer than one of the 1,000 shares."""
    errors = np.array([0.0, -0.35, 4.0, 99.99])
    slots = entered(errors.tolist()).draw(1_000, np.random.default_rng(0), beta=1.0, entered=4).slot
    priority = np.sqrt(np.abs(errors) + 0.01)
    np.testing.assert_allclose(np.bincount(slots, minlength=8)[:4], 1_000 * priority / priority.sum(), atol=2)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_weights_follow_the_definition(beta: float) -> None:
    """(N P)^-beta over the largest of the batch, with N the slots that are entered, not those there are."""
    errors = np.array([0.1, 0.5, 2.0, 3.0, 8.0])
    drawn = entered(errors.tolist()).draw(200, np.random.default_rng(0), beta=beta, entered=5)
    priority = np.sqrt(errors + 0.01)
    weight = (5 * priority / priority.sum())[drawn.slot] ** -beta
    np.testing.assert_allclose(drawn.weight, weight / weight.max(), rtol=1e-5)
    assert drawn.weight.dtype == np.float32


def test_weights_make_the_mean_unbiased() -> None:
    """The reason why they are there: with beta 1 the weighted mean of any value is the plain mean over all slots."""
    rng = np.random.default_rng(0)
    errors, value = rng.random(100) + 0.1, rng.normal(size=100)
    drawn = entered(errors.tolist(), alpha=1.0).draw(100_000, rng, beta=1.0, entered=100)
    assert np.average(value[drawn.slot], weights=drawn.weight) == pytest.approx(value.mean(), abs=0.01)


def test_what_is_new_gets_the_largest_priority_so_far() -> None:
    """Also when the slot that had it has become less surprising since."""
    sampler = entered([1.0, 9.0], alpha=1.0, epsilon=0.0)
    sampler.update(np.array([1]), np.array([2.0], np.float32))
    sampler.enter(np.array([2]), UNKNOWN)
    assert sampler.total == 1.0 + 2.0 + 9.0
    assert entered([np.nan, np.nan]).total == 2.0  # nothing is known yet: all alike


def test_what_has_left_is_not_drawn() -> None:
    """Its share goes to the others."""
    sampler = entered([1.0, 9.0, 1.0])
    sampler.leave(np.array([1]))
    assert set(sampler.draw(100, np.random.default_rng(0), beta=1.0, entered=2).slot.tolist()) == {0, 2}


@pytest.mark.parametrize("error", [np.nan, np.inf])
def test_an_error_that_is_no_number_is_told(error: float) -> None:
    """It would spoil every sum above it for good."""
    with pytest.raises(InternalError, match="has training diverged"):
        entered([1.0]).update(np.array([0]), np.array([error], np.float32))
