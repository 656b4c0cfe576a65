"""The memory of recurrent policies: an LSTM or GRU between the trunk of a network and its heads.

The state of an environment is one row [S] of float32: the outputs h of the cell [H], and for an LSTM its cell state c [H] behind
them. An episode begins with zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from common.models.spec import ModelSettings


class Past(NamedTuple):
    """What came before the rows of B environments, T rows each: their states, and where their episodes begin."""

    state: Tensor  # [B, S] float32, before the first row
    start: Tensor  # [T, B] bool: the row is the first of an episode, so that its state is zeros


def memory_error(stored: Tensor, recomputed: Tensor) -> dict[str, Tensor]:
    """Metric `memory_error`: how far the actors' states [B, S] are from those that the newest weights compute.

    Root mean square of the difference, over that of the actors' states. Empty without memory.
    """
    difference = (recomputed.detach() - stored).norm()
    return {"memory_error": difference / stored.norm().clamp_min(1e-6)} if stored.shape[1] else {}


def remember(recurrent: Recurrent | None, features: Tensor, past: Past | None) -> tuple[Tensor, Tensor | None]:
    """Return what the heads get of `features`, and the states after each row: the features themselves without memory."""
    if recurrent is None:
        return features, None
    assert past is not None
    outputs, states = recurrent(features, past)
    return outputs.to(features.dtype), states


def finite_states(state: Tensor) -> Tensor:
    """Return the states [B, S] after an `act`, as the next one takes them: one that is not finite begins anew.

    It would outlast the observation that spoilt it, until the episode ends.
    """
    return state.masked_fill(~state.isfinite().all(dim=1, keepdim=True), 0.0)


class Recurrent(nn.Module):
    """The cell, always computed in float32: the rounding of a state to bfloat16 would add up from env step to env step."""

    def __init__(self, features: int, settings: ModelSettings) -> None:
        super().__init__()
        self.features = settings.recurrent_size
        cell = nn.LSTMCell if settings.recurrent == "lstm" else nn.GRUCell
        self.cell: nn.LSTMCell | nn.GRUCell = cell(features, self.features)

    def forward(self, features: Tensor, past: Past) -> tuple[Tensor, Tensor]:
        """Features [T*B, F] of T rows, of B environments each → outputs [T*B, H] and the states after each row [T*B, S], float32.

        The rows are computed one after the other, in a loop over T: `torch.nn.LSTM` knows no resets inside a sequence, and on
        packed segments between them it is faster only where B is small (docs/decisions/0048).
        """
        with torch.autocast(features.device.type, enabled=False):
            state, states = past.state, []
            rows = features.float().view(*past.start.shape, features.shape[-1])
            for row, start in zip(rows, past.start.unsqueeze(-1), strict=True):
                state = self._step(row, state.masked_fill(start, 0.0))  # 0 times NaN would be NaN in all episodes to come
                states.append(state)
        joined = torch.cat(states) if states else past.state[:0]
        return joined[:, : self.features], joined

    def _step(self, features: Tensor, state: Tensor) -> Tensor:
        if isinstance(self.cell, nn.GRUCell):
            output: Tensor = self.cell(features, state)
            return output
        h, c = torch.split(state, self.features, dim=1)
        return torch.cat(self.cell(features, (h, c)), dim=1)
