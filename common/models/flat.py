"""Tensors that lie one after another in one buffer, so that one operation reaches all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Flat(NamedTuple):
    """`whole` [P], and its `parts` with the shapes of what they stand for; both are one memory."""

    whole: Tensor
    parts: Sequence[Tensor]

    @classmethod
    def like(cls, tensors: Iterable[Tensor], *, dtype: torch.dtype = torch.float32) -> Flat:
        """Zeros, on the device of the tensors; laid out as they are, or row-major where one has gaps."""
        likenesses = list(tensors)
        whole = torch.zeros(sum(map(torch.Tensor.numel, likenesses)), dtype=dtype, device=likenesses[0].device)
        parts, start = [], 0
        for tensor in likenesses:
            dense = torch.empty_like(tensor, device="meta")
            parts.append(whole.as_strided(dense.shape, dense.stride(), start))
            start += dense.numel()
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
