"""The arithmetic of training on whichever device the tensors lie: float32, or bfloat16 inside with weights that stay float32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from common.models.snapshot import Precision

CPU = torch.device("cpu")


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Compute in `precision` inside the block."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What `autocast` computes in on this device now; None where it is off."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None
