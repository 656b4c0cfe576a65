"""Arithmetic on the CPU or a GPU: copies, precision (float32, or bfloat16 with float32 weights) and torch's random numbers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from common.models.spec import Precision

CPU = torch.device("cpu")
_global_generator = threading.RLock()  # two threads in `torch.get_rng_state` can wait for each other for ever (torch 2.13)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU on `device`: itself where that is the CPU. A GPU gets a copy that the host does not wait for."""
    if device.type == "cuda":  # a copy from memory that may be swapped would wait
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    return tensor.to(device, non_blocking=True)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Begin torch's global generator of the CPU with `seed` in this block, which one thread is in at a time; then restore it."""
    with _global_generator, torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)
        yield


def native(precision: Precision, device: torch.device) -> Precision:
    """Return `precision`, or float32 where `device` has no instructions for bfloat16 and would emulate it."""
    return "fp32" if precision == "bf16" and not _has_bfloat16(device) else precision


def _has_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    found = torch.cpu.get_capabilities()  # of x86: avx512_bf16, amx_bf16; of ARM: bf16
    usable = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(usable) and any(found.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Compute in `precision` inside the block."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that `autocast` computes in on this device; None where it is off."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None
