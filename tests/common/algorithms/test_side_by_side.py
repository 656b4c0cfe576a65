"""Two parts at once."""

import threading

import pytest
import torch

from common.algorithms.side_by_side import SideBySide, in_turn

pytestmark = pytest.mark.pure


def test_both_parts_are_computed_at_the_same_time_and_returned_in_order():
    """Each waits for the other: one after the other they would never end."""
    meeting = threading.Barrier(2, timeout=10)

    def part(k):
        meeting.wait()
        return f"part {k}"

    assert SideBySide()(part, "ab") == ["part a", "part b"]


@pytest.mark.parametrize("each", [SideBySide(), in_turn])
def test_one_part_stays_in_the_callers_thread(each):
    """Nothing to be shared, or nobody to share it with."""
    assert each(lambda k: (k, threading.get_ident()), "a") == [("a", threading.get_ident())]


def test_in_turn_is_the_callers_thread_for_all():
    """In their order."""
    assert in_turn(lambda k: (k, threading.get_ident()), "ab") == [("a", threading.get_ident()), ("b", threading.get_ident())]


@pytest.mark.parametrize("failing", [0, 1])
def test_what_a_part_raises_is_raised_when_the_other_is_done(failing):
    """Nothing is left running behind the caller's back, and the next call works."""
    done = []

    def part(k):
        if k == failing:
            raise ZeroDivisionError
        done.append(k)

    both = SideBySide()
    with pytest.raises(ZeroDivisionError):
        both(part, (0, 1))
    assert done == [1 - failing]
    assert both(lambda k: k, (0, 1)) == [0, 1]


def test_the_second_thread_shares_its_work_as_the_callers_does():
    """Torch would take all cores there."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert SideBySide()(lambda _: torch.get_num_threads(), (0, 1)) == [3, 3]
    finally:
        torch.set_num_threads(before)
