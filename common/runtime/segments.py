"""Files of the segments of a replay memory: `segments/` beside the checkpoints, each written once and never changed.

A file goes by the hash of its content. Checkpoints name those that belong to them, and share what has not changed between them; a
file that no checkpoint names is removed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from common.errors import ResourceError
from common.replay.segments import Segment
from common.runtime.disk import DISK, Disk
from common.units import MIB

FOLDER = "segments"


class SegmentFile(BaseModel):
    """One file of a segment, as a manifest names it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    bytes: int
    sha256: str


class SegmentFiles:
    """Writes the segments that changed since the last checkpoint. One process writes."""

    def __init__(self, checkpoints: Path) -> None:
        """Begin without a known file on the disk."""
        self._folder = checkpoints / FOLDER
        self._known: dict[str, SegmentFile] = {}  # of segments by their keys

    def write(self, segments: Sequence[Segment], disk: Disk = DISK) -> list[SegmentFile]:
        """Write a durable file for each segment that has none; existing files stay as they are. Raises `OSError`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        known = {segment.key: self._found(segment.key) or self._write(segment, disk) for segment in segments}
        disk.fsync(self._folder)
        self._known = known
        return list(known.values())

    def read(self, files: Sequence[SegmentFile], segments: Sequence[Segment]) -> None:
        """Fill `segments` from the files of a checkpoint, whose hashes were checked. Raises `ResourceError`."""
        sizes = [file.bytes for file in files], [segment.nbytes for segment in segments]
        try:
            if sizes[0] != sizes[1]:
                raise ResourceError(
                    "segments of the replay memory", found=f"{sum(sizes[0])} bytes", wanted=f"{sum(sizes[1])} bytes"
                )
            for file, segment in zip(files, segments, strict=True):
                with (self._folder / file.name).open("rb") as source:
                    for part in segment.parts:
                        source.readinto(part)
        except OSError as error:
            raise ResourceError("segments of the replay memory", found=f"{error.strerror} at {error.filename}") from error
        self._known = {segment.key: file for segment, file in zip(segments, files, strict=True)}

    def _found(self, key: str) -> SegmentFile | None:
        file = self._known.get(key)
        return file if file is not None and (self._folder / file.name).exists() else None

    def _write(self, segment: Segment, disk: Disk) -> SegmentFile:
        digest = hashlib.sha256()
        for part in segment.parts:
            digest.update(part)
        name = digest.hexdigest()[:32]
        partial = self._folder / f".partial-{name}"
        disk.write(partial, *segment.parts)
        disk.fsync(partial)
        disk.rename(partial, self._folder / name)
        return SegmentFile(name=name, bytes=segment.nbytes, sha256=digest.hexdigest())

    def remove_others(self, named: Iterable[str], disk: Disk = DISK) -> None:
        """Remove every file that is not `named`. Raises `OSError`."""
        if not self._folder.is_dir():
            return
        kept = set(named)
        self._known = {key: file for key, file in self._known.items() if file.name in kept}
        for path in list(self._folder.iterdir()):
            if path.name not in kept:
                disk.remove_tree(path)


def damage(checkpoints: Path, file: SegmentFile) -> str:
    """Return why a file is damaged; "" where its content is the one that was written."""
    digest, size = hashlib.sha256(), 0
    try:
        with (checkpoints / FOLDER / file.name).open("rb") as source:
            while chunk := source.read(MIB):
                digest.update(chunk)
                size += len(chunk)
    except OSError as error:
        return f"segment {file.name}: {error.strerror}"
    if size != file.bytes:
        return f"segment {file.name} has {size} bytes, wanted {file.bytes}"
    if digest.hexdigest() != file.sha256:
        return f"segment {file.name} has hash {digest.hexdigest()[:16]}, wanted {file.sha256[:16]}"
    return ""
