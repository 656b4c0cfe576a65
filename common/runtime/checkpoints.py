"""Checkpoints: `checkpoint-<version>/` with `tensors.safetensors` and `manifest.json`. A checkpoint in place is complete.

It is built in a `.partial-` directory beside, fsynced, and renamed into place; what is to go is renamed out of place before
it is removed. So a kill at any moment leaves whole checkpoints, plus at most a `.partial-` that the next save sweeps away.
Whether one is good is decided by its own hashes when it is read. One process writes, any may read. The replay memory, where
checkpoints hold it, lies in files that they share (`segments`): those of a checkpoint are there before it is, and go after it.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError

from common.errors import ResourceError
from common.replay.segments import Segment
from common.runtime.disk import DISK, Disk
from common.runtime.segments import SegmentFile, SegmentFiles, damage
from common.runtime.state_tree import flatten, restore
from common.units import EnvSteps, Seconds, Version

TENSORS, MANIFEST = "tensors.safetensors", "manifest.json"
_NAME = re.compile(r"(checkpoint|\.replaced)-(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a run goes on from.

    `counters` and `state` nest dicts (text or int keys), lists and tuples of tensors and JSON scalars.
    """

    run_id: str
    version: Version
    env_steps: EnvSteps  # trained on
    architecture: str  # fingerprint of the network; a checkpoint of another one does not fit
    counters: Mapping[str, Any]
    state: Mapping[str, Any]
    replay: Mapping[str, Any] | None = None  # of the replay memory, but for its segments; None: not in this checkpoint
    segments: Sequence[Segment] = ()  # to be written
    files: Sequence[SegmentFile] = ()  # that were written, of one that was read


class _Manifest(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1] = 1
    run_id: str
    version: Version
    env_steps: EnvSteps
    architecture: str
    saved_unix_seconds: Seconds
    tensors_bytes: int
    tensors_sha256: str
    content: Any  # structure of {"counters", "state"} and, where it is there, "replay", see `state_tree`
    segments: list[SegmentFile] = []


class _BadCheckpointError(Exception):
    """Why one checkpoint cannot be used; `load_newest` turns to the next older."""


def save(
    folder: Path,
    checkpoint: Checkpoint,
    *,
    keep: int,
    segment_files: SegmentFiles | None = None,
    disk: Disk = DISK,
    clock: Callable[[], float] = time.time,
) -> Path:
    """Write `checkpoint` durably and return its directory; afterwards the `keep` newest up to its version remain.

    Later versions, from before a resume that could not use them, go. `segment_files` of the same folder know which segments are
    there from the last time. Raises `ResourceError`, with the older checkpoints untouched, where the disk refuses.
    """
    store = segment_files or SegmentFiles(folder)
    place = folder / f"checkpoint-{checkpoint.version:012d}"
    partial = folder / f".partial-{place.name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder, disk)
        files = store.write(checkpoint.segments, disk) if checkpoint.segments else []
        manifest, data = _described(checkpoint, files, clock())
        partial.mkdir()
        for name, content in ((TENSORS, data), (MANIFEST, _sealed(manifest))):
            disk.write(partial / name, content)
            disk.fsync(partial / name)
        disk.fsync(partial)
        _put(partial, place, disk)
        disk.fsync(folder)
        _prune(folder, newest=checkpoint.version, keep=keep, disk=disk)
        store.remove_others(_named(folder), disk)
    except OSError as error:
        with suppress(OSError):
            _sweep(folder, DISK)
            store.remove_others(_named(folder))
        raise ResourceError(
            "checkpoint save did not finish",
            found=f"{error.strerror} at {place}",
            fix="free or unlock the disk; older ones are intact",
        ) from error
    return place


def load_newest(
    folder: Path,
    *,
    architecture: str,
    warn: Callable[[str], None],
    take: Callable[[Checkpoint], object] = lambda _: None,
) -> Checkpoint | None:
    """The newest good checkpoint; None where there is none at all. Each bad one that is passed over costs a `warn`.

    One is bad, too, where `take`, which goes on from it, fails at what it holds.

    Raises `ResourceError` where all are bad, and where the newest good one is of another architecture.
    """
    tried = []
    for place in _places(folder):
        try:
            checkpoint = _read(place)
        except _BadCheckpointError as error:
            tried.append(f"{place.name}: {error}")
            warn(f"checkpoint {place} is passed over: {error}")
            continue
        if checkpoint.architecture != architecture:
            raise ResourceError(
                f"checkpoint {place} is of another architecture",
                found=checkpoint.architecture,
                wanted=architecture,
                fix="resume with the settings of env, model and algorithm of that run, or start a new run",
            )
        try:
            take(checkpoint)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:  # torch: RuntimeError
            tried.append(f"{place.name}: {error!r}")
            warn(f"checkpoint {place} is passed over: content does not fit the run: {error!r}")
            continue
        return checkpoint
    if tried:
        raise ResourceError(f"no good checkpoint in {folder}", found="; ".join(tried), fix="start a new run, or restore a copy")
    return None


def _described(checkpoint: Checkpoint, files: list[SegmentFile], now: Seconds) -> tuple[_Manifest, bytes]:
    """Return the manifest, and the content of the tensors' file."""
    content = {"counters": checkpoint.counters, "state": checkpoint.state}
    structure, tensors = flatten(content if checkpoint.replay is None else content | {"replay": checkpoint.replay})
    data = safetensors.torch.save(tensors)
    manifest = _Manifest(
        run_id=checkpoint.run_id,
        version=checkpoint.version,
        env_steps=checkpoint.env_steps,
        architecture=checkpoint.architecture,
        saved_unix_seconds=float(now),
        tensors_bytes=len(data),
        tensors_sha256=hashlib.sha256(data).hexdigest(),
        content=structure,
        segments=files,
    )
    return manifest, data


def _named(folder: Path) -> set[str]:
    """Return the segments that any checkpoint names; a checkpoint with a damaged manifest cannot be used, and names none."""
    names: set[str] = set()
    for place in _places(folder):
        with suppress(OSError, _BadCheckpointError):
            names.update(file.name for file in _unsealed((place / MANIFEST).read_bytes()).segments)
    return names


def _read(place: Path) -> Checkpoint:
    try:
        sealed, data = (place / MANIFEST).read_bytes(), (place / TENSORS).read_bytes()
    except OSError as error:
        raise _BadCheckpointError(f"{Path(error.filename).name}: {error.strerror}") from error
    manifest = _unsealed(sealed)
    if len(data) != manifest.tensors_bytes:
        raise _BadCheckpointError(f"{TENSORS} has {len(data)} bytes, wanted {manifest.tensors_bytes}")
    found = hashlib.sha256(data).hexdigest()
    if found != manifest.tensors_sha256:
        raise _BadCheckpointError(f"{TENSORS} has hash {found[:16]}, wanted {manifest.tensors_sha256[:16]}")
    if bad := next(filter(None, (damage(place.parent, file) for file in manifest.segments)), ""):
        raise _BadCheckpointError(bad)
    try:
        content = restore(manifest.content, safetensors.torch.load(data))
        return Checkpoint(
            run_id=manifest.run_id,
            version=manifest.version,
            env_steps=manifest.env_steps,
            architecture=manifest.architecture,
            counters=content["counters"],
            state=content["state"],
            replay=content.get("replay"),
            files=tuple(manifest.segments),
        )
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise _BadCheckpointError(f"content does not fit together: {error!r}") from error


def _sealed(manifest: _Manifest) -> bytes:
    """The manifest beside a hash of itself. There is one way to write it, so that a reader can ask for these very bytes."""
    body = manifest.model_dump()
    if not manifest.segments:  # as before there were any
        del body["segments"]
    digest = hashlib.sha256(json.dumps(body, allow_nan=False).encode()).hexdigest()
    return json.dumps({"sha256": digest, "manifest": body}, indent=1, allow_nan=False).encode()


def _unsealed(sealed: bytes) -> _Manifest:
    try:
        document = json.loads(sealed)
        manifest = _Manifest.model_validate(document["manifest"])
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise _BadCheckpointError(
            f"{MANIFEST} {'.'.join(map(str, first['loc']))}: found {first['input']!r}, {first['msg']}"
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _BadCheckpointError(f"{MANIFEST} is no manifest: {error!r}") from error
    if _sealed(manifest) != sealed:  # whatever was changed, be it a blank
        raise _BadCheckpointError(f"{MANIFEST} does not have its hash {document.get('sha256')}")
    return manifest


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
    aside = place.with_name(place.name.replace("checkpoint", ".replaced"))
    disk.rename(place, aside)
    disk.rename(partial, place)
    disk.fsync(place.parent)
    _discard(aside, disk)


def _discard(place: Path, disk: Disk) -> None:
    gone = place.with_name(f".partial-gone-{place.name.lstrip('.')}")
    disk.rename(place, gone)
    disk.remove_tree(gone)


def _prune(folder: Path, *, newest: Version, keep: int, disk: Disk) -> None:
    places = [path for path in _places(folder) if path.name.startswith("checkpoint")]
    kept = [path for path in places if int(path.name.partition("-")[2]) <= newest][:keep]
    for path in places:
        if path not in kept:
            _discard(path, disk)


def _sweep(folder: Path, disk: Disk) -> None:
    """Clear what a killed or failed save left: parts go, a checkpoint that stepped aside for nothing comes back."""
    for path in _listed(folder):
        if path.name.startswith(".partial-"):
            disk.remove_tree(path)
        elif path.name.startswith(".replaced-"):
            place = path.with_name(path.name.replace(".replaced", "checkpoint"))
            if place.exists():
                _discard(path, disk)
            else:
                disk.rename(path, place)
