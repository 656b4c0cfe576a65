"""Tests of the copy of a run in a bucket: fsspec's memory, a folder, and the S3 server of moto."""

from __future__ import annotations

import errno
import shutil
from dataclasses import replace
from uuid import uuid4

import fsspec
import numpy as np
import pytest
import torch

from common.errors import ConfigError, ResourceError
from common.replay.blocks import Segment
from common.runtime.checkpoint_files import Checkpoint, read
from common.runtime.checkpoints import BEST, CheckpointStore
from common.runtime.copies import (
    check_new,
    check_resumed,
    copy_address,
    fetch,
    fetch_results,
    local_path,
    restore,
    restore_missing,
)
from common.runtime.run_directory import RunDirectory, create, held
from common.runtime.store import RunStore

pytestmark = pytest.mark.service


@pytest.fixture
def directory(tmp_path):
    """A run that was just begun."""
    return create(tmp_path / "runs" / "cartpole-s1", config="run: {}\n", command=["rookery", "train"])


@pytest.fixture(params=["memory", "file"])
def store(request, tmp_path):
    """The address of an empty store."""
    (tmp_path / "bucket").mkdir()
    return f"memory://{uuid4().hex}/runs" if request.param == "memory" else f"file://{tmp_path}/bucket/runs"


def checkpoint(version):
    return Checkpoint(
        run_id="cartpole-1",
        version=version,
        env_steps=version * 100,
        architecture="mlp-1",
        counters={"episodes": version},
        state={"weight": torch.full((50,), float(version))},
    )


def save(directory, *versions, keep=3):
    for version in versions:
        CheckpointStore(directory.checkpoints, keep=keep).save(checkpoint(version))


def files(address):
    """Path and content of all files of the copy."""
    fs, root = fsspec.core.url_to_fs(address)
    fs.invalidate_cache()
    return {path.removeprefix(root).lstrip("/"): fs.cat_file(path) for path in fs.find(root)}


def newest(folder, warnings=None):
    """The version from which the run in this folder would be resumed."""
    found = CheckpointStore(folder / "checkpoints", keep=3).load_newest(
        architecture="mlp-1", warn=(warnings if warnings is not None else []).append, restore=lambda found: found
    )
    return found.version


def run_of(folder, number, *versions):
    """A run with an id and checkpoints."""
    begun = create(folder, config=f"run: {{id: run-{number}}}\n", command=["rookery"])
    save(begun, *versions)
    return begun


def test_a_run_is_not_uploaded_over_another_one_of_its_name(tmp_path, store):
    """Two series have an `s1`; two machines may begin a run of one name before either has uploaded."""
    first, second = run_of(tmp_path / "a" / "s1", 1, 4), run_of(tmp_path / "b" / "s1", 2, 9)
    address = copy_address(store, first.path)
    check_resumed(address, first.path, warn=pytest.fail)
    RunStore(address).upload(first, keep=3)
    before = files(address)
    refused = r"run\.store holds another run: found run-1 in .*, wanted run-2; set run\.store to another place"
    with pytest.raises(ConfigError, match=refused):
        RunStore(address).upload(second, keep=3)
    with pytest.raises(ConfigError, match=refused):
        check_resumed(address, second.path, warn=pytest.fail)
    assert files(address) == before


def test_a_folder_that_stayed_behind_its_copy_is_not_resumed(tmp_path, store):
    """The run went on elsewhere, from the copy: its newer checkpoints would be removed as those of a resume that went back."""
    behind = run_of(tmp_path / "s1", 1, 4)
    address = copy_address(store, behind.path)
    RunStore(address).upload(behind, keep=3)
    check_resumed(address, behind.path, warn=pytest.fail)
    RunStore(address).upload(run_of(tmp_path / "elsewhere" / "s1", 1, 4, 9), keep=3)
    with pytest.raises(ConfigError, match=r"the copy of this run has gone on: found checkpoint-0+9 in .*, wanted at most .*-0+4"):
        check_resumed(address, behind.path, warn=pytest.fail)


def test_a_folder_is_compared_with_its_copy_where_the_folder_for_temporary_files_is_full(tmp_path, store, monkeypatch):
    """A checkpoint may be larger than the /tmp of a container; uncompared, the run would go on and remove what is newer."""
    behind = run_of(tmp_path / "s1", 1, 4)
    address = copy_address(store, behind.path)
    RunStore(address).upload(run_of(tmp_path / "elsewhere" / "s1", 1, 4, 9), keep=3)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "full"))  # not even there
    with pytest.raises(ConfigError, match="has gone on"):
        check_resumed(address, behind.path, warn=pytest.fail)
    assert not list(behind.checkpoints.glob(".*"))


def test_a_folder_that_went_back_behind_its_copy_is_resumed(tmp_path, store):
    """Its newest checkpoint was damaged, and it was killed behind the next save: the copy has what it could not use."""
    run = run_of(tmp_path / "s1", 1, 4, 9)
    address = copy_address(store, run.path)
    RunStore(address).upload(run, keep=3)
    shutil.rmtree(run.checkpoints / "checkpoint-000000000009")
    with pytest.raises(ConfigError, match="has gone on"):  # it can continue from the one in the copy
        check_resumed(address, run.path, warn=pytest.fail)
    save(run, 5)
    check_resumed(address, run.path, warn=pytest.fail)


def test_a_folder_behind_its_copy_is_not_resumed_whatever_the_clocks_of_the_machines_say(tmp_path, store, monkeypatch):
    """The copy went on on a machine whose clock is an hour behind: a save here would remove its newer checkpoints."""
    behind = run_of(tmp_path / "s1", 1, 4)
    address = copy_address(store, behind.path)
    RunStore(address).upload(behind, keep=3)
    elsewhere = restore(address, tmp_path / "elsewhere" / "s1")
    monkeypatch.setattr("common.runtime.checkpoints.time.time", lambda: 1.0)
    save(elsewhere, 9)
    RunStore(address).upload(elsewhere, keep=3)
    with pytest.raises(ConfigError, match="has gone on"):
        check_resumed(address, behind.path, warn=pytest.fail)
    shutil.rmtree(elsewhere.checkpoints / "checkpoint-000000000009")
    save(elsewhere, 6)
    check_resumed(address, elsewhere.path, warn=pytest.fail)


def test_a_newer_checkpoint_of_the_copy_that_lacks_a_segment_keeps_no_run_from_going_on(tmp_path, store):
    """A rule of the bucket removes what is old first: a download passes that checkpoint over, and goes on from the one before."""
    run = run_of(tmp_path / "s1", 1, 4)
    address = copy_address(store, run.path)
    RunStore(address).upload(run, keep=3)
    elsewhere = run_of(tmp_path / "elsewhere" / "s1", 1, 4)
    segment = Segment(key="0-1-1", parts=[memoryview(bytearray(8))])
    CheckpointStore(elsewhere.checkpoints, keep=3).save(replace(checkpoint(9), replay={}, segments=[segment]))
    RunStore(address).upload(elsewhere, keep=3)
    with pytest.raises(ConfigError, match="has gone on"):
        check_resumed(address, run.path, warn=pytest.fail)
    fs, root = fsspec.core.url_to_fs(address)
    fs.rm(f"{root}/checkpoints/segments", recursive=True)
    check_resumed(address, run.path, warn=pytest.fail)


@pytest.mark.parametrize("config", [b"", b"\x00\x00", b"[]"])
def test_a_damaged_configuration_of_the_copy_is_replaced(tmp_path, store, config):
    run = run_of(tmp_path / "s1", 1, 4)
    address = copy_address(store, run.path)
    fs, root = fsspec.core.url_to_fs(address)
    fs.makedirs(root, exist_ok=True)
    fs.pipe_file(f"{root}/config.yaml", config)
    RunStore(address).upload(run, keep=3)
    assert files(address)["config.yaml"] == run.config.read_bytes()


@pytest.mark.parametrize(("keep", "found"), [(3, 1), (1, 2)])
def test_a_checkpoint_saved_during_an_upload_waits_for_the_next_or_replaces_the_uploaded_one(
    directory, store, monkeypatch, keep, found
):
    """Results in the copy go as far as its checkpoint; with `checkpoint.keep` 1 and a slow store it is the later one."""
    save(directory, 1)
    upload = RunStore._upload_result

    def and_save(copy, path):
        upload(copy, path)
        save(directory, 2, keep=keep)

    monkeypatch.setattr(RunStore, "_upload_result", and_save)
    RunStore(copy_address(store, directory.path)).upload(directory, keep=keep)
    restore(copy_address(store, directory.path), directory.path.parent / "new")
    assert newest(directory.path.parent / "new") == found


def test_a_store_that_cannot_be_read_is_no_empty_one_and_keeps_no_run_from_going_on(tmp_path, monkeypatch):
    """A mount that is gone for a moment; fsspec says that nothing exists there."""
    run, warnings = run_of(tmp_path / "s1", 1, 4), []
    address = copy_address(f"file://{tmp_path}/bucket", run.path)
    RunStore(address).upload(run, keep=3)

    def broken(*_, **__):
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(fsspec.get_filesystem_class("file"), "info", broken)
    with pytest.raises(ResourceError, match="input/output error"):
        RunStore(address).exists()
    check_resumed(address, run.path, warn=warnings.append)
    assert "not compared" in warnings[0]


def test_what_an_interrupted_download_of_another_run_left_is_removed(tmp_path, store):
    """Its checkpoints may be of later versions, and would be resumed from."""
    first, second = run_of(tmp_path / "a" / "s1", 1, 9), run_of(tmp_path / "b" / "s1", 2, 4)
    address = copy_address(store, second.path)
    RunStore(address).upload(second, keep=3)
    shutil.copytree(first.checkpoints, tmp_path / "new" / "checkpoints")
    restore(address, tmp_path / "new")
    assert newest(tmp_path / "new") == 4


def test_what_is_left_of_a_run_that_is_newer_than_its_copy_is_not_removed(tmp_path, store):
    run = run_of(tmp_path / "s1", 1)
    CheckpointStore(run.checkpoints, keep=3).save(replace(checkpoint(4), run_id="run-1"))
    address = copy_address(store, run.path)
    RunStore(address).upload(run, keep=3)
    CheckpointStore(run.checkpoints, keep=3).save(replace(checkpoint(9), run_id="run-1"))
    shutil.copytree(run.checkpoints, tmp_path / "new" / "checkpoints")
    with pytest.raises(ConfigError, match=r"stayed behind: found .*checkpoint-0+9, wanted at most checkpoint-0+4, .* move"):
        restore(address, tmp_path / "new")
    assert newest(tmp_path / "new") == 9
    shutil.rmtree(tmp_path / "new" / "checkpoints" / "checkpoint-000000000009")
    restore(address, tmp_path / "new")
    assert newest(tmp_path / "new") == 4


def test_a_best_policy_that_was_cut_in_the_copy_is_warned_of(tmp_path, store, capsys):
    run, warnings = run_of(tmp_path / "s1", 1, 4), []
    CheckpointStore(run.checkpoints, keep=3).save_best(checkpoint(3))
    address = copy_address(store, run.path)
    RunStore(address).upload(run, keep=3)
    fs, root = fsspec.core.url_to_fs(address)
    fs.pipe_file(f"{root}/checkpoints/{BEST}/tensors.safetensors", b"cut")
    restore(address, tmp_path / "new", warn=warnings.append)
    assert "checkpoint best of" in warnings[0]
    fetch(address)
    assert "rookery: checkpoint best of" in capsys.readouterr().err


def test_a_copy_that_was_removed_while_the_run_goes_on_is_whole_again(directory, store):
    copy = RunStore(copy_address(store, directory.path))
    save(directory, 1)
    CheckpointStore(directory.checkpoints, keep=3).save_best(checkpoint(1))
    copy.upload(directory, keep=3)
    before = files(copy.address)
    fs, root = fsspec.core.url_to_fs(copy.address)
    fs.rm(root, recursive=True)
    copy.upload(directory, keep=3)
    assert files(copy.address) == before
    fs.rm_file(f"{root}/config.yaml")
    with pytest.raises(ConfigError, match="holds a run of this name"):  # its checkpoints would be removed as later ones
        check_new(store, directory.path)


def test_a_run_continues_from_its_copy_alone(directory, store):
    address, copy = copy_address(store, directory.path), RunStore(copy_address(store, directory.path))
    assert address == f"{store}/cartpole-s1"
    save(directory, 1)
    copy.upload(directory, keep=3)
    save(directory, 2)
    directory.learning_curve_csv.write_text("wall_seconds\n1\n")
    copy.upload(directory, keep=3)
    shutil.rmtree(directory.path)
    assert restore_missing(store, directory.path, warn=pytest.fail)
    assert newest(directory.path) == 2
    assert directory.begun
    assert directory.learning_curve_csv.read_text() == "wall_seconds\n1\n"
    assert directory.command.read_text() == "rookery train\n"
    assert not restore_missing(store, directory.path, warn=pytest.fail), "a directory that is there is used as it is"


def test_only_what_is_new_is_uploaded(directory, store, monkeypatch):
    copy = RunStore(copy_address(store, directory.path))
    save(directory, 1)
    copy.upload(directory, keep=3)
    written = []
    monkeypatch.setattr(copy, "_upload_file", lambda name, _: written.append(name))
    copy.upload(directory, keep=3)
    assert written == []
    directory.learning_curve_csv.write_text("a new row")
    save(directory, 2)
    copy.upload(directory, keep=3)
    place = "checkpoints/checkpoint-000000000002"
    assert written == ["learning_curve.csv", f"{place}/tensors.safetensors", f"{place}/manifest.json"]


@pytest.mark.parametrize("name", ["tensors.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_a_damaged_newest_upload_falls_back_to_the_one_before(directory, store, name, damage):
    address = copy_address(store, directory.path)
    for version in (1, 2):
        save(directory, version)
        RunStore(address).upload(directory, keep=3)
    fs, root = fsspec.core.url_to_fs(address)
    path = f"{root}/checkpoints/checkpoint-000000000002/{name}"
    content = fs.cat_file(path)
    fs.rm_file(path)
    if damage == "cut":
        fs.pipe_file(path, content[: len(content) // 2])
    shutil.rmtree(directory.path)
    warnings = []
    restore(address, directory.path, warn=warnings.append)
    assert newest(directory.path) == 1
    assert len(warnings) == 1
    assert "checkpoint-000000000002" in warnings[0]


def test_a_copy_whose_checkpoints_are_all_damaged_is_refused(directory, store):
    address = copy_address(store, directory.path)
    save(directory, 1)
    RunStore(address).upload(directory, keep=3)
    fs, root = fsspec.core.url_to_fs(address)
    fs.pipe_file(f"{root}/checkpoints/checkpoint-000000000001/tensors.safetensors", b"")
    shutil.rmtree(directory.path)
    with pytest.raises(ResourceError, match="no good checkpoint"):
        restore(address, directory.path)
    assert not directory.begun


def test_old_and_rolled_back_checkpoints_leave_the_copy(directory, store):
    """Version 9 was trained before a resume that could not use it."""
    copy = RunStore(copy_address(store, directory.path))
    for version in (1, 2, 3, 9, 4):
        save(directory, version, keep=2)
        copy.upload(directory, keep=2)
    manifests = [path for path in files(copy.address) if path.endswith("manifest.json")]
    assert manifests == [f"checkpoints/checkpoint-{version:012d}/manifest.json" for version in (3, 4)]


def test_segments_of_the_replay_memory_are_uploaded_once_and_leave_with_the_last_that_names_them(directory, store):
    copy, memory = RunStore(copy_address(store, directory.path)), CheckpointStore(directory.checkpoints, keep=1)
    blocks = [np.full(100, number, np.uint8) for number in range(3)]
    for version, kept in ((1, (0, 1)), (2, (1, 2))):
        segments = [Segment(key=str(number), parts=[memoryview(blocks[number])]) for number in kept]
        memory.save(replace(checkpoint(version), replay={"size": 2}, segments=segments))
        copy.upload(directory, keep=1)
    stored = {path: data for path, data in files(copy.address).items() if "/segments/" in path}
    assert sorted(data[0] for data in stored.values()) == [1, 2]
    shutil.rmtree(directory.path)
    restore(copy.address, directory.path)
    assert len(read(directory.checkpoints / "checkpoint-000000000002").files) == 2


def test_the_segments_of_a_checkpoint_stay_where_the_listing_does_not_have_it_yet(directory, store, monkeypatch):
    copy, place = RunStore(copy_address(store, directory.path)), "checkpoint-000000000002"
    names, segment = copy._names, Segment(key="1", parts=[memoryview(np.zeros(100, np.uint8))])
    CheckpointStore(directory.checkpoints, keep=3).save(replace(checkpoint(2), replay={"size": 1}, segments=[segment]))
    monkeypatch.setattr(copy, "_names", lambda folder: names(folder) - {place})
    copy.upload(directory, keep=3)
    assert copy.download_checkpoint(place, directory.path / "again", segments=True) == ""


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_a_segment_whose_upload_was_killed_is_uploaded_again(directory, store):
    """A file system that writes in place has the name of a segment, and the first part of its content."""
    copy, memory = RunStore(copy_address(store, directory.path)), CheckpointStore(directory.checkpoints, keep=1)
    segment = Segment(key="0", parts=[memoryview(np.ones(100, np.uint8))])
    memory.save(replace(checkpoint(1), replay={"size": 1}, segments=[segment]))
    (name,) = (path.name for path in (directory.checkpoints / "segments").iterdir())
    fs, root = fsspec.core.url_to_fs(copy.address)
    fs.makedirs(f"{root}/checkpoints/segments")
    fs.pipe_file(f"{root}/checkpoints/segments/{name}", bytes([1] * 40))
    copy.upload(directory, keep=1)
    shutil.rmtree(directory.path)
    restore(copy.address, directory.path)
    assert len(read(directory.checkpoints / "checkpoint-000000000001").files) == 1


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_what_a_killed_upload_left_of_a_segment_is_removed(directory, store):
    """Its checkpoint is gone since, and so no upload replaces the file."""
    copy = RunStore(copy_address(store, directory.path))
    fs, root = fsspec.core.url_to_fs(copy.address)
    fs.makedirs(f"{root}/checkpoints/segments")
    fs.pipe_file(f"{root}/checkpoints/segments/.partial-0a1b", bytes(40))
    save(directory, 1)
    copy.upload(directory, keep=1)
    assert not [path for path in files(copy.address) if "/segments/" in path]


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_an_upload_to_a_full_disk_leaves_the_copy_as_it_was(directory, store, no_room):
    """The machine may be lost at that moment: the run must continue from its copy."""
    address = copy_address(store, directory.path)
    save(directory, 1)
    RunStore(address).upload(directory, keep=3)
    before = files(address)
    directory.config.write_text("run: {seed: 2}\n")
    with no_room(), pytest.raises(OSError, match="File too large"):
        RunStore(address).upload(directory, keep=3)
    assert before.items() <= files(address).items()


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_uploads_that_failed_do_not_count_among_the_checkpoints_that_the_copy_keeps(directory, store, no_room):
    copy = RunStore(copy_address(store, directory.path))
    for version in (1, 2):
        save(directory, version)
        copy.upload(directory, keep=2)
    save(directory, 3)
    with no_room(), pytest.raises(OSError, match="File too large"):
        copy.upload(directory, keep=2)
    save(directory, 4)
    copy.upload(directory, keep=2)
    assert copy._places() == ["checkpoint-000000000004", "checkpoint-000000000002"]


def test_names_in_a_bucket_do_not_leave_the_run_directory(directory):
    """An object store takes any text as a name."""
    address = f"memory://{uuid4().hex}/runs/cartpole-s1"
    save(directory, 1)
    RunStore(address).upload(directory, keep=3)
    fs, root = fsspec.core.url_to_fs(address)
    path = f"{root}/checkpoints/checkpoint-000000000002/manifest.json"
    fs.pipe_file(path, b'{"manifest": {"segments": [{"name": "../../../letter.txt"}]}}')
    fs.pipe_file(f"{root}/checkpoints/checkpoint-000000000002/tensors.safetensors", b"")
    fs.pipe_file(f"{root}/checkpoints/../manifest.json", b"{}")
    shutil.rmtree(directory.path)
    letter = directory.path.parent.parent / "letter.txt"
    letter.touch()
    restore(address, directory.path)
    assert newest(directory.path) == 1
    assert letter.exists()


def test_a_new_run_does_not_take_the_name_of_another(directory, store):
    check_new(store, directory.path)
    check_new("", directory.path)
    RunStore(copy_address(store, directory.path)).upload(directory, keep=3)
    with pytest.raises(ConfigError, match="holds a run of this name"):
        check_new(store, directory.path)


def test_a_store_on_a_disk_that_is_not_mounted_is_refused_and_not_created(directory, tmp_path):
    store = f"file://{tmp_path}/mount/runs"
    save(directory, 1)
    with pytest.raises(ResourceError, match=r"No such file .*mount/runs"):
        check_new(store, directory.path)
    with pytest.raises(FileNotFoundError):
        RunStore(copy_address(store, directory.path)).upload(directory, keep=3)
    assert not (tmp_path / "mount").exists()


def test_a_run_is_not_downloaded_into_a_folder_with_other_files(directory, store, tmp_path):
    RunStore(copy_address(store, directory.path)).upload(directory, keep=3)
    other = tmp_path / "home"
    other.mkdir()
    (other / "letter.txt").touch()
    with pytest.raises(ConfigError, match=r"letter\.txt"):
        restore(copy_address(store, directory.path), other)
    assert [path.name for path in other.iterdir()] == ["letter.txt"]


def test_a_download_that_was_killed_is_repeated_and_leaves_nothing(directory, store, tmp_path):
    address = copy_address(store, directory.path)
    save(directory, 1)
    RunStore(address).upload(directory, keep=3)
    folder = tmp_path / "again"
    folder.mkdir()
    (folder / ".partial-learning_curve.csv-1a2b3c4d").write_text("wall_sec")
    restore(address, folder)
    assert newest(folder) == 1
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoints", "command.txt", "config.yaml"]


def test_fetch_returns_a_cached_copy_that_follows_the_run(directory, store, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    address = copy_address(store, directory.path)
    copy = RunStore(address)
    for version in (1, 2):
        save(directory, version)
        copy.upload(directory, keep=3)
        local = fetch(address)
        assert newest(local) == version
    CheckpointStore(directory.checkpoints, keep=3).save_best(checkpoint(1))
    copy.upload(directory, keep=3)
    assert read(fetch(address) / "checkpoints" / BEST).version == 1
    assert read(fetch(f"{address}/checkpoints/{BEST}")).version == 1
    assert local.name == "cartpole-s1"
    assert local.is_relative_to(tmp_path / "cache")
    older = fetch(f"{address}/checkpoints/checkpoint-000000000001")
    assert read(older).version == 1
    with pytest.raises(ConfigError, match="no such checkpoint"):
        fetch(f"{address}/checkpoints/checkpoint-000000000007")
    assert fetch(str(directory.path)) == fetch_results(str(directory.path)) == directory.path


@pytest.mark.parametrize("folder", ["", "/team"])
def test_a_store_in_a_folder_of_checkpoints_is_not_taken_for_the_checkpoints_of_a_run(
    directory, store, tmp_path, monkeypatch, folder
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    address = copy_address(f"{store}/checkpoints{folder}", directory.path)
    (tmp_path / "bucket" / "runs" / "checkpoints").mkdir(parents=True)
    save(directory, 1)
    CheckpointStore(directory.checkpoints, keep=3).save_best(checkpoint(1))
    RunStore(address).upload(directory, keep=3)
    assert newest(fetch(address)) == newest(fetch(f"{address}/")) == 1
    for name in (BEST, "checkpoint-000000000001"):
        assert read(fetch(f"{address}/checkpoints/{name}")).version == 1
    with pytest.raises(ConfigError, match="no run in this store"):
        fetch(f"{address}/checkpoints/newest")


def test_a_name_that_is_used_again_has_nothing_of_the_run_before(directory, store, tmp_path, monkeypatch):
    """A nightly run, whose copy is deleted in the morning: its weights and its result were taken for those of the next one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    address = copy_address(store, directory.path)
    directory.summary.write_text("{}")
    save(directory, 5)
    CheckpointStore(directory.checkpoints, keep=3).save_best(checkpoint(5))
    RunStore(address).upload(directory, keep=3)
    fetch(address)
    fs, root = fsspec.core.url_to_fs(address)
    fs.rm(root, recursive=True)
    shutil.rmtree(directory.path)
    new = create(directory.path, config="run: {id: another}\n", command=["rookery"])
    save(new, 2)
    RunStore(address).upload(new, keep=3)
    assert not (fetch_results(address) / "summary.json").exists()
    assert newest(fetch(address)) == 2
    assert not (fetch(address) / "checkpoints" / BEST).exists()


def test_a_copy_follows_a_run_that_went_back(directory, store, tmp_path, monkeypatch):
    """Resumed from an older checkpoint, and its summary of an earlier end removed: the copy in the cache has neither."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    address, copy = copy_address(store, directory.path), RunStore(copy_address(store, directory.path))
    save(directory, 1, 9)
    copy.upload(directory, keep=3)
    assert newest(fetch(address)) == 9
    shutil.rmtree(directory.checkpoints / "checkpoint-000000000009")
    save(directory, 2)
    copy.upload(directory, keep=3)
    assert newest(fetch(address)) == 2


def test_one_checkpoint_is_fetched_without_the_others_and_stays_when_the_run_removes_it(directory, store, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    address = f"{copy_address(store, directory.path)}/checkpoints/checkpoint-000000000001"
    copy = RunStore(copy_address(store, directory.path))
    for version in (1, 2):
        save(directory, version)
        copy.upload(directory, keep=2)
    local = fetch(address)
    assert [path.name for path in local.parent.iterdir()] == ["checkpoint-000000000001"]
    assert RunDirectory(local.parent.parent).begun
    save(directory, 3)
    copy.upload(directory, keep=2)
    assert read(fetch(address)).version == 1


def test_a_checkpoint_that_was_trained_again_is_fetched_again(directory, store, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    address = f"{copy_address(store, directory.path)}/checkpoints/checkpoint-000000000001"
    copy = RunStore(copy_address(store, directory.path))
    for episodes in (1, 2):
        shutil.rmtree(directory.checkpoints, ignore_errors=True)
        CheckpointStore(directory.checkpoints, keep=3).save(replace(checkpoint(1), counters={"episodes": episodes}))
        copy.upload(directory, keep=3)
        save(directory, 2)
        copy.upload(directory, keep=3)
        assert read(fetch(address)).counters == {"episodes": episodes}


@pytest.mark.parametrize("name", ["", "/checkpoints/checkpoint-000000000001", "results"])
def test_one_process_at_a_time_downloads_to_the_cache(directory, store, tmp_path, monkeypatch, name):
    """The other would take half a checkpoint for a damaged one, and remove it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    address, downloads = copy_address(store, directory.path), []
    save(directory, 1)
    RunStore(address).upload(directory, keep=3)
    download_results = RunStore.download_results

    def download(copy, folder):
        with pytest.raises(ConfigError, match="under way"), held(RunDirectory(folder)):
            pass
        downloads.append(folder)
        download_results(copy, folder)

    monkeypatch.setattr(RunStore, "download_results", download)
    fetch_results(address) if name == "results" else fetch(f"{address}{name}")
    with held(RunDirectory(downloads[0])):
        assert len(downloads) == 1


def test_a_cache_that_cannot_be_written_is_one_error(tmp_path, store, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ResourceError, match=r"the cache cannot be written: found Not a directory .*; set XDG_CACHE_HOME"):
        fetch_results(f"{store}/s1")


def test_records_are_fetched_without_checkpoints(directory, store, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    address = copy_address(store, directory.path)
    directory.summary.write_text("{}")
    RunStore(address).upload(directory, keep=2)
    local = fetch_results(address)
    assert (local / "config.yaml").read_text() == directory.config.read_text()
    assert (local / "summary.json").read_text() == "{}"
    assert not (local / "checkpoints").exists()
    with pytest.raises(ConfigError, match="no run in this store"):
        fetch_results(f"{address}-elsewhere")


def test_addresses_that_cannot_work_are_refused_in_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"run\.store cannot be used"):
        RunStore("nowhere://bucket/runs")
    with pytest.raises(ConfigError, match="no run to resume"):
        restore(f"file://{tmp_path}/nothing/here", tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert str(local_path("s3://bucket/runs/mine/")) == "runs/mine"
    assert str(local_path("runs/mine")) == "runs/mine"


@pytest.fixture
def s3(monkeypatch):
    """The address of a bucket on an S3 server of this machine."""
    moto = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    import boto3

    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    known = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
    }
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="bucket")
    yield server, "s3://bucket/runs"
    server.stop()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_an_s3_server_keeps_a_run_and_a_server_that_is_away_is_one_error(directory, s3):
    server, store = s3
    check_new(store, directory.path)
    copy = RunStore(copy_address(store, directory.path))
    for version in (1, 2, 3):
        save(directory, version, keep=2)
        copy.upload(directory, keep=2)
    shutil.rmtree(directory.path)
    assert restore_missing(store, directory.path, warn=pytest.fail)
    assert newest(directory.path) == 3
    assert [path.name for path in directory.checkpoints.iterdir()] == ["checkpoint-000000000003"]
    with pytest.raises(ResourceError, match="bucket does not exist"):
        check_new("s3://mistyped/runs", directory.path)
    with pytest.raises(FileNotFoundError):
        RunStore(copy_address("s3://mistyped/runs", directory.path)).upload(directory, keep=2)
    server.stop()
    with pytest.raises(ResourceError, match="the store cannot be used"):
        restore(copy.address, directory.path / "other")
