"""Two halves of a computation on two cores.

For arithmetic made of many small matrix products: sharing each of them among cores costs more in meetings than it saves. What a
half computes must not depend on the other, so the result is the same, to the bit, whichever is done first.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class SideBySide:
    """Calls a function for half 0 in the caller's thread and for half 1 in a thread of its own."""

    def __init__(self) -> None:
        """The thread starts when it is first needed and ends with this object; torch shares its work as it does the caller's."""
        # torch keeps its number of threads by thread: a fresh one would take all cores.
        self._second = ThreadPoolExecutor(1, "second-half", initializer=_as_the_caller)

    def __call__(self, half: Callable[[int], T]) -> tuple[T, T]:
        """Both results, when both are there; what either raises."""
        second = self._second.submit(half, 1)
        try:
            first = half(0)
        finally:
            failure = second.exception()  # never leave it running
        if failure is not None:
            raise failure
        return first, second.result()


def _as_the_caller() -> None:
    torch.set_num_threads(torch.get_num_threads())
