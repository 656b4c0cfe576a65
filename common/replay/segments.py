"""Parts of a replay memory for a checkpoint, which writes a part anew only when it has changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SEGMENT_BYTES = 4 << 20
"""About as much goes into one segment: enough for a disk to be fast, little enough to be written again when one row is new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of a memory. Within one process two segments of one `key` hold the same bytes."""

    key: str
    parts: Sequence[memoryview]
    """Its bytes, in the memory itself: reading copies nothing, and writing fills the memory."""

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of all parts."""
        return sum(part.nbytes for part in self.parts)
