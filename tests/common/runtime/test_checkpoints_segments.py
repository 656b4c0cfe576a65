"""Tests of checkpoints with segments of a replay memory: files written, shared, removed, and found damaged."""

from __future__ import annotations

import errno
import random
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from common.errors import ResourceError
from common.replay.blocks import Segment
from common.runtime.checkpoint_files import SEGMENTS, Checkpoint, SegmentFiles, read
from common.runtime.checkpoints import CheckpointStore
from common.runtime.disk import DISK, Disk
from tests.common.runtime.test_checkpoints import KilledError, _stopping

pytestmark = pytest.mark.service


class Memory:
    """A replay memory of eight blocks, of which one more is filled each time."""

    def __init__(self):
        """Empty."""
        self.blocks, self.writes = np.zeros((8, 100), np.uint8), [0] * 8

    def insert(self, value):
        """Fill the block after the last, and write once more to that."""
        last = max((number for number in range(8) if self.writes[number]), default=-1)
        for number in {max(0, last), min(last + 1, 7)}:
            self.blocks[number] = value
            self.writes[number] += 1

    @property
    def segments(self):
        """Of the blocks that were filled."""
        return [
            Segment(key=f"{number}-{writes}", parts=[self.blocks[number, :30].data, self.blocks[number, 30:].data])
            for number, writes in enumerate(self.writes)
            if writes
        ]

    def checkpoint(self, version):
        """As a learner makes one."""
        return Checkpoint(
            run_id="r",
            version=version,
            env_steps=version,
            architecture="a",
            counters={},
            state={"version": version},
            replay={"writes": list(self.writes), "total": int(self.blocks.sum())},
            segments=self.segments,
        )

    @classmethod
    def read(cls, folder, checkpoint):
        """That of a checkpoint."""
        memory = cls()
        memory.writes = list(checkpoint.replay["writes"])
        SegmentFiles(folder).read(checkpoint.files, memory.segments)
        assert memory.blocks.sum() == checkpoint.replay["total"]
        return memory


def newest(folder):
    """Return the newest good checkpoint and the warnings about bad ones."""
    warnings = []
    return CheckpointStore(folder, keep=1).load_newest(
        architecture="a", warn=warnings.append, restore=lambda found: found
    ), warnings


def files(folder):
    """Names of the segments on the disk."""
    return {path.name for path in (folder / SEGMENTS).iterdir()}


def filled(folder, versions, *, keep=2):
    """A run so far."""
    memory, store = Memory(), CheckpointStore(folder, keep=keep)
    for version in range(1, versions + 1):
        memory.insert(version)
        store.save(memory.checkpoint(version))
    return memory, store


def test_a_checkpoint_writes_what_is_new_and_shares_the_rest(tmp_path):
    """Of six blocks the last two have changed; a resumed process knows which segments are on disk."""
    memory, store = filled(tmp_path, 5)
    written = []
    disk = Disk(write=lambda path, *parts: (written.append(path.name), DISK.write(path, *parts)))
    memory.insert(6)
    store.disk = disk
    store.save(memory.checkpoint(6))
    assert len([name for name in written if "partial" in name]) == 2
    found, warnings = newest(tmp_path)
    assert warnings == []
    assert np.array_equal(Memory.read(tmp_path, found).blocks, memory.blocks)
    resumed, store = Memory(), CheckpointStore(tmp_path, keep=2, disk=disk)
    resumed.writes = list(found.replay["writes"])
    store.segment_files.read(found.files, resumed.segments)
    written.clear()
    store.save(resumed.checkpoint(7))
    assert written == ["tensors.safetensors", "manifest.json"]


def test_segments_that_no_checkpoint_names_are_removed(tmp_path):
    """The disk holds the memory, and the changes between the kept checkpoints; nothing once no checkpoint holds a segment."""
    memory, _ = filled(tmp_path, 8, keep=1)
    assert len(files(tmp_path)) == len(set(map(bytes, memory.blocks)))
    (tmp_path / SEGMENTS / ".partial-left").touch()
    plain = Checkpoint(run_id="r", version=9, env_steps=9, architecture="a", counters={}, state={})
    CheckpointStore(tmp_path, keep=1).save(plain)
    assert files(tmp_path) == set()


def test_a_kill_between_any_two_disk_operations_leaves_a_whole_checkpoint_with_its_memory(tmp_path):
    """Killed at every operation of a save that writes two segments and removes an older checkpoint with its own segments."""
    for after in range(200):
        folder = tmp_path / str(after)
        memory, store = filled(folder, 4)
        memory.insert(77)
        killed, store.disk = True, _stopping(after, KilledError())
        try:
            store.save(memory.checkpoint(5))
            killed = False
        except KilledError:
            pass
        found, warnings = newest(folder)
        assert warnings == []
        assert found.version in ((4, 5) if killed else (5,))
        resumed = Memory.read(folder, found)
        resumed.insert(99)
        CheckpointStore(folder, keep=1).save(resumed.checkpoint(6))
        assert len(files(folder)) == len({bytes(block) for block in resumed.blocks if block.any()})
        if not killed:
            assert after > 12
            return
    pytest.fail("a save that never ends")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("after", range(16))
def test_a_disk_that_refuses_costs_the_new_checkpoint_only(tmp_path, after, code):
    """Full at any operation: the older ones are whole, the next save by the same process too."""
    memory, store = filled(tmp_path, 4)
    memory.insert(77)
    store.disk = _stopping(after, OSError(code, "no"))
    with pytest.raises(ResourceError):
        store.save(memory.checkpoint(5))
    Memory.read(tmp_path, newest(tmp_path)[0])
    memory.insert(78)
    store.disk, store.keep = DISK, 1
    store.save(memory.checkpoint(6))
    found, warnings = newest(tmp_path)
    assert (found.version, warnings) == (6, [])
    assert np.array_equal(Memory.read(tmp_path, found).blocks, memory.blocks)


def test_segments_of_a_checkpoint_that_cannot_be_read_for_a_moment_stay(tmp_path, monkeypatch):
    """The older of two; had its segments been removed, nothing could have brought it back."""
    memory, store = filled(tmp_path, 2, keep=3)
    older, read_bytes = tmp_path / "checkpoint-000000000001" / "manifest.json", Path.read_bytes

    def refused(path):
        if path == older:
            raise OSError(errno.EIO, "Input/output error")
        return read_bytes(path)

    memory.insert(3)
    with monkeypatch.context() as disk:
        disk.setattr(Path, "read_bytes", refused)
        with pytest.raises(ResourceError, match="Input/output error"):
            store.save(memory.checkpoint(3))
    assert len(read(older.parent).files) == 1
    memory.insert(4)
    store.save(memory.checkpoint(4))
    assert newest(tmp_path)[0].version == 4


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda path: path.unlink(), "No such file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "99 bytes, wanted 100"),
        (lambda path: path.write_bytes(b"x" * 100), "has hash"),
    ],
)
def test_a_damaged_segment_makes_its_checkpoint_bad_and_an_older_one_is_used(tmp_path, damage, why):
    """The newest of its own; one that both share makes both bad."""
    filled(tmp_path, 4)
    mine = newest(tmp_path)[0].files
    memory, _ = filled(tmp_path / "alone", 3)
    del memory
    older = {file.name for file in newest(tmp_path / "alone")[0].files}
    damage(tmp_path / SEGMENTS / random.Random(1).choice([file.name for file in mine if file.name not in older]))
    found, warnings = newest(tmp_path)
    assert found.version == 3
    assert "checkpoint-000000000004" in warnings[0]
    assert why in warnings[0]
    (shared,) = {file.name for file in mine[:1]} & older
    damage(tmp_path / SEGMENTS / shared)
    with pytest.raises(ResourceError, match="no good checkpoint"):
        newest(tmp_path)


def test_data_of_a_segment_reaches_the_disk_before_the_name_that_promises_it(tmp_path):
    """As for the checkpoint itself: written, fsynced, renamed, and the folder fsynced before the manifest is written."""
    steps = []

    def noting(name, real):
        return lambda path, *rest: (steps.append(f"{name} {path.name[:8]}"), real(path, *rest))[1]

    disk = Disk(**{field.name: noting(field.name, getattr(DISK, field.name)) for field in fields(Disk)})
    memory = Memory()
    memory.insert(1)
    CheckpointStore(tmp_path, keep=1, disk=disk).save(memory.checkpoint(1))
    assert steps[:5] == ["write .partial", "fsync .partial", "rename .partial", "fsync segments", "write tensors."]


def test_another_memory_is_not_filled_with_them(tmp_path):
    """Its size would be another."""
    filled(tmp_path, 2)
    with pytest.raises(ResourceError, match="200 bytes, wanted 0 bytes"):
        SegmentFiles(tmp_path).read(newest(tmp_path)[0].files, [])
