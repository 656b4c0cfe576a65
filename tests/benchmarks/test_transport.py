"""The transport benchmarks at a tiny size: what they count as admitted was admitted. How fast it is, is not tested."""

import numpy as np
import pytest

from benchmarks.transport import bandwidth, messages, restart
from benchmarks.transport.bandwidth import ENV, Load, benchmark, compare, report, report_pairs, rollout
from benchmarks.transport.machine import ThreadSeconds
from common.algorithms.payload import check_trajectory
from common.protocol.content import check_numbers, check_schema

pytestmark = pytest.mark.system


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Warm up for no time, and wait for the start as long as it takes: what is counted does not depend on speed."""
    for module in (bandwidth, messages):
        monkeypatch.setattr(module, "WARM_SECONDS", 0.0)
        monkeypatch.setattr(module, "START_SECONDS", 300.0)


def test_synthetic_actors_are_admitted_without_loss():
    """Two processes over real sockets: whole messages are counted, and nothing is dropped."""
    load = Load(actors=2, length=8, num_envs=2)
    result = benchmark(load, seconds=0.06, readings=6)
    assert result.env_steps > 0
    assert result.env_steps % (8 * 2) == 0
    assert result.dropped == 0
    assert result.received_bytes > 0
    assert result.intake_cpu_seconds >= 0.0
    assert len(result.memory_bytes) == 7
    text = report(load, result)
    for words in ("env steps/s", "MiB/s", "I/O thread", "two snapshots", "dropped"):
        assert words in text


def test_plain_and_with_keys_are_measured_in_turn():
    """The same load by either way, whole messages, nothing dropped; the ratio is of the two rates."""
    load = Load(actors=1, length=8, num_envs=2)
    ((plain, guarded),) = compare(load, seconds=0.05, pairs=1)
    assert plain.env_steps > 0 < guarded.env_steps
    assert plain.dropped == guarded.dropped == 0
    ratio = guarded.env_steps_per_second / plain.env_steps_per_second
    assert f"median of 1 ratios {ratio:.2f}" in report_pairs(load, [(plain, guarded)])


def test_what_is_sent_would_pass_as_a_rollout():
    """Else the benchmark would measure how fast messages are refused."""
    load = Load(actors=1, length=4, num_envs=3)
    arrays = rollout(load.schema)
    check_schema(arrays, load.schema)
    check_numbers(arrays)
    check_trajectory(ENV, arrays)
    assert np.count_nonzero(arrays["valid"]) == 12


def test_many_workers_in_one_process_send_messages_that_are_admitted():
    """Each has a session of its own; a message that was refused or repeated would end the benchmark."""
    cost = messages.measure(3, rate=60.0, seconds=0.05)
    assert cost.messages > 0
    assert cost.intake_us > 0.0
    assert cost.zmq_us > 0.0


def test_the_table_has_the_median_of_the_turns_of_each_number_of_workers():
    costs = [
        messages.Cost(
            workers=workers,
            seconds=1.0,
            messages=100,
            others=0,
            cpu=ThreadSeconds(us / 1e4, 0.001),
            memory_bytes=0,
            descriptors=9,
        )
        for workers, us in ((1, 200), (16, 300), (1, 900), (16, 270), (1, 210), (16, 240))
    ]
    lines = messages.table(costs, messages.crowd_of(1, 60.0)).splitlines()
    assert [line.split()[:6] for line in lines[-3:-1]] == [
        ["1", "100", "0.0", "210", "(200,", "900)"],
        ["16", "100", "0.0", "270", "(240,", "300)"],
    ]
    assert lines[-1].endswith("1.29")


def test_workers_are_welcomed_by_the_successor_of_a_killed_learner(monkeypatch):
    monkeypatch.setattr(restart, "AWAY_SECONDS", 0.0)
    monkeypatch.setattr(restart, "WARM_SECONDS", 0.0)
    result = restart.measure(3, rate=60.0)
    assert result.hellos >= 3
    assert "3 workers: all welcomed" in restart.report(result)
