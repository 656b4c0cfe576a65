"""The check that a user's network computes each row of a batch alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from common.errors import ConfigError

_ROWS = 3
_RELATIVE, _ABSOLUTE = 1e-4, 1e-5  # rounding may depend on the place of a row


def require_independent_rows(module: nn.Module, shape: Sequence[int], name: str) -> None:
    """Raise `ConfigError` where the output for an observation [*shape] changes with the other observations of the batch.

    An actor's batch has the newest observation of each environment, and the learner's has rows in random order: both compute
    the same only where each row is computed alone.
    """
    try:
        mixes = _mixes_rows(module, shape)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{name} fails on an observation", found=found, wanted="features for any observation") from error
    if mixes:
        raise ConfigError(
            f"{name} mixes the rows of a batch",
            found="another output for the same observation beside other observations",
            wanted="an output that depends on its own row alone",
            fix="replace LSTM, GRU, or BatchNorm over the rows; env.frame_stack shows past observations",
        )


def _mixes_rows(module: nn.Module, shape: Sequence[int]) -> bool:
    """Return whether the output of a row changes where that row stays and all others change."""
    generator = torch.Generator().manual_seed(0)
    batch, others = (torch.rand(_ROWS, *shape, generator=generator) for _ in range(2))
    with torch.no_grad(), _in_evaluation_mode(module):
        outputs = _output(module, batch)
        for row in range(_ROWS):
            mixed = others.clone()
            mixed[row] = batch[row]
            if not torch.allclose(_output(module, mixed)[row], outputs[row], _RELATIVE, _ABSOLUTE, equal_nan=True):
                return True
    return False


@contextmanager
def _in_evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Turn dropout off while inside."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def _output(module: nn.Module, batch: Tensor) -> Tensor:
    """Return the output for a copy of `batch`, with the same random numbers at each call."""
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(0)
        output: Tensor = module(batch.clone())
        return output
