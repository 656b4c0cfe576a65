"""Two parts of a computation on two cores.

For arithmetic made of many small matrix products: sharing each of them among cores costs more in meetings than it saves. What a
part computes must not depend on the other, nor draw from a generator that both share: then the result is the same, to the bit,
whichever is done first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Part = TypeVar("Part")
Result = TypeVar("Result")


class SideBySide:
    """Calls a function for one part in the caller's thread and for another in a thread of its own."""

    def __init__(self) -> None:
        """The thread starts when it is first needed and ends with this object; torch shares its work as it does the caller's."""
        # torch keeps its number of threads by thread: a fresh one would take all cores.
        self._second = ThreadPoolExecutor(1, "second-part", initializer=_as_the_caller)

    def __call__(self, function: Callable[[Part], Result], parts: Sequence[Part]) -> list[Result]:
        """The results for one or two `parts`, when all are there; what either raises."""
        second = [self._second.submit(function, part) for part in parts[1:]]
        try:
            first = function(parts[0])
        finally:
            failures = [future.exception() for future in second]  # never leave it running
        for failure in filter(None, failures):
            raise failure
        return [first, *(future.result() for future in second)]


def in_turn(function: Callable[[Part], Result], parts: Sequence[Part]) -> list[Result]:
    """As `SideBySide`, one after the other."""
    return [function(part) for part in parts]


def _as_the_caller() -> None:
    torch.set_num_threads(torch.get_num_threads())
