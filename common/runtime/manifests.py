"""Manifests of checkpoints, read without torch. A damaged one has no values; `checkpoint_files` finds what is damaged in it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.runtime.run_directory import MANIFEST

CHECKPOINT = re.compile(r"checkpoint-\d+")
_SEGMENT = re.compile(r"[0-9a-f]+")


def body(manifest: bytes) -> dict[str, Any]:
    """Return the values of a manifest; none where it is damaged."""
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        values = json.loads(manifest)["manifest"]
        return values if isinstance(values, dict) else {}
    return {}


def digest(manifest: bytes) -> str:
    """Return the hash by which an upload is known."""
    return hashlib.sha256(manifest).hexdigest()


def segments(manifest: bytes) -> dict[str, int]:
    """Return the bytes of the segments that a manifest names; none where it is damaged. Names that are no hash are left out."""
    with suppress(ValueError, KeyError, TypeError):
        sizes = {str(segment["name"]): int(segment["bytes"]) for segment in body(manifest).get("segments") or ()}
        return {name: size for name, size in sizes.items() if _SEGMENT.fullmatch(name)}
    return {}


def saved_at(manifest: bytes) -> float:
    """Return the Unix time at which a checkpoint was saved; 0 where that is not known."""
    with suppress(ValueError, TypeError):
        return float(body(manifest).get("saved_unix_seconds", 0.0))
    return 0.0


def complete(checkpoints: Path) -> list[Path]:
    """Return the complete checkpoints in a folder; those that are being written have names that begin with a dot."""
    found = checkpoints.iterdir() if checkpoints.is_dir() else ()
    return [place for place in found if not place.name.startswith(".") and (place / MANIFEST).exists()]


def versions(places: Iterable[Path]) -> list[Path]:
    """Return the checkpoints of versions among all, which `best` is not, the oldest first."""
    return sorted(place for place in places if CHECKPOINT.fullmatch(place.name))
