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


def contain(machine, limit, used=0):
    """Put the process into a control group."""
    machine["cgroup"].mkdir()
    (machine["cgroup"] / "memory.max").write_text(f"{limit}\n")
    (machine["cgroup"] / "memory.current").write_text(f"{used}\n")
    return machine


def test_the_kernel_knows_what_is_left(machine):
    """Caches that can be given up count as free."""
    assert memory.available_bytes(**machine) == 22_620_400 * 1024


def test_a_containers_limit_counts_less_what_is_used_of_it(machine):
    """A pod with 2 GiB on a large node."""
    assert memory.available_bytes(**contain(machine, 2**31, used=2**30)) == 2**30


def test_a_container_that_is_over_its_limit_has_nothing_left(machine):
    """Not less than nothing."""
    assert memory.available_bytes(**contain(machine, 1000, used=2000)) == 0


def test_a_container_without_limit_is_bounded_by_the_machine(machine):
    """`max` is no number."""
    assert memory.available_bytes(**contain(machine, "max")) == 22_620_400 * 1024


def test_where_nothing_can_be_read_nothing_is_known(tmp_path):
    """macOS, say: the run goes on unchecked."""
    assert memory.available_bytes(meminfo=tmp_path / "none", cgroup=tmp_path / "none") is None
