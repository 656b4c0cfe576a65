"""Batches of trajectories: experience messages, side by side, as tensors.

Axes: T env steps first, then B, the environments of all actors together, in the order of the messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from common.algorithms.payload import MEMORY
from common.envs.spec import EnvSpec
from common.envs.stacking import stack
from common.models.arithmetic import CPU, to_device
from common.models.memory import Past
from common.protocol.events import Experience


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Experience as an algorithm trains on it; `*input` is `EnvSpec.network_input_shape`."""

    observation: Tensor  # [T+1, B, *input] environment's dtype: o_0 .. o_T
    start: Tensor  # [T+1, B] bool: o_t is the first of an episode
    action: Tensor  # [T, B] int64 or [T, B, A] float32
    reward: Tensor  # [T, B] float32, raw as `collate` returns it
    terminated: Tensor  # [T, B] bool
    truncated: Tensor  # [T, B] bool
    valid: Tensor  # [T, B] bool: False for a reset row
    log_prob: Tensor  # [T, B] float32, of the policy that acted; [0, B] where it records none
    final_observation: Tensor  # [K, *input]: what followed a_t where that is not o_{t+1} (truncated, same_step autoreset)
    final_index: Tensor  # [K] int64: t*B + b of each
    version: Tensor  # [B] int64: policy that acted
    memory: Tensor  # [2, B, S] float32: states of the actor's memory before o_0 and after o_{T-1}; S = 0 without memory

    @property
    def past(self) -> Past:
        """What came before o_0 .. o_{T-1}."""
        return Past(self.memory[0], self.start[:-1])

    def to(self, device: torch.device) -> Batch:
        """The same on another device; itself where it is there."""
        return self if device == self.reward.device else Batch(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})


def collate(samples: Sequence[Experience], env: EnvSpec, device: torch.device = CPU, *, state_size: int = 0) -> Batch:
    """Join messages of one schema (T the same, B may differ), checked before against it and by `check_trajectory`.

    No messages, as on a rank of the learner that has no actors, are a batch of no environments. `state_size` is S.
    """
    if not samples:
        return _empty(env, state_size).to(device)
    frames, newest = _joined(samples, "obs"), np.concatenate([sample.arrays["final_obs"] for sample in samples])
    recorded = [*(["log_prob"] if "log_prob" in samples[0].arrays else []), *([MEMORY] if state_size else [])]
    names = ("start", "action", "reward", "terminated", "truncated", "valid", *recorded)
    arrays = {name: _joined(samples, name) for name in names}
    widths = [sample.arrays["start"].shape[1] for sample in samples]
    arrays |= {"final_index": _final_index(samples), "version": np.repeat([sample.version for sample in samples], widths)}
    arrays.setdefault("log_prob", np.empty((0, sum(widths)), np.float32))
    arrays.setdefault(MEMORY, np.empty((2, sum(widths), 0), np.float32))
    tensors = {name: to_device(_tensor(array), device) for name, array in arrays.items()}
    if device.type == "cpu":
        stacks = stack(frames, arrays["start"])
        observation, final = _tensor(stacks), _tensor(final_stacks(env, stacks, newest, arrays["final_index"]))
    else:  # a frame is part of several stacks, and is copied to the device once
        observation, final = (to_device(_tensor(array), device) for array in (frames, newest))
        if env.network_input_shape != env.observation_shape:
            observation = stacked(observation, tensors["start"])
            older = observation.flatten(0, 1).index_select(0, tensors["final_index"])[:, 1:]
            final = torch.cat([older, final.unsqueeze(1)], dim=1)
    return Batch(observation=observation, final_observation=final, **tensors)


def stacked(frames: Tensor, start: Tensor) -> Tensor:
    """As `common.envs.stacking.stack`, on a GPU: frames [rows+S-1, B, *frame], start [rows, B] bool → [rows, B, S, *frame]."""
    size = len(frames) - len(start) + 1
    episode = torch.cat([start.new_zeros(size - 1, start.shape[1], dtype=torch.int64), start.cumsum(0)])  # of each frame
    same = episode.unfold(0, size, 1) == episode[size - 1 :].unsqueeze(-1)
    stacks = frames.unfold(0, size, 1).movedim(-1, 2)
    return stacks.where(same.view(*same.shape, *[1] * (frames.ndim - 2)), 0).contiguous()


def _empty(env: EnvSpec, state_size: int) -> Batch:
    dtype = _tensor(np.empty(0, env.observation_dtype)).dtype
    return Batch(
        observation=torch.empty(2, 0, *env.network_input_shape, dtype=dtype),
        start=torch.empty(2, 0, dtype=torch.bool),
        action=torch.empty(1, 0, *env.action.shape, dtype=getattr(torch, env.action.dtype)),
        final_observation=torch.empty(0, *env.network_input_shape, dtype=dtype),
        final_index=torch.empty(0, dtype=torch.int64),
        version=torch.empty(0, dtype=torch.int64),
        memory=torch.empty(2, 0, state_size),
        **{name: torch.empty(1, 0) for name in ("reward", "log_prob")},
        **{name: torch.empty(1, 0, dtype=torch.bool) for name in ("terminated", "truncated", "valid")},
    )


def _joined(samples: Sequence[Experience], name: str) -> np.ndarray:
    """Side by side along B; one message alone is not copied."""
    parts = [sample.arrays[name] for sample in samples]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def _final_index(samples: Sequence[Experience]) -> np.ndarray:
    """t*B + b of each message, with its own B, as t*B + b of the batch."""
    widths = [sample.arrays["start"].shape[1] for sample in samples]
    offsets = np.cumsum([0, *widths])
    parts = []
    for sample, width, offset in zip(samples, widths, offsets, strict=False):
        row, column = np.divmod(sample.arrays["final_index"].astype(np.int64), width)
        parts.append(row * offsets[-1] + offset + column)
    return np.concatenate(parts)


def final_stacks(env: EnvSpec, observation: np.ndarray, newest: np.ndarray, final_index: np.ndarray) -> np.ndarray:
    """The stacks [K, *input] that end with the frames `newest` [K, *frame], seen after the steps `final_index` [K] (t*B + b).

    Each is the stack of `observation` [T+1, B, *input] at t, moved on by one frame; older episodes are zero in it already.
    """
    if env.network_input_shape == env.observation_shape:
        return newest
    row, column = np.divmod(final_index, observation.shape[1])
    return np.concatenate([observation[row, column, 1:], newest[:, None]], axis=1)


def _tensor(array: np.ndarray) -> Tensor:
    """Without a copy where the memory is ours. Memory of the wire is read-only, which torch cannot express."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
