"""One batch of tensors from experience messages: stacks rebuilt, actors side by side.

Axes: T env steps first, then B, the environments of all actors together, in the order of the messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from common.algorithms.api import Sample
from common.envs.spec import EnvSpec
from common.envs.stacking import stack


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Experience as an algorithm trains on it; `*input` is `EnvSpec.network_input_shape`."""

    observation: Tensor  # [T+1, B, *input] environment's dtype: o_0 .. o_T
    start: Tensor  # [T+1, B] bool: o_t is the first of an episode
    action: Tensor  # [T, B] int64 or [T, B, A] float32
    reward: Tensor  # [T, B] float32, raw
    terminated: Tensor  # [T, B] bool
    truncated: Tensor  # [T, B] bool
    valid: Tensor  # [T, B] bool: False for a reset row
    log_prob: Tensor  # [T, B] float32, of the policy that acted
    final_observation: Tensor  # [K, *input]: what followed a_t where that is not o_{t+1} (truncated, same_step autoreset)
    final_index: Tensor  # [K] int64: t*B + b of each
    version: Tensor  # [B] int64: policy that acted

    def to(self, device: torch.device) -> Batch:
        """The same on another device; itself where it is there."""
        return self if device == self.reward.device else Batch(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})


def collate(samples: Sequence[Sample], env: EnvSpec) -> Batch:
    """Join messages of one schema (T the same, B may differ), checked before against it and by `check_trajectory`."""
    start = _joined(samples, "start")
    observation = stack(_joined(samples, "obs"), start)
    final_index = _final_index(samples)
    newest = np.concatenate([sample.arrays["final_obs"] for sample in samples])
    version = np.repeat([sample.version for sample in samples], [sample.arrays["start"].shape[1] for sample in samples])
    per_step = ("action", "reward", "terminated", "truncated", "valid", "log_prob")
    return Batch(
        observation=_tensor(observation),
        start=_tensor(start),
        final_observation=_tensor(final_stacks(env, observation, newest, final_index)),
        final_index=_tensor(final_index),
        version=_tensor(version),
        **{name: _tensor(_joined(samples, name)) for name in per_step},
    )


def _joined(samples: Sequence[Sample], name: str) -> np.ndarray:
    """Side by side along B; one message alone is not copied."""
    parts = [sample.arrays[name] for sample in samples]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def _final_index(samples: Sequence[Sample]) -> np.ndarray:
    """t*B + b of each message, with its own B, as t*B + b of the batch."""
    widths = [sample.arrays["start"].shape[1] for sample in samples]
    offsets = np.cumsum([0, *widths])
    parts = []
    for sample, width, offset in zip(samples, widths, offsets, strict=False):
        row, column = np.divmod(sample.arrays["final_index"].astype(np.int64), width)
        parts.append(row * offsets[-1] + offset + column)
    return np.concatenate(parts)


def final_stacks(env: EnvSpec, observation: np.ndarray, newest: np.ndarray, final_index: np.ndarray) -> np.ndarray:
    """What was seen after the steps `final_index` [K] (t*B + b) that led to the frames `newest` [K, *frame]: [K, *input].

    The stack of `observation` [T+1, B, *input] at t, moved on by one frame; older episodes are zero in it already.
    """
    if env.network_input_shape == env.observation_shape:
        return newest
    row, column = np.divmod(final_index, observation.shape[1])
    return np.concatenate([observation[row, column, 1:], newest[:, None]], axis=1)


def _tensor(array: np.ndarray) -> Tensor:
    """Without a copy where the memory is ours. Memory of the wire is read-only, which torch cannot express."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
