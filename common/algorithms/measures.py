"""The metrics of gradient steps, read after the last one: a read waits until a GPU has finished all steps so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Measured = Mapping[str, Tensor]
"""Metrics of one gradient step by name: scalars without gradient, and `NONFINITE_STEPS`, 1 where the step was left out."""

NONFINITE_STEPS = "nonfinite_steps"


def nonfinite_steps(steps: Sequence[Measured]) -> int:
    """Return the number of steps that were left out."""
    return int(_read(steps, NONFINITE_STEPS).count_nonzero())


def means(steps: Sequence[Measured]) -> dict[str, float]:
    """Return the mean of each metric over the steps that measured it and were not left out."""
    found = {}
    for name in {name: None for step in steps for name in step if name != NONFINITE_STEPS}:
        measured = [step for step in steps if name in step]
        taken = _read(measured, name)[_read(measured, NONFINITE_STEPS) == 0]
        if len(taken):
            found[name] = taken.mean().item()
    return found


def _read(steps: Sequence[Measured], name: str) -> Tensor:
    """One metric of all steps on the CPU, [steps], after the device has finished them."""
    return torch.stack([step[name] for step in steps]).cpu() if steps else torch.empty(0)
