"""The replay memory of all environments of all actors: allocated once, sampled as n-step transitions.

Frames are stored once (`blocks`); windows and stacks are formed when they are sampled, uniformly. numpy only; one thread
uses it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.envs.spec import EnvSpec
from common.errors import InternalError
from common.protocol.messages import Arrays
from common.replay.blocks import STREAMS, BlockLayout, Blocks, Segment
from common.replay.rows import rows_by_environment
from common.units import EnvSteps, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Transitions:
    """N sampled windows of k <= n env steps; `*input` is `EnvSpec.network_input_shape`.

    The observations are overwritten by the next `sample`; the other arrays are the caller's.
    """

    observation: NDArray[Any]  # [N, *input], environment's dtype: the input of the action
    action: NDArray[Any]  # [N] int64 or [N, *A] float32
    reward: NDArray[np.float32]  # [N]: sum over j < k of gamma^j r_j
    env_steps: NDArray[np.int64]  # [N]: k
    discount: NDArray[np.float32]  # [N]: gamma^k, 0 where the window's last step terminated the episode
    next_observation: NDArray[Any]  # [N, *input]: after the window; where `discount` is 0 it may be of another episode


class Replay:
    """Stores trajectories by `insert` and returns transitions by `sample`.

    Env steps are kept for about `capacity` later ones: the oldest block is recycled when room is needed. Each environment
    that writes has one incomplete block (up to a tenth of its share, see `BlockLayout.plan`) with unused rows.
    """

    def __init__(
        self,
        *,
        env: EnvSpec,
        capacity: EnvSteps,
        n_step: int,
        gamma: float,
        clip_reward: bool = False,
        streams: int = STREAMS,
    ) -> None:
        """Allocate once.

        Args:
            env: frames of `observation_shape` are stored, stacks of `frame_stack` sampled.
            capacity: env steps to keep, over all environments; a reset row takes the place of one.
            n_step: env steps of a window (n), 1 to 255.
            gamma: discount per env step.
            clip_reward: sum the signs of the rewards.
            streams: environments of all actors that write concurrently. More may come, and cost room: each keeps
                an incomplete block.

        Raises:
            ConfigError: the windows or the environments do not fit into `capacity`.
        """
        layout = BlockLayout.plan(env, capacity=capacity, n_step=n_step, streams=streams)
        self.layout = layout
        self._blocks = Blocks(layout)
        self._clip_reward = clip_reward
        self._powers = (gamma ** np.arange(n_step + 1)).astype(np.float32)
        self._seq: dict[Hashable, Sequence] = {}
        self._seen = np.empty((0, 0, 0, 0), env.observation_dtype)

    @property
    def incomplete(self) -> float:
        """Share of the memory in blocks that are not full: above a tenth, more environments write than it is laid out for."""
        return self._blocks.incomplete

    def __len__(self) -> int:
        """Transitions that can be sampled now: windows that are complete."""
        return self._blocks.ready

    def insert(self, arrays: Arrays, *, stream: Hashable, seq: Sequence) -> EnvSteps:
        """Append the rows of a trajectory message, which was checked (see `common.algorithms.payload`). Copies.

        Windows go on from one message to the next where `stream` is the same and `seq` is the next number, and end before
        any other. They never cross a reset.

        Args:
            arrays: of the message, [T, B] first.
            stream: the sender: one incarnation of one actor.
            seq: number of the message within the stream.

        Returns:
            The number of env steps.
        """
        if stream not in self._seq:  # incarnations come and go: only those with a write position may be continued
            writing = self._blocks.senders
            self._seq = {sender: last for sender, last in self._seq.items() if sender in writing}
        follows = self._seq.get(stream) == seq - 1
        self._seq[stream] = seq
        for b, rows in enumerate(rows_by_environment(arrays)):
            self._blocks.extend((stream, b), rows, follows=follows)
        return int(np.count_nonzero(arrays["valid"]))

    def sample(self, number: int, rng: np.random.Generator) -> Transitions:
        """Draw `number` transitions (N) uniformly, with replacement. Raises `InternalError` where no window is complete.

        None of an empty memory (N = 0) is no error.
        """
        if number and not len(self):
            raise InternalError("a sample from an empty replay", found=0, wanted="at least one complete window")
        position = self._draw(number, rng)
        blocks = self._blocks
        span = blocks.span[position].astype(np.int64)
        observation, next_observation = self._observations(position, span)
        return Transitions(
            observation=observation,
            action=blocks.action[position],
            reward=self._returns(position, span),
            env_steps=span,
            discount=np.where(blocks.terminated[position + span - 1], np.float32(0), self._powers[span]),
            next_observation=next_observation,
        )

    def segments(self) -> list[Segment]:
        """Return the segments of the memory, for a checkpoint to write, or to fill after `load_state_dict`."""
        return self._blocks.segments()

    def state_dict(self) -> dict[str, Any]:
        """Return the state without the segments: the position of each stream. Plain values."""
        return self._blocks.state_dict() | {"seq": [[stream, seq] for stream, seq in self._seq.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; the caller then fills the `segments`. Raises `ResourceError` for a memory of another layout."""
        self._blocks.load_state_dict(state)
        self._seq = dict(state["seq"])

    def _draw(self, number: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Draw `number` positions [N] where a window begins, uniformly: draws among all positions, less those without one."""
        span = self._blocks.span[: self._blocks.used]
        drawn = np.empty(0, np.int64)
        while (missing := number - len(drawn)) > 0:
            tries = rng.integers(len(span), size=int(1.2 * missing * len(span) / len(self)) + 8)
            drawn = np.concatenate([drawn, tries[span[tries] > 0][:missing]])
        return drawn

    def _returns(self, position: NDArray[np.int64], span: NDArray[np.int64]) -> NDArray[np.float32]:
        """Discounted sum of the rewards of each window, [N]."""
        steps = np.arange(self.layout.n_step)
        reward = self._blocks.reward.take(position[:, None] + steps, mode="clip")  # raw, whatever the settings of a resumed run
        reward = np.sign(reward) if self._clip_reward else reward
        kept = np.where(steps < span[:, None], reward, np.float32(0))
        # No BLAS: its kernels may read beside an array, and set the flag of an invalid operation for what they find there.
        returns: NDArray[np.float32] = np.einsum("nk,k->n", kept, self._powers[:-1])
        return returns

    def _observations(self, position: NDArray[np.int64], span: NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
        """Stacks [N, *input] at both ends of each window, as `common.envs.stacking.stack` makes them."""
        env, blocks, older = self.layout.env, self._blocks, self.layout.env.frame_stack - 1
        # Both ends of a window side by side: frames of both are still in the cache the second time.
        back, shift = np.arange(-older, 1), np.stack([np.zeros_like(span), span], axis=1)
        age = blocks.age[position][:, None] + shift
        rows = np.where(age[..., None] < -back, self.layout.positions, (position[:, None] + shift)[..., None] + back)
        shape = (*rows.shape, blocks.frames.shape[1])
        if self._seen.shape != shape:
            self._seen = np.empty(shape, blocks.frames.dtype)
        np.take(blocks.frames, rows, axis=0, out=self._seen, mode="clip")  # "raise" would go through a buffer; none is outside
        ends = self._seen.reshape(-1, 2, *env.network_input_shape)
        return ends[:, 0], ends[:, 1]
