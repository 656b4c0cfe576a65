"""Alive and ready, by a clock that the test turns."""

from __future__ import annotations

import pytest

from common.observability.health import Health

pytestmark = pytest.mark.pure


def test_a_loop_that_ticks_is_alive(clock):
    """The everyday case."""
    health = Health(deadline=10.0, clock=clock)
    for _ in range(5):
        clock.now += 9.0
        health.tick()
        assert health.liveness().ok
        assert health.overdue == 0


def test_a_loop_that_hangs_is_named_with_its_age_and_what_it_did(clock):
    """The reader of a failed probe needs the cause."""
    health = Health(deadline=10.0, clock=clock)
    health.tick(doing="waits for credit")
    clock.now += 10.5
    answer = health.liveness()
    assert not answer.ok
    assert answer.sentence == "loop has not ticked for 10.5 s while it waits for credit; wanted every 10 s"
    assert health.overdue == pytest.approx(0.5)


def test_waiting_on_purpose_is_healthy_for_as_long_as_it_ticks(clock):
    """The learner is away for an hour: its actors must not be restarted for it."""
    health = Health(deadline=10.0, clock=clock)
    for _ in range(3600):
        clock.now += 1.0
        health.tick(doing="waits for credit")
    assert health.liveness().ok


def test_long_work_that_was_announced_is_healthy_until_its_own_limit(clock):
    """Building the environment, or writing a large checkpoint, takes longer than a turn of the loop."""
    health = Health(deadline=10.0, clock=clock)
    health.tick(doing="builds the environment", within=120.0)
    clock.now += 119.0
    assert health.liveness().ok
    clock.now += 2.0
    assert not health.liveness().ok
    health.tick()
    clock.now += 11.0
    assert not health.liveness().ok, "the announcement holds for one tick only"


def test_each_of_several_loops_is_found_where_the_others_turn(clock):
    """The I/O thread waits for a disk that does not answer, and the train loop goes round."""
    health = Health(deadline=10.0, clock=clock)
    health.tick(loop="I/O thread", within=60.0)
    for _ in range(12):
        clock.now += 6.0
        health.tick()
    assert health.overdue == pytest.approx(12.0)
    assert health.liveness().sentence == "I/O thread has not ticked for 72.0 s; wanted every 60 s"
    health.tick(loop="I/O thread", within=60.0)
    assert health.liveness().ok


def test_a_loop_that_never_starts_is_found(clock):
    """It died before its first turn."""
    health = Health(deadline=10.0, clock=clock)
    clock.now += 11.0
    answer = health.liveness()
    assert not answer.ok
    assert answer.sentence == "loop has not ticked for 11.0 s while it starts; wanted every 10 s"


def test_readiness_is_said_apart_from_liveness(clock):
    """A learner that loads its checkpoint is alive, and cannot do its work yet."""
    health = Health(clock=clock)
    assert (health.readiness().ok, health.readiness().sentence) == (False, "starting")
    assert health.liveness().ok
    health.ready()
    assert health.readiness().ok
    assert health.readiness().sentence == "ok"


def test_readiness_ends_where_there_is_a_reason_and_comes_back(clock):
    """An actor without a learner can do no work; it is alive."""
    health, reasons = Health(clock=clock), ["no learner"]
    health.ready(unless=lambda: reasons[0])
    assert (health.readiness().ok, health.readiness().sentence) == (False, "no learner")
    assert health.liveness().ok
    reasons[0] = ""
    assert (health.readiness().ok, health.readiness().sentence) == (True, "ok")
