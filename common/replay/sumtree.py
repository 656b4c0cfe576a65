"""A tree of sums: draws a leaf with the probability of its value, for many leaves at once.

A binary tree in one array, as in Schaul et al. 2016 (arXiv:1511.05952, appendix B.2.1): node i has children 2i and 2i+1,
node 1 is the total, the leaves stand at the end.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from common.errors import InternalError

_TOP_LEVELS = 11  # from the root, passed in one search: sums of 2,048 nodes take as long to add up as three levels to descend


class SumTree:
    """Values >= 0 of leaves 0..size-1, all 0 at first; float64."""

    def __init__(self, size: int) -> None:
        self._levels = max(1, (size - 1).bit_length())
        self._leaves = 1 << self._levels
        self._sums = np.zeros(2 * self._leaves)

    @staticmethod
    def bytes_for(size: int) -> int:
        """What a tree of `size` leaves takes."""
        return 16 << max(1, (size - 1).bit_length())

    @property
    def total(self) -> float:
        """Sum of all values."""
        return float(self._sums[1])

    def get(self, leaves: NDArray[np.int64]) -> NDArray[np.float64]:
        """Values of leaves, any shape."""
        return self._sums[leaves + self._leaves]

    def set(self, leaves: NDArray[np.int64], values: NDArray[np.float64] | float) -> None:
        """Give leaves [K] their values [K]; of a leaf named twice the last value stays.

        The sums above are made anew, not adjusted, so that rounding does not add up over time.
        """
        nodes = leaves + self._leaves
        self._sums[nodes] = values
        for _ in range(self._levels):
            nodes = nodes >> 1
            self._sums[nodes] = self._sums[2 * nodes] + self._sums[2 * nodes + 1]

    def draw(self, number: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """`number` leaves, one from each of as many equal shares of the total (stratified), each with its probability.

        Raises `InternalError` where the total is 0 or not finite. Leaves of value 0 are never drawn.
        """
        if not 0 < self.total < np.inf:
            raise InternalError("a draw from a sum tree", found=f"total {self.total}", wanted="a finite number above 0")
        drawn = self._find((np.arange(number) + rng.random(number)) * (self.total / number))
        while (missed := np.flatnonzero(self.get(drawn) == 0)).size:  # rounding, once in 1e15, points past a leaf
            drawn[missed] = self._find(rng.random(missed.size) * self.total)
        return drawn

    def _find(self, mass: NDArray[np.float64]) -> NDArray[np.int64]:
        """The leaf at which the running sum of the values first exceeds `mass` [K], which is used up."""
        top = min(_TOP_LEVELS, self._levels)
        until = np.zeros((1 << top) + 1)  # sum of the nodes before each of this level
        np.cumsum(self._sums[1 << top : 2 << top], out=until[1:])
        nodes = np.minimum(until[1:].searchsorted(mass, side="right"), (1 << top) - 1)
        mass -= until[nodes]
        nodes += 1 << top
        for _ in range(self._levels - top):
            nodes += nodes
            left = self._sums.take(nodes)
            right = mass >= left
            left *= right
            mass -= left
            nodes += right
        return nodes - self._leaves
