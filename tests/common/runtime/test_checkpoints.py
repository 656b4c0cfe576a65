"""Tests of checkpoints on a real file system with operations that stop, fail or lie."""

import contextlib
import errno
import itertools
import json
import math
import random
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from common.errors import ResourceError
from common.runtime.checkpoint_files import Checkpoint, _sealed, _unsealed
from common.runtime.checkpoints import CheckpointStore
from common.runtime.disk import DISK, Disk

pytestmark = pytest.mark.service


def _checkpoint(version, *, state=None):
    return Checkpoint(
        run_id="pong-1",
        version=version,
        env_steps=version * 2048,
        architecture="conv-1",
        counters={"episodes": version, "dropped": {"stale": 3}},
        state=state or {"weight": torch.full((50,), float(version)), "updates": version},
    )


def save(folder, checkpoint, *, keep, disk=DISK):
    """Save as a process does that has just started."""
    return CheckpointStore(folder, keep=keep, disk=disk).save(checkpoint)


def _load(folder, architecture="conv-1"):
    warnings = []
    return CheckpointStore(folder, keep=1).load_newest(
        architecture=architecture, warn=warnings.append, restore=lambda found: found
    ), warnings


def _names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_no_checkpoint_behind_one_that_does_not_fit_is_taken(tmp_path):
    """Of another number of ranks: training would go back behind it."""
    for version in (7, 29, 40):
        save(tmp_path, _checkpoint(version), keep=3)
    store = CheckpointStore(tmp_path, keep=3)
    for most, wanted in ((None, 40), (39, -1), (28, -1)):
        assert store.newest_good(most, fits=lambda checkpoint: checkpoint.version != 29) == wanted
    assert store.newest_good(28, fits=lambda _: True) == 7


def test_a_folder_that_cannot_be_listed_is_an_error_of_the_disk(tmp_path, monkeypatch):
    """No descriptor is left: of several ranks one would end, and all with it, where a checkpoint is what it costs."""

    def refuse(_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(ResourceError, match="checkpoints cannot be listed: found Too many open files at"):
        CheckpointStore(tmp_path, keep=1).newest()


class KilledError(BaseException):
    """The process ends here: no handler of the program may see it."""


def _stopping(after, end):
    """Return a disk that raises `end` from operation number `after` on."""
    count = itertools.count()

    def guarded(real):
        def operation(*args):
            if next(count) >= after:
                raise end
            real(*args)

        return operation

    return Disk(**{field.name: guarded(getattr(DISK, field.name)) for field in fields(Disk)})


def test_a_resumed_optimizer_takes_the_very_step_the_killed_one_would_have_taken(tmp_path):
    """Weights, Adam's moments (int keys) and random state, bit for bit."""

    def build():
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
        return net, torch.optim.Adam(net.parameters(), lr=1e-2), torch.Generator().manual_seed(5)

    def step(net, optimizer, generator):
        optimizer.zero_grad()
        net(torch.rand(8, 3, generator=generator)).square().mean().backward()
        optimizer.step()

    first = build()
    step(*first)
    parts = {"net": first[0].state_dict(), "optimizer": first[1].state_dict(), "generator": first[2].get_state()}
    save(tmp_path, _checkpoint(1, state=parts), keep=2)

    second = build()
    state = _load(tmp_path)[0].state
    assert list(state["optimizer"]["state"]) == [0, 1, 2, 3]
    assert state["optimizer"]["param_groups"] == first[1].state_dict()["param_groups"]
    second[0].load_state_dict(state["net"])
    second[1].load_state_dict(state["optimizer"])
    second[2].set_state(state["generator"])
    for run in (first, second):
        step(*run)
    pairs = zip(first[0].state_dict().values(), second[0].state_dict().values(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)
    assert torch.equal(first[2].get_state(), second[2].get_state())


def test_what_was_saved_is_what_is_loaded(tmp_path):
    """All facts of a checkpoint, not its tensors alone."""
    saved = _checkpoint(7)
    assert save(tmp_path / "new" / "folder", saved, keep=1).name == "checkpoint-000000000007"
    loaded, warnings = _load(tmp_path / "new" / "folder")
    assert replace(loaded, state={}) == replace(saved, state={})
    assert torch.equal(loaded.state["weight"], saved.state["weight"])
    assert warnings == []


def test_a_state_without_tensors_is_a_state(tmp_path):
    """A run that has counters only."""
    save(tmp_path, _checkpoint(1, state={"n": 1}), keep=1)
    assert _load(tmp_path)[0].state == {"n": 1}


def test_the_newest_are_kept_and_the_newest_is_loaded(tmp_path):
    """Version 10 comes after 9, also where names are sorted as text; a disk does not fill."""
    for version in (8, 9, 10, 1000):
        save(tmp_path, _checkpoint(version), keep=2)
    assert _names(tmp_path) == ["checkpoint-000000000010", "checkpoint-000000001000"]
    assert _load(tmp_path)[0].version == 1000


def test_a_run_that_went_back_drops_the_future_it_left(tmp_path):
    """The newest was corrupt, the run went on from an older one: the corrupt one must not stay newest for ever."""
    for version in (1, 2):
        save(tmp_path, _checkpoint(version), keep=3)
    (tmp_path / "checkpoint-000000000002" / "manifest.json").unlink()
    save(tmp_path, _checkpoint(1), keep=1)
    assert _names(tmp_path) == ["checkpoint-000000000001"]


def test_a_checkpoint_of_the_same_version_takes_the_place_of_the_first(tmp_path):
    """A learner is stopped right after a resume: same policy, later counters."""
    save(tmp_path, _checkpoint(1), keep=3)
    save(tmp_path, replace(_checkpoint(1), env_steps=9999), keep=3)
    assert _load(tmp_path)[0].env_steps == 9999
    assert _names(tmp_path) == ["checkpoint-000000000001"]


def test_no_folder_and_no_checkpoint_are_a_fresh_start(tmp_path):
    """The learner died before its first checkpoint: `--resume` begins at the beginning."""
    assert _load(tmp_path / "absent") == (None, [])
    (tmp_path / "notes.txt").touch()
    (tmp_path / ".partial-checkpoint-000000000001").mkdir()
    assert _load(tmp_path) == (None, [])


def _killed(folder, checkpoint, *, keep, after):
    """Save until disk operation number `after`; whether the save was killed by then."""
    try:
        save(folder, checkpoint, keep=keep, disk=_stopping(after, KilledError()))
    except KilledError:
        return True
    return False


@pytest.mark.parametrize(("version", "operations"), [(3, 9), (2, 11)], ids=["removes an older one", "replaces its like"])
def test_a_kill_between_any_two_disk_operations_leaves_a_whole_checkpoint(tmp_path, version, operations):
    """A kill at every point of a save: the run finds the old or the new, whole; the next save leaves no trace of the first."""
    for after in range(operations + 1):
        folder = tmp_path / str(after)
        for older in (1, 2):
            save(folder, _checkpoint(older), keep=2)
        killed = _killed(folder, replace(_checkpoint(version), env_steps=777), keep=2, after=after)
        assert killed == (after < operations)
        found, warnings = _load(folder)
        assert warnings == []
        assert found.env_steps in ((777, 2 * 2048) if killed else (777,))
        assert torch.equal(found.state["weight"], torch.full((50,), float(found.version)))
        save(folder, _checkpoint(4), keep=2)
        assert len(_names(folder)) == 2
        assert _names(folder)[-1] == "checkpoint-000000000004"


def test_kills_in_a_row_while_replacing_the_only_checkpoint_do_not_lose_it(tmp_path):
    """With keep 1 there is nothing older to go back to, and the second kill meets what the first left behind."""
    for first, second in itertools.product(range(5, 11), range(0, 15, 2)):
        folder = tmp_path / f"{first}-{second}"
        save(folder, _checkpoint(1), keep=1)
        _killed(folder, _checkpoint(1), keep=1, after=first)
        _killed(folder, _checkpoint(1), keep=1, after=second)
        found, warnings = _load(folder)
        assert (found.version, warnings) == (1, [])


def test_data_reaches_the_disk_before_the_name_that_promises_it(tmp_path):
    """A power cut keeps what was fsynced: both files and their directory come before the rename, the folder after it."""
    steps = []

    def noting(name, real):
        def operation(path, *rest):
            steps.append(f"{name} {path.name}")
            return real(path, *rest)

        return operation

    disk = Disk(**{field.name: noting(field.name, getattr(DISK, field.name)) for field in fields(Disk)})
    save(tmp_path, _checkpoint(1), keep=1, disk=disk)
    partial = ".partial-checkpoint-000000000001"
    assert steps == [
        "write tensors.safetensors",
        "fsync tensors.safetensors",
        "write manifest.json",
        "fsync manifest.json",
        f"fsync {partial}",
        f"rename {partial}",
        f"fsync {tmp_path.name}",
    ]


def _load_best(folder):
    return CheckpointStore(folder, keep=1).load_best(warn=pytest.fail)


def test_the_best_stays_while_others_come_and_go(tmp_path):
    """It is no resume point, and its version may be older or newer than all that are kept."""
    store = CheckpointStore(tmp_path, keep=1)
    assert store.load_best(warn=pytest.fail) is None
    store.save_best(_checkpoint(3))
    for version in (1, 2, 5, 6):
        store.save(_checkpoint(version))
    assert _names(tmp_path) == ["best", "checkpoint-000000000006"]
    assert (_load_best(tmp_path).version, _load(tmp_path)[0].version) == (3, 6)
    store.save_best(_checkpoint(4))
    assert _names(tmp_path) == ["best", "checkpoint-000000000006"]
    assert _load_best(tmp_path).version == 4


def test_a_kill_at_any_disk_operation_leaves_a_whole_best_policy(tmp_path):
    """The old or the new, and the next save of either kind leaves no trace of the killed one."""
    operations = 11
    for after in range(operations + 1):
        folder = tmp_path / str(after)
        CheckpointStore(folder, keep=2).save_best(_checkpoint(1))
        killed = CheckpointStore(folder, keep=2, disk=_stopping(after, KilledError()))
        with contextlib.nullcontext() if after == operations else pytest.raises(KilledError):
            killed.save_best(_checkpoint(2))
        assert _load_best(folder).version in ((1, 2) if after < operations else (2,))
        save(folder, _checkpoint(1), keep=2)
        assert _names(folder) == ["best", "checkpoint-000000000001"]
        assert _load_best(folder).version in (1, 2)


def test_a_full_disk_leaves_the_best_of_before(tmp_path):
    """One clear error, nothing half-written."""
    CheckpointStore(tmp_path, keep=2).save_best(_checkpoint(1))
    full = CheckpointStore(tmp_path, keep=2, disk=_stopping(2, OSError(errno.ENOSPC, "the disk says no")))
    with pytest.raises(ResourceError, match="best"):
        full.save_best(_checkpoint(2))
    assert _names(tmp_path) == ["best"]
    assert _load_best(tmp_path).version == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("after", range(6))
def test_a_disk_that_refuses_costs_the_new_checkpoint_only(tmp_path, after, code):
    """Full, read-only or broken before the rename: one clear error, the old checkpoint is there, nothing half-written."""
    save(tmp_path, _checkpoint(1), keep=2)
    with pytest.raises(ResourceError, match="checkpoint-000000000002"):
        save(tmp_path, _checkpoint(2), keep=2, disk=_stopping(after, OSError(code, "the disk says no")))
    assert _names(tmp_path) == ["checkpoint-000000000001"]
    assert _load(tmp_path)[0].version == 1


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
    """Something else has the name."""
    (tmp_path / "checkpoints").touch()
    with pytest.raises(ResourceError, match="save did not finish"):
        save(tmp_path / "checkpoints", _checkpoint(1), keep=1)


def _damaged(tmp_path, damage):
    for version in (1, 2):
        save(tmp_path, _checkpoint(version), keep=2)
    damage(tmp_path / "checkpoint-000000000002")


@pytest.mark.parametrize("name", ["tensors.safetensors", "manifest.json"])
def test_any_flipped_byte_is_seen_and_the_older_checkpoint_used(tmp_path, name):
    """A bad sector, a bad memory: at a sample of places, each kind of bit."""
    for version in (1, 2):
        save(tmp_path, _checkpoint(version), keep=2)
    path = tmp_path / "checkpoint-000000000002" / name
    good = path.read_bytes()
    draw = random.Random(1)
    for place in [0, len(good) - 1, *draw.sample(range(len(good)), 150)]:
        bad = bytearray(good)
        bad[place] ^= 1 << draw.randrange(8)
        path.write_bytes(bad)
        found, warnings = _load(tmp_path)
        assert found.version == 1
        assert len(warnings) == 1
        assert "checkpoint-000000000002" in warnings[0]
    path.write_bytes(good)
    assert _load(tmp_path)[0].version == 2


@pytest.mark.parametrize("name", ["tensors.safetensors", "manifest.json"])
@pytest.mark.parametrize("length", [0, 1, 50, -1])
def test_a_truncated_file_is_passed_over(tmp_path, name, length):
    """The disk was full when someone copied the run."""
    _damaged(tmp_path, lambda place: (place / name).write_bytes((place / name).read_bytes()[:length]))
    found, warnings = _load(tmp_path)
    assert found.version == 1
    assert name in warnings[0]


@pytest.mark.parametrize("name", ["tensors.safetensors", "manifest.json"])
def test_a_missing_file_is_passed_over(tmp_path, name):
    """Half of a checkpoint was copied."""
    _damaged(tmp_path, lambda place: (place / name).unlink())
    found, warnings = _load(tmp_path)
    assert found.version == 1
    assert f"{name}: No such file" in warnings[0]


def _refusing(monkeypatch, place, times):
    """The disk refuses to read the manifest in `place` so many times."""
    read_bytes, refused = Path.read_bytes, []

    def read(path):
        if path == place / "manifest.json" and len(refused) < times:
            refused.append(path)
            raise OSError(errno.EIO, "Input/output error")
        return read_bytes(path)

    monkeypatch.setattr("common.runtime.checkpoint_files.READ_AGAIN", 0.0)
    monkeypatch.setattr(Path, "read_bytes", read)


def test_a_read_error_that_passes_rolls_no_run_back(tmp_path, monkeypatch):
    """A network disk that hands over: what it refuses once is not damaged."""
    for version in (1, 2):
        save(tmp_path, _checkpoint(version), keep=2)
    _refusing(monkeypatch, tmp_path / "checkpoint-000000000002", 2)
    found, warnings = _load(tmp_path)
    assert (found.version, warnings) == (2, [])


def test_a_disk_that_cannot_be_read_is_an_error_and_costs_no_checkpoint(tmp_path, monkeypatch):
    """Had the run gone on from version 1, its next save would have removed version 2, which is whole."""
    for version in (1, 2):
        save(tmp_path, _checkpoint(version), keep=2)
    _refusing(monkeypatch, tmp_path / "checkpoint-000000000002", math.inf)
    with pytest.raises(ResourceError, match=r"cannot be read: found Input/output error at .*checkpoint-000000000002/manifest"):
        _load(tmp_path)
    assert _names(tmp_path) == ["checkpoint-000000000001", "checkpoint-000000000002"]


@pytest.mark.parametrize("manifest", [b"[]", b"{}", b"null", b'{"manifest": {}}', b"\xff", b"[" * 100_000])
def test_a_manifest_that_is_none_is_passed_over(tmp_path, manifest):
    """Whatever another program left under the name."""
    _damaged(tmp_path, lambda place: (place / "manifest.json").write_bytes(manifest))
    assert _load(tmp_path)[0].version == 1


def test_another_format_is_told_by_number(tmp_path):
    """A later rookery wrote it."""

    def later(place):
        document = json.loads((place / "manifest.json").read_text())
        document["manifest"]["format"] = 2
        (place / "manifest.json").write_text(json.dumps(document))

    _damaged(tmp_path, later)
    assert "format: found 2" in _load(tmp_path)[1][0]


@pytest.mark.parametrize("content", [{"mapping": [["state", 1]]}, {"tensor": "absent"}, {"rope": 1}, {}, 3])
def test_a_manifest_that_speaks_of_other_tensors_is_passed_over(tmp_path, content):
    """Whole by its hash and yet of no use: two versions of the program in one folder."""

    def rewritten(place):
        manifest = _unsealed((place / "manifest.json").read_bytes())
        (place / "manifest.json").write_bytes(_sealed(manifest.model_copy(update={"content": content})))

    _damaged(tmp_path, rewritten)
    found, warnings = _load(tmp_path)
    assert found.version == 1
    assert "content does not fit together" in warnings[0]


def test_none_good_tells_all_that_was_tried(tmp_path):
    """Resuming from nothing would throw the run away in silence."""
    for version in (1, 2):
        save(tmp_path, _checkpoint(version), keep=2)
        (tmp_path / f"checkpoint-00000000000{version}" / "manifest.json").write_bytes(b"")
    with pytest.raises(ResourceError, match=r"no good checkpoint.*checkpoint-000000000002: .*checkpoint-000000000001: "):
        _load(tmp_path)


def test_another_architecture_is_refused_and_not_passed_over(tmp_path):
    """The user changed model.hidden: an older checkpoint would not fit either, and training anew is not what was asked."""
    save(tmp_path, _checkpoint(1), keep=1)
    with pytest.raises(ResourceError, match="found conv-1, wanted conv-2"):
        _load(tmp_path, architecture="conv-2")
