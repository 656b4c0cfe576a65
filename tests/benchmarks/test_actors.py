"""The comparison of `--actors auto` with a sweep: its report on given rates."""

import pytest

from benchmarks.actors import report

pytestmark = pytest.mark.pure


def test_the_number_found_is_rated_by_its_speed_in_the_sweep():
    """Not by what the search itself measured; medians, so that one bad repetition decides nothing."""
    text = report({1: [500, 520], 2: [1000, 990, 100], 3: [900, 910]}, named=[2, 3, 5])
    assert "| 2 | 990 | 100% |" in text
    assert "auto found 2: 100% of the fastest" in text
    assert "auto found 3: 91% of the fastest" in text
    assert "auto found 5: not in the sweep" in text
