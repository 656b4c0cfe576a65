"""A computation in parts that meet: what one part wrote into tensors before they meet, the others read after it.

For arithmetic made of many small matrix products. Sharing each of them among cores costs more in meetings than it saves, and two
threads of one interpreter wait for each other between all of them; parts that meet a few times a step may be in processes of
their own. They have tensors in common and nothing else, so that the result is the same, to the bit, wherever they are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias


class Part(Protocol):
    """One part. It can be pickled, and then takes along no more than its tensors and settings."""

    def run(self) -> Iterator[None]:
        """Compute once. Each `yield` is a meeting; all parts have the same number of them."""


RunParts: TypeAlias = Callable[[Sequence[Part]], None]
"""Computes all parts once."""


def in_turn(parts: Sequence[Part]) -> None:
    """One after the other, from meeting to meeting."""
    for _ in zip(*(part.run() for part in parts), strict=True):
        pass
