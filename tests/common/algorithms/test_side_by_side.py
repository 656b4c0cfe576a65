"""Two halves at once."""

import threading

import pytest
import torch

from common.algorithms.side_by_side import SideBySide

pytestmark = pytest.mark.pure


def test_both_halves_are_computed_at_the_same_time_and_returned_in_order():
    """Each waits for the other: one after the other they would never end."""
    meeting = threading.Barrier(2, timeout=10)

    def half(k):
        meeting.wait()
        return f"half {k}"

    assert SideBySide()(half) == ("half 0", "half 1")


@pytest.mark.parametrize("failing", [0, 1])
def test_what_a_half_raises_is_raised_when_the_other_is_done(failing):
    """Nothing is left running behind the caller's back, and the next call works."""
    done = []

    def half(k):
        if k == failing:
            raise ZeroDivisionError
        done.append(k)

    both = SideBySide()
    with pytest.raises(ZeroDivisionError):
        both(half)
    assert done == [1 - failing]
    assert both(lambda k: k) == (0, 1)


def test_the_second_thread_shares_its_work_as_the_callers_does():
    """Torch would take all cores there."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert SideBySide()(lambda _: torch.get_num_threads()) == (3, 3)
    finally:
        torch.set_num_threads(before)
