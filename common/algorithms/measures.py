"""The metrics of gradient steps, read after the last one: a read waits until a GPU has finished all steps so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Measured = Mapping[str, Tensor]
"""Metrics of one gradient step by name: scalars without gradient, and `NONFINITE_STEPS`, 1 where the step was left out."""

NONFINITE_STEPS = "nonfinite_steps"


def taken(steps: Sequence[Measured]) -> list[Measured]:
    """Return the steps that were not left out."""
    left_out = _read(steps, NONFINITE_STEPS).tolist()
    return [step for step, out in zip(steps, left_out, strict=True) if not out]


def nonfinite_steps(steps: Sequence[Measured]) -> int:
    """Return the number of steps that were left out."""
    return len(steps) - len(taken(steps))


def means(steps: Sequence[Measured]) -> dict[str, float]:
    """Return the mean of each metric over the steps that measured it and were not left out."""
    steps = taken(steps)
    names = {name: None for step in steps for name in step if name != NONFINITE_STEPS}
    return {name: _read([step for step in steps if name in step], name).mean().item() for name in names}


def _read(steps: Sequence[Measured], name: str) -> Tensor:
    """One metric of all steps on the CPU, [steps], after the device has finished them."""
    return torch.stack([step[name] for step in steps]).cpu() if steps else torch.empty(0)
