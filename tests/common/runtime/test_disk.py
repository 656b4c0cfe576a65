"""Writing a file so that it is there whole, or not at all."""

import errno
from dataclasses import fields, replace

import pytest

from common.runtime.disk import DISK, Disk, write_atomically

pytestmark = pytest.mark.service


def test_a_file_is_written_and_replaced(tmp_path):
    """The summary is rewritten many times in a run."""
    path = tmp_path / "summary.json"
    for data in (b"one", b"two"):
        write_atomically(path, data)
        assert path.read_bytes() == data
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_the_new_name_points_at_data_that_is_on_the_disk(tmp_path):
    """A rename may reach the disk before the data it names: after a power cut the file would be empty."""
    steps = []
    disk = Disk(**{f.name: _noting(f.name, getattr(DISK, f.name), steps) for f in fields(Disk)})
    write_atomically(tmp_path / "x", b"data", disk=disk)
    partial = steps[0][1]
    assert partial.startswith(".partial-x-")
    assert steps == [("write", partial), ("fsync", partial), ("rename", partial), ("fsync", tmp_path.name)]


def test_two_writers_of_one_path_do_not_meet_in_a_temporary_file(tmp_path):
    """The second writes while the first is about to rename: one content is there whole, and neither fails."""

    def rename(source, target):
        if not target.exists():
            write_atomically(target, b"second")
        DISK.rename(source, target)

    write_atomically(tmp_path / "x", b"first", disk=Disk(rename=rename))
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("x", b"first")]


def _noting(name, real, steps):
    def step(path, *rest):
        steps.append((name, path.name))
        return real(path, *rest)

    return step


@pytest.mark.parametrize("broken", ["write", "fsync", "rename"])
def test_a_full_disk_leaves_what_was_there(tmp_path, broken):
    """No space left, at each step: the old content stays, and no part of the new lies about."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new", disk=replace(DISK, **{broken: full}))
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
