"""Tensors that lie one after another in one buffer, so that one operation reaches all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Flat(NamedTuple):
    """`whole` [P], and its `parts` with the shapes and strides of what they stand for; both are one memory."""

    whole: Tensor
    parts: Sequence[Tensor]

    @classmethod
    def like(cls, tensors: Iterable[Tensor], *, dtype: torch.dtype = torch.float32) -> Flat:
        """Zeros, on the device of the tensors, which must be dense."""
        shapes = list(tensors)
        whole = torch.zeros(sum(map(torch.Tensor.numel, shapes)), dtype=dtype, device=shapes[0].device)
        parts, start = [], 0
        for tensor in shapes:
            parts.append(whole.as_strided(tensor.shape, tensor.stride(), start))
            start += tensor.numel()
        return cls(whole, parts)

    @classmethod
    @torch.no_grad()
    def of(cls, parameters: Iterable[nn.Parameter]) -> Flat:
        """The parameters themselves, float32: from here on they lie in the buffer."""
        moved = list(parameters)
        flat = cls.like(moved)
        for parameter, part in zip(moved, flat.parts, strict=True):
            part.copy_(parameter)
            parameter.data = part
        return flat
