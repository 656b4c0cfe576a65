"""Parts that meet, one after the other."""

import pytest

from common.algorithms.parts import in_turn

pytestmark = pytest.mark.pure


class Writes:
    """Writes its name each time, and stops at a meeting in between."""

    def __init__(self, said, name, times):
        self._said, self._name, self._times = said, name, times

    def run(self):
        """What it says."""
        self._said.append(f"{self._name} begins")
        for k in range(self._times):
            yield
            self._said.append(f"{self._name} after {k + 1}")


def test_no_part_passes_a_meeting_before_all_have_come():
    """What one wrote before is there for the others after it."""
    said = []
    in_turn([Writes(said, "a", 2), Writes(said, "b", 2)])
    assert said == ["a begins", "b begins", "a after 1", "b after 1", "a after 2", "b after 2"]


def test_one_part_meets_nobody():
    """An algorithm that cannot be divided."""
    said = []
    in_turn([Writes(said, "a", 1)])
    assert said == ["a begins", "a after 1"]


def test_parts_that_do_not_meet_equally_often_are_a_mistake():
    """In two processes one would wait for ever."""
    with pytest.raises(ValueError, match="shorter"):
        in_turn([Writes([], "a", 2), Writes([], "b", 1)])
