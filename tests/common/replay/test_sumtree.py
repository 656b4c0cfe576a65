"""The sum tree against an array of values, and its draws against their probabilities."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InternalError
from common.replay.sumtree import SumTree

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("size", [1, 2, 1_000, 4_097])
def test_the_total_holds_after_many_random_writes(size: int) -> None:
    """10^5 writes of values from 1e-6 to 1e6, at random places: the total is the sum of what stands there, to rounding."""
    rng = np.random.default_rng(size)
    tree, values = SumTree(size), np.zeros(size)
    for _ in range(1_000):
        leaves = rng.permutation(size)[:100] if size >= 100 else rng.integers(size, size=100)
        written = 10 ** rng.uniform(-6, 6, len(leaves)) * (rng.random(len(leaves)) < 0.9)
        tree.set(leaves, written)
        for leaf, value in zip(leaves, written, strict=True):
            values[leaf] = value
    np.testing.assert_array_equal(tree.get(np.arange(size)), values)
    assert tree.total == pytest.approx(values.sum(), rel=1e-12)


def test_draws_follow_the_values() -> None:
    """Pearson's chi-square of 20,000 draws that know nothing of one another, over 50 leaves, one of them 0."""
    rng = np.random.default_rng(1)
    values = rng.random(50) ** 2
    values[17] = 0.0
    tree = SumTree(50)
    tree.set(np.arange(50), values)
    drawn = np.concatenate([tree.draw(1, rng) for _ in range(20_000)])
    counts = np.bincount(drawn, minlength=50)
    expected = len(drawn) * values / values.sum()
    there = expected > 0
    assert not counts[~there].any()
    chi_square = float(np.sum((counts[there] - expected[there]) ** 2 / expected[there]))
    freedom = np.count_nonzero(there) - 1
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


def test_draws_from_a_large_tree_are_stratified_too() -> None:
    """As many draws as the 20,000 values sum up to, each from one unit of it: a leaf comes just as often as its value says."""
    rng = np.random.default_rng(2)
    values = rng.integers(0, 6, size=20_000).astype(np.float64)
    tree = SumTree(len(values))
    tree.set(np.arange(len(values)), values)
    counts = np.bincount(tree.draw(int(values.sum()), rng), minlength=len(values))
    np.testing.assert_array_equal(counts, values)


@given(
    st.lists(st.sampled_from([0.0, 1e-9, 0.3, 1.0, 7.0, 1e9]), min_size=1, max_size=40),
    st.integers(1, 200),
    st.integers(0, 2**32),
)
@settings(max_examples=200, deadline=None)
def test_draws_are_stratified(values: list[float], number: int, seed: int) -> None:
    """A leaf comes as often as equal shares of the total fit into its value, give or take one at either side; 0 never."""
    if not any(values):
        values[0] = 1.0
    tree = SumTree(len(values))
    tree.set(np.arange(len(values)), np.array(values))
    counts = np.bincount(tree.draw(number, np.random.default_rng(seed)), minlength=len(values))
    shares = np.array(values) / sum(values) * number
    assert counts.sum() == number
    assert not counts[np.array(values) == 0].any()
    assert np.all(np.abs(counts - shares) < 2)


@pytest.mark.parametrize("values", [[0.0, 0.0], [1.0, np.nan], [np.inf, 1.0]])
def test_nothing_to_draw_from_is_told(values: list[float]) -> None:
    """An empty tree, or one that a number that is none has got into."""
    tree = SumTree(2)
    tree.set(np.arange(2), np.array(values))
    with pytest.raises(InternalError, match="sum tree"):
        tree.draw(1, np.random.default_rng(0))


def test_the_size_is_known_beforehand() -> None:
    """What is promised is what is allocated."""
    for size in (1, 2, 3, 1_000, 1_024, 1_025):
        assert SumTree.bytes_for(size) == SumTree(size)._sums.nbytes


class Unlucky(np.random.Generator):
    """Draws the number that rounding can carry past the last leaf, then an ordinary one."""

    def __init__(self) -> None:
        super().__init__(np.random.PCG64(0))
        self.asked = 0

    def random(self, size: int) -> np.ndarray:  # type: ignore[override]
        """1, which a real generator never quite reaches."""
        self.asked += 1
        return np.ones(size) if self.asked == 1 else np.full(size, 0.5)


def test_a_draw_past_the_last_leaf_is_made_anew() -> None:
    """Leaves of value 0 stand behind; rounding must not hand one out."""
    tree, rng = SumTree(8), Unlucky()
    tree.set(np.arange(2), np.ones(2))
    assert set(tree.draw(1, rng).tolist()) <= {0, 1}
    assert rng.asked == 2
