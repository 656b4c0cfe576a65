"""Tests of the number of cores: by the scheduler, and by the container's quota of version 1 and 2."""

import os

import pytest

from common.observability.cpu_limit import CpuLimit
from common.runtime.machine import cores, cpu_limit

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


def test_the_limit_of_a_pod_has_the_periods_in_which_it_was_stopped(tmp_path):
    """In a container the mounted folder is its own group; its path on the machine is not there."""
    (tmp_path / "self").write_text("0::/kubepods.slice/pod1\n")
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "cpu.stat").write_text("usage_usec 9000000\nnr_periods 200\nnr_throttled 150\nthrottled_usec 70000\n")
    assert cpu_limit(cgroup=tmp_path, membership=tmp_path / "self") == CpuLimit(0.5, periods=200, throttled=150)


def test_the_innermost_group_with_a_limit_counts(tmp_path):
    """A service of systemd with CPUQuota, on a machine whose root group has no limit."""
    (tmp_path / "self").write_text("0::/system.slice/rookery.service/child\n")
    inner = tmp_path / "system.slice" / "rookery.service"
    (inner / "child").mkdir(parents=True)
    (inner / "child" / "cpu.max").write_text("max 100000\n")
    (inner / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "cpu.max").write_text("400000 100000\n")
    assert cpu_limit(cgroup=tmp_path, membership=tmp_path / "self") == CpuLimit(1.5)


def test_version_1_names_the_group_of_its_cpu_controller(tmp_path):
    (tmp_path / "self").write_text("5:memory:/docker/a\n2:cpu,cpuacct:/docker/b\n0::/\n")
    group = tmp_path / "cpu" / "docker" / "b"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text("20000\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    (group / "cpu.stat").write_text("nr_periods 9\nnr_throttled 7\nthrottled_time 5\n")
    assert cpu_limit(cgroup=tmp_path, membership=tmp_path / "self") == CpuLimit(0.2, periods=9, throttled=7)


def test_without_control_groups_there_is_no_limit(tmp_path):
    assert cpu_limit(cgroup=tmp_path, membership=tmp_path / "self") is None
