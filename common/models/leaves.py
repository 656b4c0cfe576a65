"""The leaves of joined observations as tensors (see `common.envs.leaves`), and the actions that their mask allows."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from common.envs.leaves import joined_dtype
from common.envs.spec import EnvSpec

Observation: TypeAlias = Tensor | tuple[Tensor, ...]
"""Input of a network: [N, *input], or the leaves of several arrays, the mask last."""


class Leaves:
    """Splits joined observations of one environment."""

    def __init__(self, env: EnvSpec) -> None:
        """`env` has leaves."""
        offsets = [field[1] for field in (joined_dtype(env.leaves).fields or {}).values()]
        self._columns = [slice(*ends) for ends in zip(offsets, [*offsets[1:], env.observation_shape[0]], strict=True)]
        self._dtypes = [getattr(torch, leaf.dtype) for leaf in env.leaves]
        self._inputs = [part.network_input_shape for part in env.parts]
        self._frames = [leaf.shape for leaf in env.seen]

    def stacks(self, observation: Observation) -> list[Tensor]:
        """Return the leaves that a network sees of observations [N, (S,) bytes] uint8, each as its own trunk takes it."""
        if not isinstance(observation, Tensor):
            return list(observation[: len(self._inputs)])
        return [self._leaf(observation, index).reshape(-1, *shape) for index, shape in enumerate(self._inputs)]

    def frames(self, frames: Tensor) -> list[Tensor]:
        """Return the leaves that a network sees of frames [N, bytes] uint8: [N, *shape] each."""
        return [self._leaf(frames, index).reshape(-1, *shape) for index, shape in enumerate(self._frames)]

    def mask(self, observation: Observation) -> Tensor:
        """Return the actions that the newest frames allow: [N, sum of their choices] bool."""
        if not isinstance(observation, Tensor):
            return observation[-1] != 0
        mask: Tensor = self._leaf(observation, len(self._columns) - 1) != 0
        return mask if mask.ndim == 2 else mask[:, -1]  # noqa: PLR2004 - N and actions, without a stack

    def _leaf(self, joined: Tensor, index: int) -> Tensor:
        part, dtype = joined[..., self._columns[index]], self._dtypes[index]
        # A copy also of one row, of which torch calls any part contiguous: its address need not be that of a number.
        return part if dtype == torch.uint8 else part.clone(memory_format=torch.contiguous_format).view(dtype)


def mask_logits(logits: Tensor, allowed: Tensor) -> Tensor:
    """Return logits or values [N, n] float32 with the lowest finite number where an action is not `allowed` [N, n] bool.

    Its probability is then 0, and no gradient passes; an infinite one would make NaN of 0 times infinity.
    """
    return logits.masked_fill(~allowed, torch.finfo(logits.dtype).min)
