"""The replay memory of a network with memory: rollouts of one environment each, sampled as sequences with a burn-in.

A rollout has T rows, and the state of the actor's memory before the first of them. A sequence is a rollout and the first rows of
the one that follows it: `burn_in` rows that only bring the stored state to that of the newest weights, then T rows to train on,
then n - 1 rows that the windows of the last ones reach into (Kapturowski et al. 2019, "Recurrent experience replay in distributed
reinforcement learning", section 3, "stored state" and "burn-in"). So sequences overlap, and each env step is trained on in one
of them, but for the first `burn_in` of each environment of an actor, and after a message that was lost.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.envs.spec import EnvSpec
from common.envs.stacking import stack
from common.errors import ConfigError, InternalError
from common.protocol.messages import Arrays
from common.replay.blocks import STREAMS, ArrayForms, Segment, Stream, described, nbytes, require_layout, segments, spans
from common.units import EnvSteps, Sequence

_LEAST_ROLLOUTS = 10  # of each environment: the newest has no successor yet


def require_room(capacity: EnvSteps, *, length: int, burn_in: int, n_step: int, streams: int) -> None:
    """Raise `ConfigError` for rollouts of `length` too short for a sequence, and for a memory too small for theirs."""
    if burn_in + n_step > length:
        wanted = (
            f"at most {length - n_step} = rollout.length {length} less algorithm.n_step {n_step}: a sequence has two rollouts"
        )
        raise ConfigError("algorithm.burn_in", found=burn_in, wanted=wanted)
    if capacity < (least := _LEAST_ROLLOUTS * streams * length):
        wanted = f"at least {least}: {_LEAST_ROLLOUTS} rollouts of {length} for each of {streams} environments"
        fix = "raise it, or lower rollout.length, actor.count or env.num_envs"
        raise ConfigError("algorithm.replay_capacity", found=capacity, wanted=wanted, fix=fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """N sequences of M = burn_in + T + n - 1 env steps, and the K among them that are trained on.

    `index` and `following` count the observations of all sequences, m*N + i for row m of sequence i.
    """

    observation: NDArray[Any]  # [M+1, N, *input], environment's dtype
    start: NDArray[np.bool_]  # [M+1, N]: the observation is the first of an episode
    memory: NDArray[np.float32]  # [N, S]: state of the actor's memory before row 0
    later_memory: NDArray[np.float32]  # [N, S]: the same before row T
    burn_in: int
    length: int  # T
    index: NDArray[np.int64]  # [K]: rows that are trained on, none of them among the first `burn_in`
    action: NDArray[np.int64]  # [K]
    reward: NDArray[np.float32]  # [K]: discounted sum over the window of k <= n env steps
    env_steps: NDArray[np.int64]  # [K]: k
    discount: NDArray[np.float32]  # [K]: gamma^k, 0 where the window's last step terminated the episode
    following: NDArray[np.int64]  # [K]: the row after the window; where `discount` is 0 it may be of another episode


class SequenceLayout(NamedTuple):
    """Sizes of a memory, before it is allocated."""

    env: EnvSpec
    rollouts: int
    length: int  # T
    state_size: int  # S

    @property
    def capacity(self) -> EnvSteps:
        """Env steps that fit; a reset row takes the place of one."""
        return self.rollouts * self.length

    def arrays(self) -> ArrayForms:
        """Shape and dtype of each array of the memory, a row per rollout."""
        env, rows = self.env, (self.rollouts, self.length)
        return {
            "frames": ((self.rollouts, env.frame_stack - 1 + self.length + 1, *env.observation_shape), env.observation_dtype),
            "start": ((self.rollouts, self.length + 1), "bool"),
            "action": (rows, env.action.dtype),
            "reward": (rows, "float32"),
            "terminated": (rows, "bool"),
            "truncated": (rows, "bool"),
            "valid": (rows, "bool"),
            "memory": ((self.rollouts, self.state_size), "float32"),
        }

    def described(self) -> dict[str, Any]:
        """Return the settings that saved contents depend on, in JSON values."""
        return described(self.env, self.arrays())

    @property
    def nbytes(self) -> int:
        """Bytes of a memory of this layout, full or not; the sequences of one minibatch come on top."""
        return nbytes(self.arrays())


class SequenceReplay:
    """Stores trajectories by `insert` and returns sequences by `sample`: as `Replay`, with rollouts in place of rows.

    The oldest rollout makes room for the newest. numpy only; one thread uses it.
    """

    def __init__(
        self,
        *,
        env: EnvSpec,
        capacity: EnvSteps,
        length: int,
        state_size: int,
        burn_in: int,
        n_step: int,
        gamma: float,
        clip_reward: bool = False,
        streams: int = STREAMS,
    ) -> None:
        """Allocate once.

        Args:
            env: as for `Replay`.
            capacity: env steps to keep, over all environments, in whole rollouts; a reset row takes the place of one.
            length: rows of a rollout (T).
            state_size: numbers in the state of one environment's memory (S).
            burn_in: rows of a sequence that are not trained on; together with `n_step` at most T.
            n_step: env steps of a window (n).
            gamma: discount per env step.
            clip_reward: sum the signs of the rewards.
            streams: environments of all actors that write concurrently.

        Raises:
            ConfigError: the windows or the environments do not fit.
        """
        require_room(capacity, length=length, burn_in=burn_in, n_step=n_step, streams=streams)
        self.layout = SequenceLayout(env, -(-capacity // length), length, state_size)
        self._arrays = {name: np.zeros(shape, dtype) for name, (shape, dtype) in self.layout.arrays().items()}
        self._next = np.full(self.layout.rollouts, -1)  # [rollouts]: where that which follows one is; -1: nowhere (yet)
        self._writes = np.zeros(self.layout.rollouts, np.int64)  # of this process
        self._inserted = 0  # rollouts; the i-th is at i modulo their number
        self._newest: dict[Stream, tuple[Sequence, int]] = {}  # of each environment: number of its message, and which it is
        self._burn_in, self._n_step = burn_in, n_step
        self._powers = (gamma ** np.arange(n_step + 1)).astype(np.float32)
        self._clip_reward = clip_reward

    def __len__(self) -> int:
        """Rows of the sequences that can be sampled now, reset rows included."""
        return int(np.count_nonzero(self._next >= 0)) * self.layout.length

    @property
    def incomplete(self) -> float:
        """Share of the memory in rollouts that nothing follows yet, which cannot be sampled: the newest of each environment."""
        used = min(self._inserted, self.layout.rollouts)
        return float(np.count_nonzero(self._next[:used] < 0)) / self.layout.rollouts

    def insert(self, arrays: Arrays, *, stream: Hashable, seq: Sequence) -> EnvSteps:
        """Append the rollouts of a trajectory message, which was checked (see `common.algorithms.payload`). Copies.

        A rollout follows another where `stream` is the same and `seq` is the next number. Of an episode that a time limit ended
        the last env step is not trained on where its last observation came separately (same_step autoreset).

        Args: as of `Replay.insert`.

        Returns:
            The number of rows, those that only reset an environment included: so many are drawn with them too.
        """
        rows = {name: np.asarray(arrays[name]) for name in ("start", "action", "reward", "terminated", "truncated", "valid")}
        rows["frames"] = np.asarray(arrays["obs"])
        for b, state in enumerate(arrays["memory"][0]):
            place = self._place((stream, b), seq)
            self._arrays["memory"][place] = state
            for name, array in rows.items():
                self._arrays[name][place] = array[:, b]
        return int(rows["valid"].size)

    def _place(self, stream: Stream, seq: Sequence) -> int:
        """Return where the next rollout of an environment goes; it follows the newest one, if that is still here."""
        number, rollouts = self._inserted, self.layout.rollouts
        place = number % rollouts
        if place == 0:
            self._newest = {key: newest for key, newest in self._newest.items() if number - newest[1] < rollouts}
        last, before = self._newest.get(stream, (seq, 0))
        if last == seq - 1 and number - before < rollouts:
            self._next[before % rollouts] = place
        self._next[place] = -1
        self._newest[stream] = seq, number
        self._inserted += 1
        self._writes[place] += 1
        return place

    def sample(self, number: int, rng: np.random.Generator) -> Sequences:
        """Draw sequences of `number` rows to train on, a multiple of T, uniformly, with replacement; reset rows are among them.

        Raises `InternalError` where no sequence is complete. None of an empty memory (`number` 0) is no error.
        """
        complete = np.flatnonzero(self._next >= 0)
        if number and not len(complete):
            raise InternalError("a sample from an empty replay", found=0, wanted="at least one complete sequence")
        count = number // self.layout.length
        drawn = complete[rng.integers(len(complete), size=count)] if count else complete[:0]
        rows = {name: self._joined(name, drawn) for name in self._arrays if name != "memory"}
        start, terminated = rows["start"], rows["terminated"]
        valid = rows["valid"] & (terminated | ~start[1:])
        span, _ = spans(valid, terminated | rows["truncated"], self._n_step)
        trained = slice(self._burn_in, self._burn_in + self.layout.length)
        row, sequence = np.nonzero(span[trained])
        row += self._burn_in
        span = span[row, sequence]
        return Sequences(
            observation=stack(rows["frames"], start),
            start=start,
            memory=self._arrays["memory"][drawn],
            later_memory=self._arrays["memory"][self._next[drawn]],
            burn_in=self._burn_in,
            length=self.layout.length,
            index=row * count + sequence,
            action=rows["action"][row, sequence],
            reward=self._returns(rows["reward"], row, sequence, span),
            env_steps=span,
            discount=np.where(terminated[row + span - 1, sequence], np.float32(0), self._powers[span]),
            following=(row + span) * count + sequence,
        )

    def _joined(self, name: str, drawn: NDArray[np.int64]) -> NDArray[Any]:
        """Return an array of N rollouts with what follows each, rows first: [.., N, ..]."""
        first, second = self._arrays[name][drawn], self._arrays[name][self._next[drawn]]
        repeated = first.shape[1] - self.layout.length  # frames and starts: the last ones of a rollout begin the next
        return np.concatenate([first, second[:, repeated : repeated + self._burn_in + self._n_step - 1]], axis=1).swapaxes(0, 1)

    def _returns(
        self, reward: NDArray[np.float32], row: NDArray[np.int64], sequence: NDArray[np.int64], span: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Discounted sum of the rewards [M, N] of each window, [K]."""
        returns = np.zeros(len(row), np.float32)
        for step in range(self._n_step):
            inside = step < span
            found = reward[row[inside] + step, sequence[inside]]  # raw, whatever the settings of a resumed run
            returns[inside] += self._powers[step] * (np.sign(found) if self._clip_reward else found)
        return returns

    def segments(self) -> list[Segment]:
        """Return the segments of the memory, for a checkpoint to write, or to fill after `load_state_dict`."""
        return segments(self._arrays.values(), self._writes[: self._inserted], rows=1)

    def state_dict(self) -> dict[str, Any]:
        """Return the state without the segments, in plain values; streams must be plain."""
        newest = [[stream, *newest] for stream, newest in self._newest.items()]
        return {"layout": self.layout.described(), "inserted": self._inserted, "next": self._next.tolist(), "newest": newest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; the caller then fills the `segments`. Raises `ResourceError` for a memory of another layout."""
        require_layout(state["layout"], self.layout.described())
        self._inserted = state["inserted"]
        self._next[:] = state["next"]
        self._newest = {stream: (seq, number) for stream, seq, number in state["newest"]}
