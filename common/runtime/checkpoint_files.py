"""Files of a checkpoint: their content, their hashes, and how they are read back and verified. `checkpoints` has their order.

A checkpoint is a directory with `tensors.safetensors` and `manifest.json`. Where checkpoints hold the replay memory, its segments
lie beside them in `segments/`: each file is written once, is named by the hash of its content, and is shared by all checkpoints
with its name in their manifest.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import numpy as np
import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError

from common.errors import InternalError, ResourceError
from common.protocol.plain import restored
from common.replay.blocks import Segment
from common.runtime.disk import DISK, PARTIAL, Disk
from common.runtime.run_directory import MANIFEST, SEGMENTS, TENSORS
from common.units import EnvSteps, Seconds, Version

T = TypeVar("T")

READ_TRIALS: Final = 5
READ_AGAIN: Final[Seconds] = 0.2  # after a read that the disk refused

POLICY: Final = "policy"
"""Key of a state that holds a policy alone: its parameters as a snapshot carries them, [P] float32 or bfloat16."""


class SegmentFile(BaseModel):
    """One file of a segment, as a manifest names it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The state from which a run continues.

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
    content: Any  # structure of {"counters", "state"} and, where it is there, "replay", see `flatten_state`
    segments: list[SegmentFile] = []


class BadCheckpointError(Exception):
    """Reason why one checkpoint cannot be used."""


# --- write ---


def encode(checkpoint: Checkpoint, files: list[SegmentFile], now: Seconds) -> dict[str, bytes]:
    """Return the content of the files in a checkpoint's directory by name, in the order in which they are written."""
    content = {"counters": checkpoint.counters, "state": checkpoint.state}
    structure, tensors = flatten_state(content if checkpoint.replay is None else content | {"replay": checkpoint.replay})
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
    return {TENSORS: data, MANIFEST: _sealed(manifest)}


def _sealed(manifest: _Manifest) -> bytes:
    """Return the manifest beside a hash of itself. It has one form of bytes, so that a reader can compare with these."""
    body = manifest.model_dump()
    if not manifest.segments:  # as before there were any
        del body["segments"]
    digest = hashlib.sha256(json.dumps(body, allow_nan=False).encode()).hexdigest()
    return json.dumps({"sha256": digest, "manifest": body}, indent=1, allow_nan=False).encode()


# --- read ---


def read(folder: Path, *, segments: bool = True) -> Checkpoint:
    """Return the checkpoint in the directory `folder`. Raises `BadCheckpointError` where a file is damaged or missing.

    Raises `ResourceError` where the disk refuses a file again and again, which says nothing about the content. With `segments`
    False the files of the replay memory are not verified: a policy alone does not need them.
    """
    sealed, data = (_repeated((folder / name).read_bytes, folder / name) for name in (MANIFEST, TENSORS))
    manifest = _unsealed(sealed)
    if len(data) != manifest.tensors_bytes:
        raise BadCheckpointError(f"{TENSORS} has {len(data)} bytes, wanted {manifest.tensors_bytes}")
    found = hashlib.sha256(data).hexdigest()
    if found != manifest.tensors_sha256:
        raise BadCheckpointError(f"{TENSORS} has hash {found[:16]}, wanted {manifest.tensors_sha256[:16]}")
    for file in manifest.segments if segments else ():
        _verify(folder.parent / SEGMENTS / file.name, file)
    try:
        content = restore_state(manifest.content, safetensors.torch.load(data))
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
        raise BadCheckpointError(f"content does not fit together: {error!r}") from error


def segment_names(folder: Path) -> set[str]:
    """Return the segment files that the checkpoint in `folder` names. Raises `OSError` or `BadCheckpointError`."""
    return {file.name for file in _unsealed((folder / MANIFEST).read_bytes()).segments}


def _unsealed(sealed: bytes) -> _Manifest:
    try:
        document = json.loads(sealed)
        manifest = _Manifest.model_validate(document["manifest"])
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise BadCheckpointError(
            f"{MANIFEST} {'.'.join(map(str, first['loc']))}: found {first['input']!r}, {first['msg']}"
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadCheckpointError(f"{MANIFEST} is no manifest: {error!r}") from error
    if _sealed(manifest) != sealed:  # whatever was changed, be it a blank
        raise BadCheckpointError(f"{MANIFEST} does not have its hash {document.get('sha256')}")
    return manifest


def _verify(path: Path, file: SegmentFile) -> None:
    """Raise `BadCheckpointError` unless the content of a segment is the one that was written."""

    def hashed() -> tuple[str, int]:
        with path.open("rb") as source:
            return hashlib.file_digest(source, "sha256").hexdigest(), source.tell()

    try:
        digest, size = _repeated(hashed, path)
    except BadCheckpointError as error:
        raise BadCheckpointError(f"segment {error}") from error
    if size != file.bytes:
        raise BadCheckpointError(f"segment {file.name} has {size} bytes, wanted {file.bytes}")
    if digest != file.sha256:
        raise BadCheckpointError(f"segment {file.name} has hash {digest[:16]}, wanted {file.sha256[:16]}")


def _repeated(read_file: Callable[[], T], path: Path) -> T:
    """Return what `read_file` returns of the file `path`, and repeat it where the disk refuses for a moment."""
    for trial in range(READ_TRIALS):
        try:
            return read_file()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise BadCheckpointError(f"{path.name}: {error.strerror}") from error
        except OSError as error:
            refused = error
            time.sleep(READ_AGAIN if trial < READ_TRIALS - 1 else 0.0)
    raise ResourceError(
        "a checkpoint cannot be read",
        found=f"{refused.strerror} at {path}, {READ_TRIALS} times",
        wanted="a disk that answers",
        fix="check the disk, then start again: all checkpoints are still there",
    ) from refused


# --- segments of a replay memory ---


class SegmentFiles:
    """Writes the segments that changed since the last checkpoint. One process writes."""

    def __init__(self, checkpoints: Path) -> None:
        self._folder = checkpoints / SEGMENTS
        self._known: dict[str, SegmentFile] = {}  # of segments by their keys

    def write(self, segments: Sequence[Segment], disk: Disk = DISK) -> list[SegmentFile]:
        """Write a durable file for each segment that has none; existing files stay as they are. Raises `OSError`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        known = {segment.key: self._found(segment.key) or self._write(segment, disk) for segment in segments}
        disk.fsync(self._folder)
        self._known = known
        return list(known.values())

    def read(self, files: Sequence[SegmentFile], segments: Sequence[Segment]) -> None:
        """Fill `segments` from the files of a checkpoint that `read` verified. Raises `ResourceError`."""
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
        partial = self._folder / f"{PARTIAL}{name}"
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


# --- nested state ---


def flatten_state(state: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the structure (JSON) of nested training state, and its tensors by dotted name: on the CPU, contiguous, copied.

    In the structure every container is a one-key object that names its kind, so that `{0: ...}`, `{"0": ...}`, lists and tuples
    are restored as such; a tensor or a numpy array stands as its name. Raises `InternalError` for a value of another kind.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _packed(state, "", tensors), tensors


def _packed(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    match value:
        case torch.Tensor():
            while name in tensors:  # {"a.b": ...} beside {"a": {"b": ...}}: names are for people, they need not parse
                name += "+"
            tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
            return {"tensor": name}
        case np.ndarray():
            return {"array": _packed(torch.from_numpy(np.array(value)), name, tensors)["tensor"]}
        case Mapping():
            if wrong := [key for key in value if type(key) not in (str, int)]:
                raise InternalError(f"state key under {name!r}", found=wrong[0], wanted="text or int")
            return {"mapping": [[key, _packed(item, _under(name, key), tensors)] for key, item in value.items()]}
        case list() | tuple():
            items = [_packed(item, _under(name, index), tensors) for index, item in enumerate(value)]
            return {"list" if isinstance(value, list) else "tuple": items}
        case float() if not math.isfinite(value):
            return {"float": str(value)}
    if value is not None and type(value) not in (bool, int, float, str):
        raise InternalError(f"state at {name!r} cannot be saved", found=type(value).__name__, wanted="tensor or JSON scalar")
    return value


def restore_state(structure: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the state that `flatten_state` took apart, bit for bit.

    Raises `KeyError`, `TypeError` or `ValueError` on a structure that `flatten_state` does not make.
    """
    return restored(structure, {"tensor": tensors.__getitem__, "array": lambda name: tensors[name].numpy(), "float": float})


def _under(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)
