"""Type aliases for quantities that are easily confused, each with one unit everywhere.

They document a signature and cost nothing at run time. `AtLeast` is the smallest value that is accepted from the wire.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias


@dataclass(frozen=True, slots=True)
class AtLeast:
    """The smallest value of a number that comes from outside."""

    least: float


Count: TypeAlias = Annotated[int, AtLeast(0)]
"""A number of things from 0, or the index of one."""

EnvSteps: TypeAlias = Annotated[int, AtLeast(0)]
"""Agent steps: one action chosen, `frame_skip` emulator frames played. A reset row is not a step."""

Version: TypeAlias = Annotated[int, AtLeast(0)]
"""Count of the learner's published policies; 0 is the initial one."""

Sequence: TypeAlias = Annotated[int, AtLeast(0)]
"""Number of an experience message within one incarnation of an actor, from 0."""

Seconds: TypeAlias = Annotated[float, AtLeast(0)]
"""A duration, or a reading of a monotonic clock."""

KIB = 1024
MIB = 1024 * KIB


def significant(value: float) -> float:
    """Return a mean return as files and logs have it: seven significant digits, as many as float32 has."""
    return float(f"{value:.7g}")
