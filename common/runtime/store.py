"""Copies of run directories in buckets, by fsspec: s3://, gs://, az://, or file:// for a mounted folder.

The copy of a run has its results and its newest checkpoints, under the names that they have in the run directory. The manifest of
a checkpoint is uploaded last and removed first, and its hashes decide whether the checkpoint is good when it is downloaded. One
process writes a copy, any may read it.
"""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

from common.config.layers import parse_yaml
from common.errors import ConfigError, ResourceError, RookeryError
from common.runtime import manifests
from common.runtime.disk import DISK, PARTIAL, write_atomically
from common.runtime.manifests import CHECKPOINT
from common.runtime.run_directory import MANIFEST, SEGMENTS, TENSORS, RunDirectory
from common.units import MIB

NAME = re.compile(r"\w[\w.-]*")  # of a file or folder: names in a bucket become local paths
RESULTS = ("command.txt", "learning_curve.csv", "settings_changed.json", "summary.json")
CONFIG = "config.yaml"
SCHEME_END = "://"
BUCKETS = ("s3", "s3a", "gs", "gcs", "az", "abfs")
# boto waits for minutes by default; an upload that failed is repeated.
S3_OPTIONS = {"connect_timeout": 10, "read_timeout": 30, "retries": {"max_attempts": 2}}


class RunStore:
    """The copy of one run at `address`. One thread uses it; methods raise what the file system raises, unless said otherwise."""

    def __init__(self, address: str) -> None:
        """Connect to nothing yet. Raises `ConfigError` where the address is of no known kind or its package is missing."""
        import fsspec  # noqa: PLC0415  it takes time, and few runs have a store

        self.address = address.rstrip("/")
        kind = self.address.partition(SCHEME_END)[0]
        options: dict[str, Any] = {"config_kwargs": S3_OPTIONS} if kind in ("s3", "s3a") else {}
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.address, **options)
            self._in_folder = isinstance(self._fs, fsspec.get_filesystem_class("file"))
            self._in_bucket = kind in BUCKETS
        except (ImportError, ValueError) as error:
            fix = "pip install 'rookery[s3]'" if options else "install the package, or choose another address"
            wanted = "an address such as s3://BUCKET/runs"
            raise ConfigError(f"run.store cannot be used: {error}", found=self.address, wanted=wanted, fix=fix) from error
        self._sent: dict[str, object] = {}  # what was uploaded, by path: a hash, or time and size
        self._segments_of: dict[str, set[str]] = {}  # names of the segments of checkpoints in the copy

    # --- upload ---

    def check_new(self) -> None:
        """Raise `ConfigError` where the copy of another run is there, `ResourceError` where the store cannot be written."""
        with reached(self.address):
            if self._has(CONFIG) or self._places():  # config.yaml may be lost
                fix = "set run.dir, or " + ("continue that run with --resume" if self._has(CONFIG) else "remove what is there")
                raise ConfigError("run.store holds a run of this name", found=self.address, wanted="a new name", fix=fix)
            self._make_folder(self._root)
            self._fs.pipe_file(self._path(".probe"), b"probe")
            self._fs.rm_file(self._path(".probe"))

    def check_resumed(self, directory: RunDirectory) -> None:
        """Raise `ConfigError` where the copy is of another run than `directory`, or has gone on further.

        A newer checkpoint of the copy that is damaged, or was uploaded from `directory` before its newest one was saved, is of
        before a resume that did not use it. Raises `ResourceError` where the store cannot be read.
        """
        with reached(self.address), ExitStack() as stack:
            self._require_own(directory)
            newest = next(filter(self._is_complete, self._places()), "")
            here = max(manifests.versions(manifests.complete(directory.checkpoints)), default=None)
            if newest <= (here.name if here else ""):
                return
            directory.checkpoints.mkdir(exist_ok=True)  # where a checkpoint has room: /tmp may be small
            folder = Path(stack.enter_context(TemporaryDirectory(prefix=PARTIAL, dir=directory.checkpoints)))
            if self.download_checkpoint(newest, folder, segments=False):
                return
            manifest = (folder / newest / MANIFEST).read_bytes()
            own = manifests.digest(manifest) in _uploaded(directory)  # else the clocks are of two machines
            if here and own and manifests.saved_at((here / MANIFEST).read_bytes()) >= manifests.saved_at(manifest):
                return
        wanted = f"at most {here.name if here else 'no checkpoint'}, the newest in {directory.path}"
        fix = "remove that folder to continue from the copy, or set run.store to another place"
        raise ConfigError("the copy of this run has gone on", found=f"{newest} in {self.address}", wanted=wanted, fix=fix)

    def _require_own(self, directory: RunDirectory) -> None:
        """Raise `ConfigError` where both are known to be of two runs."""
        with suppress(FileNotFoundError):
            own, other = run_id(directory.config.read_bytes()), run_id(self._fs.cat_file(self._path(CONFIG)))
            if None not in {own, other} and own != other:
                fix = "set run.store to another place, or resume with another --run-dir"
                raise ConfigError("run.store holds another run", found=f"{other} in {self.address}", wanted=own, fix=fix)

    def upload(self, directory: RunDirectory, *, keep: int) -> None:
        """Upload the newest checkpoint and the results that changed, and leave the `keep` newest checkpoints in the copy.

        A result or a checkpoint that is no longer there is uploaded again: a rule of the bucket may remove what is old.
        Raises `ConfigError` where the copy is of another run.
        """
        self._require_own(directory)
        there = self._names("") | self._names("checkpoints")
        self._sent = {name: mark for name, mark in self._sent.items() if name in there}
        complete = manifests.complete(directory.checkpoints)  # before the results, which then go as far
        for name in (CONFIG, *RESULTS):
            self._upload_result(directory.path / name)
        versions = manifests.versions(complete)
        if versions and not versions[-1].exists():  # the run has replaced it meanwhile
            versions = manifests.versions(manifests.complete(directory.checkpoints))
        for place in (*versions[-1:], *(place for place in complete if not CHECKPOINT.fullmatch(place.name))):
            self._upload_checkpoint(directory, place)
        if versions:
            self._prune(versions[-1].name, keep)

    def _upload_result(self, path: Path) -> None:
        with suppress(FileNotFoundError):
            state = path.stat()
            mark = (state.st_mtime_ns, state.st_size)
            if self._sent.get(path.name) != mark:
                self._upload_file(path.name, io.BytesIO(path.read_bytes()))
                self._sent[path.name] = mark

    def _upload_checkpoint(self, directory: RunDirectory, place: Path) -> None:
        with ExitStack() as opened:
            # The run may replace or remove the checkpoint meanwhile: an open folder and open files stay what they are.
            folder_descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
            opened.callback(os.close, folder_descriptor)

            def open_file(name: str) -> BinaryIO:
                return opened.enter_context(os.fdopen(os.open(name, os.O_RDONLY, dir_fd=folder_descriptor), "rb"))

            manifest = open_file(MANIFEST).read()
            digest = manifests.digest(manifest)
            if self._sent.get(place.name) == digest:
                return
            tensors = open_file(TENSORS)
            sizes, there = manifests.segments(manifest), self._sizes(f"checkpoints/{SEGMENTS}")
            folder = place.parent / SEGMENTS
            # A killed upload leaves the beginning of a segment where the file system writes in place.
            names = [name for name, size in sizes.items() if there.get(name) != size]
            missing = {name: opened.enter_context((folder / name).open("rb")) for name in names}
            for name, file in missing.items():
                self._upload_file(f"checkpoints/{SEGMENTS}/{name}", file)
            self._upload_file(f"checkpoints/{place.name}/{TENSORS}", tensors)
            # Before the manifest: a kill between both must not hide it. A full disk holds up no copy.
            with suppress(OSError), directory.uploaded.open("a", encoding="utf-8") as uploaded:
                uploaded.write(f"{digest}\n")
            self._upload_file(f"checkpoints/{place.name}/{MANIFEST}", io.BytesIO(manifest))
        self._sent[place.name], self._segments_of[place.name] = digest, set(sizes)

    def _upload_file(self, name: str, source: BinaryIO) -> None:
        """Replace a file of the copy whole or not at all, also in a folder whose disk is full."""
        path = self._path(name)
        folder, _, base = path.rpartition("/")
        written = f"{folder}/{PARTIAL}{base}" if self._in_folder else path
        self._make_folder(folder)
        with self._fs.open(written, "wb") as target:
            shutil.copyfileobj(source, target, MIB)
        if written != path:
            Path(written).replace(path)

    def _make_folder(self, path: str) -> None:
        """Make a folder of the copy. Where the folder above a store is missing, its disk may not be mounted: that is an error."""
        if self._in_folder:
            Path(self._root).parent.mkdir(exist_ok=True)
        if not self._in_bucket:  # a bucket needs none, and fsspec would create one whose name is mistyped
            self._fs.makedirs(path, exist_ok=True)

    def _prune(self, newest: str, keep: int) -> None:
        """Remove checkpoints that are too old, or of after a resume that did not use them; then the segments that none names."""
        places = self._places()
        whole = (name for name in places if name in self._sent or self.has_checkpoint(name))  # an upload may have failed
        kept = [name for name in whole if name <= newest][:keep]
        for name in places:
            if name not in kept:
                with suppress(FileNotFoundError):
                    self._fs.rm_file(self._path(f"checkpoints/{name}/{MANIFEST}"))
                self._fs.rm(self._path(f"checkpoints/{name}"), recursive=True)
                self._sent.pop(name, None)
                self._segments_of.pop(name, None)
        if self._in_folder:
            for partial in Path(self._path(f"checkpoints/{SEGMENTS}")).glob(f"{PARTIAL}*"):  # of an upload that was killed
                partial.unlink()
        segments = self._names(f"checkpoints/{SEGMENTS}")
        if segments:
            listed = {newest} | self._names("checkpoints") - {SEGMENTS}  # some listings lack what was just uploaded
            named = set[str]().union(*map(self._named_segments, listed))
            for name in segments - named:
                self._fs.rm_file(self._path(f"checkpoints/{SEGMENTS}/{name}"))

    def _named_segments(self, place: str) -> set[str]:
        if place not in self._segments_of:
            with suppress(FileNotFoundError):
                manifest = self._fs.cat_file(self._path(f"checkpoints/{place}/{MANIFEST}"))
                self._segments_of[place] = set(manifests.segments(manifest))
        return self._segments_of.get(place, set())

    # --- download ---

    def exists(self) -> bool:
        """Return whether there is a copy of a run. Raises `ResourceError` where the store cannot be read."""
        with reached(self.address):
            return self._has(CONFIG)

    def config(self) -> bytes:
        """Return config.yaml of the copy. Raises `ConfigError` where there is no run."""
        try:
            config: bytes = self._fs.cat_file(self._path(CONFIG))
        except FileNotFoundError as error:
            raise ConfigError("no run in this store", found=self.address, wanted="a run that was uploaded there") from error
        return config

    def download_results(self, folder: Path) -> None:
        """Download the results of the run to `folder`, last config.yaml, which marks it as a run's. Raises as `download`.

        A result that the copy does not have is removed: it is of an earlier end.
        """
        with reached(self.address):
            config = self.config()
            for name in RESULTS:
                try:
                    write_atomically(folder / name, self._fs.cat_file(self._path(name)))
                except FileNotFoundError:
                    (folder / name).unlink(missing_ok=True)
            write_atomically(folder / CONFIG, config)

    def require_newest(self, checkpoints: Path) -> None:
        """Raise `ConfigError` where the folder `checkpoints` has one of this run that is newer than those of the copy."""
        newest, own = max(self._places(), default=""), run_id(self.config())
        for place in reversed(manifests.versions(manifests.complete(checkpoints))):
            if place.name > newest and manifests.body((place / MANIFEST).read_bytes()).get("run_id") == own:
                wanted = f"at most {newest or 'no checkpoint'}, the newest in {self.address}"
                fix = f"move {checkpoints} away, or copy {CONFIG} from there to continue from this checkpoint"
                raise ConfigError("the copy of this run stayed behind", found=str(place), wanted=wanted, fix=fix)

    def remove_others(self, checkpoints: Path) -> None:
        """Remove from the folder `checkpoints` those that the copy does not have, such as of an earlier download."""
        own = self._names("checkpoints") | {SEGMENTS}
        for place in checkpoints.iterdir() if checkpoints.is_dir() else ():
            if place.name not in own:
                DISK.remove_tree(place)

    def remove_later(self, checkpoints: Path) -> None:
        """Remove from the folder `checkpoints` those newer than the newest of the copy: the run went back behind them."""
        newest = max(self._places(), default="")
        for place in checkpoints.iterdir() if newest and checkpoints.is_dir() else ():
            if CHECKPOINT.fullmatch(place.name) and place.name > newest:
                DISK.remove_tree(place)

    def download(self, folder: Path, *, warn: Callable[[str], None], segments: bool = True) -> None:
        """Download the newest good checkpoint to `folder`, and then the results.

        `warn` is called for each checkpoint that is passed over, because it is damaged or incomplete. With `segments` False the
        replay memory is left out. Raises `ConfigError` where there is no run, `ResourceError` where all checkpoints are bad.
        """
        with reached(self.address):
            self.config()
            checkpoints = folder / "checkpoints"
            bad: list[str] = []
            for name in self._places():
                if problem := self.download_checkpoint(name, checkpoints, segments=segments):
                    bad.append(f"{name}: {problem}")
                    warn(f"checkpoint {name} of {self.address} is passed over: {problem}")
                    continue
                break
            else:
                if bad:
                    raise ResourceError(f"no good checkpoint in {self.address}", found="; ".join(bad), fix="start a new run")
            for name in self._names("checkpoints") - {SEGMENTS, *self._places()}:
                if problem := self.download_checkpoint(name, checkpoints, segments=False):
                    warn(f"checkpoint {name} of {self.address} is left out: {problem}")
        self.download_results(folder)

    def has_checkpoint(self, name: str) -> bool:
        """Return whether the copy has a checkpoint of this name."""
        return MANIFEST in self._names(f"checkpoints/{name}")

    def _is_complete(self, name: str) -> bool:
        """Return whether the copy has all files of a checkpoint, its segments too: these a rule of the bucket removes first."""
        if not self.has_checkpoint(name):
            return False
        there = self._sizes(f"checkpoints/{SEGMENTS}")
        manifest = self._fs.cat_file(self._path(f"checkpoints/{name}/{MANIFEST}"))
        return all(there.get(segment) == size for segment, size in manifests.segments(manifest).items())

    def download_checkpoint(self, name: str, checkpoints: Path, *, segments: bool) -> str:
        """Download a checkpoint, unless the same one is there; return its fault, or "" where it is good."""
        from common.runtime.checkpoint_files import BadCheckpointError, read  # noqa: PLC0415  imports torch

        place = checkpoints / name
        place.mkdir(parents=True, exist_ok=True)
        try:
            manifest = self._fs.cat_file(self._path(f"checkpoints/{name}/{MANIFEST}"))
            if not (place / MANIFEST).exists() or (place / MANIFEST).read_bytes() != manifest:
                (place / MANIFEST).unlink(missing_ok=True)
                self._fs.get_file(self._path(f"checkpoints/{name}/{TENSORS}"), str(place / TENSORS))
                for segment in manifests.segments(manifest) if segments else ():
                    self._download_segment(segment, checkpoints / SEGMENTS)
                (place / MANIFEST).write_bytes(manifest)
            read(place, segments=segments)
        except (FileNotFoundError, BadCheckpointError) as error:
            shutil.rmtree(place)
            return "a file is missing" if isinstance(error, FileNotFoundError) else str(error)
        return ""

    def _download_segment(self, name: str, folder: Path) -> None:
        """Download a segment; a name is given to one content, and a file that a lost connection cut short is replaced."""
        folder.mkdir(exist_ok=True)
        partial = folder / f"{PARTIAL}{name}"
        if not (folder / name).exists():
            self._fs.get_file(self._path(f"checkpoints/{SEGMENTS}/{name}"), str(partial))
            partial.rename(folder / name)

    # --- names ---

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _has(self, name: str) -> bool:
        """Return whether the copy has a file. Raises what reading it raises: fsspec's `exists` takes any error for an absence."""
        self._fs.invalidate_cache()
        try:
            self._fs.info(self._path(name))
        except FileNotFoundError:
            return False
        return True

    def _names(self, folder: str) -> set[str]:
        return set(self._sizes(folder))

    def _sizes(self, folder: str) -> dict[str, int]:
        """Return the bytes of all files, and 0 for folders, in a folder of the copy by their names."""
        path = self._path(folder)
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(path, detail=True)
        except FileNotFoundError:
            return {}
        sizes = {entry["name"].rstrip("/").rpartition("/")[2]: entry["size"] or 0 for entry in found}
        return {name: size for name, size in sizes.items() if NAME.fullmatch(name) and name != folder.rpartition("/")[2]}

    def _places(self) -> list[str]:
        """Return the names of the checkpoints in the copy, newest first."""
        return sorted(filter(CHECKPOINT.fullmatch, self._names("checkpoints")), reverse=True)


@contextmanager
def reached(address: str) -> Iterator[None]:
    """Raise `ResourceError` for whatever the file system of a bucket raises while inside."""
    try:
        yield
    except RookeryError:
        raise
    except Exception as error:
        found = f"{type(error).__name__}: {error} at {address}"
        fix = "check the address, the network, the credentials of the bucket, and the disk"
        raise ResourceError("the store cannot be used", found=found, fix=fix) from error


def run_id(config: bytes) -> object:
    """Return `run.id` of a config.yaml; None without one, or where it is damaged."""
    with suppress(ConfigError, UnicodeDecodeError, AttributeError):
        return (parse_yaml(config.decode(), source=CONFIG).get("run") or {}).get("id")
    return None


def _uploaded(directory: RunDirectory) -> str:
    """Return the hashes of the manifests that were uploaded from this directory."""
    with suppress(FileNotFoundError):
        return directory.uploaded.read_text(encoding="utf-8", errors="replace")
    return ""
