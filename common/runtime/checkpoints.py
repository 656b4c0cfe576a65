"""Checkpoints of a run: `checkpoint-<version>/` and `best/`, written durably and atomically. A checkpoint in place is complete.

It is built in a `.partial-` directory beside, fsynced, and renamed into place; one that is to be removed is renamed out of place
first. A kill at any moment leaves whole checkpoints, plus at most files that the next save removes. The hashes in a checkpoint
decide whether it is good when it is read. The segments of a replay memory are there before the checkpoint that names them, and
are removed after it. One process writes, any may read.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from common.config.layers import differences
from common.errors import ResourceError
from common.runtime.checkpoint_files import BadCheckpointError, Checkpoint, SegmentFile, SegmentFiles, encode, read, segment_names
from common.runtime.disk import DISK, PARTIAL, Disk
from common.units import Version

T = TypeVar("T")

BEST: Final = "best"
"""Name of the directory of the best policy, beside the other checkpoints."""

STATE_SETTINGS: Final = "settings"
"""Key in `Checkpoint.counters` of the settings that decide which state fits the run."""

_NAME = re.compile(r"(checkpoint|\.replaced)-(\d+)")


class CheckpointStore:
    """Folder of the checkpoints of one run, of which it keeps the `keep` newest.

    `check`, called before anything there is changed, raises `ResourceError` where the folder is no longer this run's.
    """

    def __init__(self, folder: Path, *, keep: int, disk: Disk = DISK, check: Callable[[], object] = lambda: None) -> None:
        self.folder, self.keep, self.disk, self.check = folder, keep, disk, check
        self.segment_files = SegmentFiles(folder)

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write `checkpoint` durably and return its directory; afterwards the newest up to its version remain.

        Later versions, from before a resume that could not use them, are removed. Raises `ResourceError`, with the older
        checkpoints untouched, where the disk refuses.
        """
        place = self.folder / f"checkpoint-{checkpoint.version:012d}"
        with self._saving(place):
            files = self.segment_files.write(checkpoint.segments, self.disk) if checkpoint.segments else []
            self._write(checkpoint, files, place)
            _prune(self.folder, newest=checkpoint.version, keep=self.keep, disk=self.disk)
            self.segment_files.remove_others(_named_segments(self.folder), self.disk)
        return place

    def newest(self) -> Version:
        """Return the newest version that is there, whole or not; -1 without one. Raises `ResourceError`."""
        self.check()  # ranks ask for it before any of them writes
        try:
            return max(by_version(self.folder), default=-1)
        except OSError as error:  # no descriptor is left, or the disk is gone
            raise ResourceError("checkpoints cannot be listed", found=f"{error.strerror} at {self.folder}") from error

    def remove_later(self, version: Version) -> None:
        """Remove the checkpoints of versions later than this one. Raises `ResourceError` where the disk refuses."""
        with self._saving(self.folder):
            _prune(self.folder, newest=version, keep=self.keep, disk=self.disk)

    def save_best(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint of a policy durably in place of `best/`, and return that directory; no other save removes it.

        Raises `ResourceError`, with the older one untouched, where the disk refuses.
        """
        place = self.folder / BEST
        with self._saving(place):
            self._write(checkpoint, (), place)
        return place

    @contextmanager
    def _saving(self, place: Path) -> Iterator[None]:
        """Remove the remains of an earlier save, and, where this one fails, its own; then raise `ResourceError`."""
        self.check()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _sweep(self.folder, self.disk)
            yield
        except OSError as error:
            with suppress(OSError):
                _sweep(self.folder, DISK)
                self.segment_files.remove_others(_named_segments(self.folder))
            raise ResourceError(
                "checkpoint save did not finish",
                found=f"{error.strerror} at {place}",
                fix="free or unlock the disk; older ones are intact",
            ) from error

    def _write(self, checkpoint: Checkpoint, files: Sequence[SegmentFile], place: Path) -> None:
        partial, disk = self.folder / f"{PARTIAL}{place.name}", self.disk
        content = encode(checkpoint, list(files), time.time())
        partial.mkdir()
        for name, data in content.items():
            disk.write(partial / name, data)
            disk.fsync(partial / name)
        disk.fsync(partial)
        _put(partial, place, disk)
        disk.fsync(self.folder)

    def load_best(self, *, warn: Callable[[str], None]) -> Checkpoint | None:
        """Return the checkpoint in `best/`; None without a good one. `warn` is called for a bad one."""
        for place in best_places(self.folder):
            try:
                return read(place)
            except BadCheckpointError as error:
                warn(f"checkpoint {place} is passed over: {error}")
        return None

    def newest_good(self, most: Version | None, *, fits: Callable[[Checkpoint], bool]) -> Version:
        """Return the newest version, at most `most`, whose checkpoint is whole; -1 where none is.

        Also where that one, or a newer one, does not fit: an older one would take training back behind it.
        """
        for version, place in by_version(self.folder).items():
            with suppress(BadCheckpointError):
                if not fits(read(place)):
                    return -1
                if most is None or version <= most:
                    return version
        return -1

    def load_newest(
        self,
        *,
        architecture: str,
        state_settings: Mapping[str, Any] = {},
        warn: Callable[[str], None],
        restore: Callable[[Checkpoint], T],
        most: Version | None = None,
    ) -> T | None:
        """Return what `restore` makes of the newest good checkpoint, of a version of at most `most`; None where there is none.

        `warn` is called for each bad one that is passed over: it is damaged, or `restore` fails at its content.

        Raises `ResourceError` where all are bad, where the newest good one is of another architecture, and where the disk lets
        one not be read: the next save would remove it if an older one took its place. With the run's `state_settings` the error
        names those that differ.
        """
        tried = []
        for place in _places(self.folder):
            if most is not None and int(place.name.rpartition("-")[2]) > most:
                continue
            try:
                checkpoint = read(place)
            except BadCheckpointError as error:
                tried.append(f"{place.name}: {error}")
                warn(f"checkpoint {place} is passed over: {error}")
                continue
            fix = "resume with the settings of env, model and algorithm of that run, or start a new run"
            require_architecture(checkpoint, place, architecture, state_settings, fix=fix)
            try:
                return restore(checkpoint)
            except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:  # torch: RuntimeError
                tried.append(f"{place.name}: {error!r}")
                warn(f"checkpoint {place} is passed over: content does not fit the run: {error!r}")
        if tried:
            raise ResourceError(
                f"no good checkpoint in {self.folder}", found="; ".join(tried), fix="start a new run, or restore a copy"
            )
        return None


def differing(checkpoint: Checkpoint, state_settings: Mapping[str, Any]) -> tuple[str, str]:
    """Return the settings of a checkpoint, and those of a run, in which they differ; "" where a checkpoint has none."""
    saved = checkpoint.counters.get(STATE_SETTINGS)
    return differences(saved, state_settings) if saved and state_settings else ("", "")


def require_architecture(
    checkpoint: Checkpoint, place: Path, architecture: str, state_settings: Mapping[str, Any], *, fix: str
) -> None:
    """Raise `ResourceError` where the checkpoint at `place` is of another architecture; it names the settings that differ."""
    if checkpoint.architecture != architecture:
        found, wanted = differing(checkpoint, state_settings)
        fact = f"checkpoint {place} is of another architecture"
        raise ResourceError(fact, found=found or checkpoint.architecture, wanted=wanted or architecture, fix=fix)


def best_places(folder: Path) -> list[Path]:
    """Return where the best checkpoint is: in `best/`, or beside it while it is just being replaced; none where there is none."""
    return [place for place in (folder / BEST, _aside(folder / BEST)) if place.is_dir()]


def by_version(folder: Path) -> dict[Version, Path]:
    """Return the complete checkpoints in `folder` by their versions, the newest first."""
    found: dict[Version, Path] = {}
    for path in _places(folder):
        found.setdefault(int(path.name.partition("-")[2]), path)
    return found


def _named_segments(folder: Path) -> set[str]:
    """Return the segments that any checkpoint names; a checkpoint with a damaged manifest cannot be used, and names none.

    Raises `OSError` where a manifest cannot be read: its segments must stay.
    """
    names: set[str] = set()
    for place in _places(folder):
        with suppress(FileNotFoundError, NotADirectoryError, BadCheckpointError):
            names |= segment_names(place)
    return names


def _places(folder: Path) -> list[Path]:
    """Complete checkpoints, newest version first; one that is just being replaced comes after its replacement."""
    found = [(int(match[2]), match[1] == "checkpoint", path) for path in _listed(folder) if (match := _NAME.fullmatch(path.name))]
    return [path for _, _, path in sorted(found, reverse=True)]


def _listed(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _put(partial: Path, place: Path, disk: Disk) -> None:
    """Rename into place; a checkpoint of the same version steps aside, where a reader still finds it, and then goes."""
    if not place.exists():
        disk.rename(partial, place)
        return
    aside = _aside(place)
    disk.rename(place, aside)
    disk.rename(partial, place)
    disk.fsync(place.parent)
    _discard(aside, disk)


def _aside(place: Path) -> Path:
    """Return where a checkpoint is while another one takes its place."""
    return place.with_name(f".replaced-{place.name.removeprefix('checkpoint-')}")


def _discard(place: Path, disk: Disk) -> None:
    gone = place.with_name(f"{PARTIAL}gone-{place.name.lstrip('.')}")
    disk.rename(place, gone)
    disk.remove_tree(gone)


def _prune(folder: Path, *, newest: Version, keep: int, disk: Disk) -> None:
    places = [path for path in _places(folder) if path.name.startswith("checkpoint")]
    kept = [path for path in places if int(path.name.partition("-")[2]) <= newest][:keep]
    for path in places:
        if path not in kept:
            _discard(path, disk)


def _sweep(folder: Path, disk: Disk) -> None:
    """Remove the parts that a killed or failed save left, and restore a checkpoint that was moved aside in vain."""
    for path in _listed(folder):
        if path.name.startswith(PARTIAL):
            disk.remove_tree(path)
        elif path.name.startswith(".replaced-"):
            name = path.name.removeprefix(".replaced-")
            place = path.with_name(BEST if name == BEST else f"checkpoint-{name}")
            if place.exists():
                _discard(path, disk)
            else:
                disk.rename(path, place)
