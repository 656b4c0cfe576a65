"""Names for the quantities that are easily confused: one unit for each, everywhere.

They are plain aliases: they document a signature and cost nothing at run time.
"""

from __future__ import annotations

from typing import TypeAlias

EnvSteps: TypeAlias = int
"""Agent steps: one action chosen, `frame_skip` emulator frames played. A reset row is not a step."""

Version: TypeAlias = int
"""Count of the learner's published policies; 0 is the initial one."""

Sequence: TypeAlias = int
"""Number of an experience message within one incarnation of an actor, from 0."""

Seconds: TypeAlias = float
"""A duration, or a reading of a monotonic clock."""

KIB = 1024
MIB = 1024 * KIB
