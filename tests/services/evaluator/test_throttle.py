"""The evaluator's share of the machine, on clocks that a test turns."""

from __future__ import annotations

import pytest

from services.evaluator import LONGEST_REST, Throttle

pytestmark = pytest.mark.pure


class Machine:
    """CPU time and wall time; sleeping passes wall time alone."""

    def __init__(self):
        """Some time after boot."""
        self.cpu, self.wall, self.slept = 50.0, 1000.0, []

    def work(self, seconds):
        """Compute on one core."""
        self.cpu += seconds
        self.wall += seconds

    def sleep(self, seconds):
        """Rest."""
        self.slept.append(seconds)
        self.wall += seconds


def throttle(machine, *, share, cores):
    """A throttle on that machine."""
    return Throttle(
        share=share, cores=cores, cpu=lambda: machine.cpu, clock=lambda: machine.wall, sleep=machine.sleep
    )  # fmt: skip


@pytest.mark.parametrize(("share", "cores"), [(0.05, 2), (0.25, 1), (0.5, 2)])
def test_the_share_is_kept_however_long_it_works(share, cores):
    """A thousand small pieces of work: CPU time is at most the share of what the machine had."""
    machine = Machine()
    rest = throttle(machine, share=share, cores=cores)
    for _ in range(1000):
        machine.work(0.01)
        rest()
    used, passed = machine.cpu - 50.0, machine.wall - 1000.0
    assert used == pytest.approx(share * cores * passed, rel=0.01)


def test_a_process_below_its_share_does_not_rest():
    """After an idle minute a short evaluation goes at full speed."""
    machine = Machine()
    rest = throttle(machine, share=0.1, cores=2)
    machine.wall += 60.0
    machine.work(1.0)
    rest()
    assert machine.slept == []


def test_no_rest_is_longer_than_the_caller_may_be_away():
    """The caller answers the learner and its own shutdown between two rests."""
    machine = Machine()
    rest = throttle(machine, share=0.01, cores=1)
    machine.work(5.0)
    rest()
    assert machine.slept == [LONGEST_REST]
