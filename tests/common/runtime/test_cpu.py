"""How many cores there are to compute on: by the scheduler, and by the container's quota of version 1 and 2."""

import os

import pytest

from common.runtime.cpu import cores

pytestmark = pytest.mark.pure


@pytest.fixture(autouse=True)
def _eight(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)), raising=False)


def test_without_a_container_it_is_what_the_scheduler_allows(tmp_path):
    """`taskset`, a cpuset; not what the machine has."""
    assert cores(cgroup=tmp_path) == 8


@pytest.mark.parametrize(
    ("said", "wanted"),
    [("200000 100000", 2), ("150000 100000", 1), ("50000 100000", 1), ("max 100000", 8), ("1600000 100000", 8), ("", 8)],
)
def test_a_quota_counts_in_whole_cores(tmp_path, said, wanted):
    """Of a pod with a limit: what is left of the last core is not one to compute on. `max` is no limit."""
    (tmp_path / "cpu.max").write_text(f"{said}\n")
    assert cores(cgroup=tmp_path) == wanted


@pytest.mark.parametrize(("quota", "wanted"), [(300_000, 3), (-1, 8)])
def test_the_quota_of_version_1_stands_elsewhere(tmp_path, quota, wanted):
    """-1 is no limit."""
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cores(cgroup=tmp_path) == wanted


def test_a_system_that_cannot_tell_is_asked_for_all(tmp_path, monkeypatch):
    """There is no affinity on macOS."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert cores(cgroup=tmp_path) == 6
