"""Tests of free memory: by the kernel, by the container's limit, or unknown."""

import mmap

import psutil
import pytest

from common.runtime.machine import MemoryGuard, anonymous_bytes, available_bytes, memory_owner

pytestmark = pytest.mark.pure

MIB = 2**20
MEMINFO = "MemTotal:       24684132 kB\nMemFree:        21569900 kB\nMemAvailable:   22620400 kB\n"


@pytest.fixture
def machine(tmp_path):
    """A machine with 22,620,400 kB to give, and no container."""
    (tmp_path / "meminfo").write_text(MEMINFO)
    return {"meminfo": tmp_path / "meminfo", "cgroup": tmp_path / "cgroup", "membership": tmp_path / "self"}


def contain(machine, limit, *, used=0, cached=0, version=2, group=""):
    """Put the process into a control group: that of its container, or one of those on the machine."""
    folder = machine["cgroup"] / ("" if version == 2 else "memory") / group
    folder.mkdir(parents=True, exist_ok=True)
    names = {2: ("memory.max", "memory.current", ""), 1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")}[version]
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 4096\n{names[2]}inactive_file {cached}\n")
    return machine


each_version = pytest.mark.parametrize("version", [1, 2])


def test_the_kernel_knows_what_is_left(machine):
    """Caches that can be given up count as free."""
    assert available_bytes(**machine) == 22_620_400 * 1024


@each_version
def test_a_containers_limit_counts_less_what_is_used_of_it(machine, version):
    """A pod with 2 GiB on a large node, of this decade or the last."""
    assert available_bytes(**contain(machine, 2**31, used=2**30, version=version)) == 2**30


@each_version
def test_files_that_were_only_read_count_as_free(machine, version):
    """To import torch reads some hundred megabytes: the kernel gives them up as soon as somebody wants the memory."""
    assert available_bytes(**contain(machine, 2**31, used=2**30, cached=2**29, version=version)) == 3 * 2**29


@each_version
def test_a_container_that_is_over_its_limit_has_nothing_left(machine, version):
    """Not less than nothing."""
    assert available_bytes(**contain(machine, 1000, used=2000, version=version)) == 0


def test_a_container_without_limit_is_bounded_by_the_machine(machine):
    """`max` is no number."""
    assert available_bytes(**contain(machine, "max")) == 22_620_400 * 1024


def test_a_container_of_version_1_without_limit_is_bounded_by_the_machine(machine):
    """Its limit is a number that no machine has."""
    assert available_bytes(**contain(machine, 2**63 - 4096, version=1)) == 22_620_400 * 1024


@pytest.mark.parametrize(("version", "said"), [(2, "0::"), (1, "4:memory:")])
@pytest.mark.parametrize("outer", [4 * MIB, 3 * MIB, "max"])
def test_a_limit_without_a_container_counts_and_so_does_one_around_it(machine, outer, version, said):
    """A job of Slurm, a scope of systemd: the group of the process is not the one at the root."""
    machine["membership"].write_text(f"5:freezer:/else\n{said}/job/step/task\n")
    contain(machine, outer, used=2 * MIB, version=version, group="job")
    contain(machine, 3 * MIB, used=MIB, cached=MIB // 2, version=version, group="job/step")
    left = {4 * MIB: 2 * MIB, 3 * MIB: MIB, "max": 5 * MIB // 2}[outer]
    assert available_bytes(**machine) == left


def test_where_nothing_can_be_read_nothing_is_known(tmp_path):
    """macOS, say: the run goes on unchecked."""
    assert available_bytes(meminfo=tmp_path / "none", cgroup=tmp_path / "none", membership=tmp_path / "none") is None


class Process:
    """A process, and the memory that its machine has left; in MiB."""

    def __init__(self, room: int = 4096) -> None:
        """Begin with 100 MiB."""
        self.resident, self.left = 100, room
        self.guard = MemoryGuard(available=lambda: self.left * MIB, anonymous=lambda: self.resident * MIB)

    def grow(self, mib: int) -> None:
        """Take memory, or return it."""
        self.resident, self.left = self.resident + mib, max(0, self.left - mib)


@pytest.mark.parametrize(("room", "reserve"), [(64 * 1024, 4096), (4096, 256), (1024, 256), (256, 128), (0, 0)])
def test_the_reserve_is_a_share_of_what_was_free(room: int, reserve: int) -> None:
    """A sixteenth, and enough for what can come between two looks; never more than half."""
    assert Process(room).guard.reserve == reserve * MIB


def test_memory_is_short_near_the_limit_alone() -> None:
    """However much this process takes before that: a replay memory fills slowly, and may fill whole."""
    process = Process()
    process.grow(4096 - 256)
    assert not process.guard.short()
    process.grow(1)
    assert process.guard.short()


def test_memory_that_others_took_is_not_to_be_freed_here() -> None:
    """A laptop: another process fills it, and this one has not grown."""
    process = Process()
    process.left = 10
    process.grow(10)
    assert not process.guard.short()


def test_freeing_what_frees_nothing_is_not_repeated_until_the_process_grew_again() -> None:
    """The process needs the memory that fills: dropping connections again and again would be a second fault."""
    process = Process()
    process.grow(4000)
    assert process.guard.short()
    assert process.guard.freed() == 0
    assert not process.guard.short()
    process.grow(129)
    assert process.guard.short()


def test_what_was_freed_is_measured() -> None:
    """And the next attack is met as the first was."""
    process = Process()
    for _ in range(3):
        process.grow(4000)
        assert process.guard.short()
        process.resident, process.left = 100, 4096
        assert process.guard.freed() == 4000 * MIB
        assert not process.guard.short()


def test_where_nothing_is_known_of_memory_the_guard_is_off(tmp_path, monkeypatch) -> None:
    """A Mac."""
    monkeypatch.setattr("common.runtime.machine.STATM", tmp_path / "none")
    assert anonymous_bytes() == 0
    guard = MemoryGuard(available=lambda: None, anonymous=lambda: 2**40)
    assert not guard.short()


def test_the_memory_of_this_process_is_known() -> None:
    """More than an interpreter, less than a machine."""
    assert 2**20 < anonymous_bytes() < psutil.Process().memory_info().rss < 2**40


def test_a_file_that_was_read_is_no_memory_of_the_process(tmp_path) -> None:
    """The kernel gives its pages up when it likes: neither growth nor freed memory may be read from them."""
    (tmp_path / "library").write_bytes(bytes(64 * MIB))
    allocated, resident = anonymous_bytes(), psutil.Process().memory_info().rss
    with (tmp_path / "library").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        assert sum(pages[at] for at in range(0, 64 * MIB, mmap.PAGESIZE)) == 0
        assert psutil.Process().memory_info().rss - resident > 60 * MIB
        assert anonymous_bytes() - allocated < MIB


def test_machines_and_containers_of_one_host_name_have_memory_of_their_own(tmp_path, monkeypatch) -> None:
    """As where all hosts are called localhost, and where containers use the network of their host."""
    monkeypatch.setattr("socket.gethostname", lambda: "localhost")

    def owner(boot, namespace):
        (tmp_path / "boot").write_text(f"{boot}\n")
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(namespace)
        return memory_owner(boot_id=tmp_path / "boot", cgroup_namespace=tmp_path / "link")

    assert owner("1", "cgroup:[1]") == owner("1", "cgroup:[1]")
    assert len({owner("1", "cgroup:[1]"), owner("2", "cgroup:[1]"), owner("1", "cgroup:[2]")}) == 3
    assert memory_owner(boot_id=tmp_path / "none", cgroup_namespace=tmp_path / "none") == "localhost", "a Mac"
