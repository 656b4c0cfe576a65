"""What the machine can still give: by the kernel, by the container's limit, or unknown."""

import pytest

from common.runtime import memory

pytestmark = pytest.mark.pure

MEMINFO = "MemTotal:       24684132 kB\nMemFree:        21569900 kB\nMemAvailable:   22620400 kB\n"


@pytest.fixture
def machine(tmp_path):
    """A machine with 22,620,400 kB to give, and no container."""
    (tmp_path / "meminfo").write_text(MEMINFO)
    return {"meminfo": tmp_path / "meminfo", "cgroup": tmp_path / "cgroup"}


def contain(machine, limit, used=0, cached=0, version=2):
    """Put the process into a control group."""
    folder = machine["cgroup"] / ("" if version == 2 else "memory")
    folder.mkdir(parents=True)
    names = {2: ("memory.max", "memory.current", ""), 1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")}[version]
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 4096\n{names[2]}inactive_file {cached}\n")
    return machine


each_version = pytest.mark.parametrize("version", [1, 2])


def test_the_kernel_knows_what_is_left(machine):
    """Caches that can be given up count as free."""
    assert memory.available_bytes(**machine) == 22_620_400 * 1024


@each_version
def test_a_containers_limit_counts_less_what_is_used_of_it(machine, version):
    """A pod with 2 GiB on a large node, of this decade or the last."""
    assert memory.available_bytes(**contain(machine, 2**31, used=2**30, version=version)) == 2**30


@each_version
def test_files_that_were_only_read_count_as_free(machine, version):
    """To import torch reads some hundred megabytes: the kernel gives them up as soon as somebody wants the memory."""
    assert memory.available_bytes(**contain(machine, 2**31, used=2**30, cached=2**29, version=version)) == 3 * 2**29


@each_version
def test_a_container_that_is_over_its_limit_has_nothing_left(machine, version):
    """Not less than nothing."""
    assert memory.available_bytes(**contain(machine, 1000, used=2000, version=version)) == 0


def test_a_container_without_limit_is_bounded_by_the_machine(machine):
    """`max` is no number."""
    assert memory.available_bytes(**contain(machine, "max")) == 22_620_400 * 1024


def test_a_container_of_version_1_without_limit_is_bounded_by_the_machine(machine):
    """It says so by a number that no machine has."""
    assert memory.available_bytes(**contain(machine, 2**63 - 4096, version=1)) == 22_620_400 * 1024


def test_where_nothing_can_be_read_nothing_is_known(tmp_path):
    """macOS, say: the run goes on unchecked."""
    assert memory.available_bytes(meminfo=tmp_path / "none", cgroup=tmp_path / "none") is None
