"""Replay memory: one for all environments of all actors, allocated once, sampled as n-step transitions.

Frames are stored once (`blocks`); windows and stacks are formed when they are sampled. Uniform, or prioritized
(`prioritized`). numpy only; one thread uses it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.envs.spec import EnvSpec
from common.errors import ConfigError, InternalError
from common.replay.blocks import Blocks, Layout
from common.replay.columns import columns
from common.replay.prioritized import Draw, Prioritized, PrioritySettings, draw_uniform
from common.replay.segments import Segment
from common.units import EnvSteps, Sequence
from common.wire.messages import Arrays


@dataclass(frozen=True, slots=True, kw_only=True)
class Transitions:
    """N sampled windows of k <= n env steps; `*input` is `EnvSpec.network_input_shape`.

    The observations are overwritten by the next `sample`; the other arrays are the caller's.
    """

    index: NDArray[np.int64]  # [N]: for `update_priorities`; names what was sampled, not merely its place
    observation: NDArray[Any]  # [N, *input], environment's dtype: what the action was chosen on
    action: NDArray[Any]  # [N] int64 or [N, *A] float32
    reward: NDArray[np.float32]  # [N]: sum over j < k of gamma^j r_j
    env_steps: NDArray[np.int64]  # [N]: k
    discount: NDArray[np.float32]  # [N]: gamma^k, 0 where the window's last step terminated the episode
    next_observation: NDArray[Any]  # [N, *input]: what followed the window; where `discount` is 0 it may be of another episode
    weight: NDArray[np.float32]  # [N]: importance weights, at most 1; all 1 where sampling is uniform


class Replay:
    """`insert` experience messages, `sample` transitions of them, and tell by `update_priorities` how surprising they were.

    Env steps are kept for about `capacity` later ones: the oldest block goes when room is needed. Each environment
    that writes has one block under way (up to a quarter of its share, see `Layout.plan`), whose free rows hold nothing yet.
    """

    def __init__(
        self,
        *,
        env: EnvSpec,
        capacity: EnvSteps,
        n_step: int,
        gamma: float,
        prioritized: PrioritySettings | None = None,
        clip_reward: bool = False,
        streams: int = 16,
        limit_bytes: int | None = None,
    ) -> None:
        """Allocate once.

        Args:
            env: what is stored: frames of `observation_shape`, sampled as stacks of `frame_stack`.
            capacity: env steps to keep, over all environments; a reset row takes the place of one.
            n_step: env steps of a window (n), 1 to 255.
            gamma: discount per env step.
            prioritized: how errors become priorities; None samples uniformly.
            clip_reward: sum the signs of the rewards.
            streams: environments of all actors together that write side by side. More may come, and cost room: each keeps
                a block under way.
            limit_bytes: memory that may be used; None: no limit.

        Raises:
            ConfigError: the windows or the environments do not fit into `capacity`, or it does not fit into `limit_bytes`.
        """
        layout = Layout.plan(env, capacity=capacity, n_step=n_step, streams=streams, prioritized=prioritized is not None)
        if limit_bytes is not None and layout.nbytes > limit_bytes:
            raise ConfigError(
                f"replay of {capacity:,} env steps",
                found=f"{layout.nbytes / 1e9:.2f} GB",
                wanted=f"at most {limit_bytes / 1e9:.2f} GB",
                fix="ask for a smaller capacity",
            )
        self.layout = layout
        self._blocks = Blocks(layout)
        self._prioritized = None if prioritized is None else Prioritized(layout.positions, prioritized)
        self._clip_reward = clip_reward
        self._powers = (gamma ** np.arange(n_step + 1)).astype(np.float32)
        self._seq: dict[Hashable, Sequence] = {}
        self._seen = np.empty((0, 0, 0, 0), env.observation_dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the memory, full or not; the observations of one batch come on top."""
        return self.layout.nbytes

    @property
    def capacity(self) -> EnvSteps:
        """Env steps that fit: what was asked for, in whole blocks."""
        return self.layout.capacity

    def __len__(self) -> int:
        """Transitions that can be sampled now: windows that are complete."""
        return self._blocks.ready

    def insert(self, arrays: Arrays, *, stream: Hashable, seq: Sequence, error: NDArray[np.float32] | None = None) -> EnvSteps:
        """Append the rows of a trajectory message, which was checked (see `common.algorithms.trajectory`). Copies.

        Windows go on from one message to the next where `stream` is the same and `seq` is the next number, and end before
        any other. They never cross a reset.

        Args:
            arrays: of the message, [T, B] first.
            stream: who sent it: one incarnation of one actor.
            seq: its number within the stream.
            error: [T, B], |delta| of the window that begins at each row, as the actor saw it; None: enter with the
                largest priority so far. Ignored where sampling is uniform.

        Returns:
            How many env steps that were.
        """
        if self._clip_reward:
            arrays = {**arrays, "reward": np.sign(arrays["reward"])}
        follows = self._seq.get(stream) == seq - 1
        self._seq[stream] = seq
        changed = [
            self._blocks.extend((stream, b), column, follows=follows).positions for b, column in enumerate(columns(arrays, error))
        ]
        if self._prioritized is not None:
            self._enter(self._prioritized, np.unique(np.concatenate(changed)))
        return int(np.count_nonzero(arrays["valid"]))

    def sample(self, batch: int, rng: np.random.Generator, *, beta: float = 1.0) -> Transitions:
        """Draw `batch` transitions (N), with replacement.

        `beta` is the exponent of the importance weights, 1 for full correction; unused where sampling is uniform. Raises
        `InternalError` where there is nothing to draw from.
        """
        if not len(self):
            raise InternalError("a sample from an empty replay", found=0, wanted="at least one complete window")
        slot, weight = self._draw(batch, rng, beta)
        blocks = self._blocks
        span = blocks.span[slot].astype(np.int64)
        observation, next_observation = self._observations(slot, span)
        return Transitions(
            index=blocks.generation[slot // self.layout.length] * self.layout.positions + slot,
            observation=observation,
            action=blocks.action[slot],
            reward=self._returns(slot, span),
            env_steps=span,
            discount=np.where(blocks.terminated[slot + span - 1], np.float32(0), self._powers[span]),
            next_observation=next_observation,
            weight=weight,
        )

    def update_priorities(self, index: NDArray[np.int64], error: NDArray[np.float32]) -> None:
        """Give what was sampled as `index` [N] priorities by |error| [N]; what was overwritten since is left alone.

        Does nothing where sampling is uniform. Raises `InternalError` for an error that is not finite.
        """
        if self._prioritized is None:
            return
        generation, slot = np.divmod(index, self.layout.positions)
        there = generation == self._blocks.generation[slot // self.layout.length]
        self._prioritized.update(slot[there], error[there])

    def segments(self) -> list[Segment]:
        """Return the segments of the memory, for a checkpoint to write, or to fill after `load_state_dict`."""
        return self._blocks.segments()

    def state_dict(self) -> dict[str, Any]:
        """Return the state without the segments: the position of each stream, and the priorities. Plain values and arrays."""
        state = self._blocks.state_dict()
        state["seq"] = [[stream, seq] for stream, seq in self._seq.items()]
        return state if self._prioritized is None else state | {"priorities": self._prioritized.state_dict(self._blocks.used)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; the caller then fills the `segments`. Raises `ResourceError` for a memory of another layout."""
        self._blocks.load_state_dict(state)
        self._seq = dict(state["seq"])
        if self._prioritized is not None:
            self._prioritized.load_state_dict(state["priorities"])

    def _enter(self, prioritized: Prioritized, changed: NDArray[np.int64]) -> None:
        there = self._blocks.span[changed] > 0
        entered = changed[there]
        prioritized.leave(changed[~there])
        prioritized.enter(entered, self._blocks.error[entered])

    def _draw(self, batch: int, rng: np.random.Generator, beta: float) -> Draw:
        if self._prioritized is not None:
            return self._prioritized.draw(batch, rng, beta=beta, entered=len(self))
        return draw_uniform(batch, rng, span=self._blocks.span[: self._blocks.used], entered=len(self))

    def _returns(self, slot: NDArray[np.int64], span: NDArray[np.int64]) -> NDArray[np.float32]:
        """Discounted sum of the rewards of each window, [N]."""
        steps = np.arange(self.layout.n_step)
        reward = self._blocks.reward.take(slot[:, None] + steps, mode="clip")
        return np.where(steps < span[:, None], reward, np.float32(0)) @ self._powers[:-1]

    def _observations(self, slot: NDArray[np.int64], span: NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
        """Stacks [N, *input] at both ends of each window, as `common.envs.stacking.stack` makes them."""
        env, blocks, older = self.layout.env, self._blocks, self.layout.env.frame_stack - 1
        # Both ends of a window side by side: what both show is still in the cache the second time.
        back, shift = np.arange(-older, 1), np.stack([np.zeros_like(span), span], axis=1)
        age = blocks.age[slot][:, None] + shift
        rows = np.where(age[..., None] < -back, self.layout.positions, (slot[:, None] + shift)[..., None] + back)
        shape = (*rows.shape, blocks.frames.shape[1])
        if self._seen.shape != shape:
            self._seen = np.empty(shape, blocks.frames.dtype)
        np.take(blocks.frames, rows, axis=0, out=self._seen, mode="clip")  # "raise" would go through a buffer; none is outside
        ends = self._seen.reshape(-1, 2, *env.network_input_shape)
        return ends[:, 0], ends[:, 1]
