"""Storage of a replay memory: each frame once, in blocks of consecutive positions of one environment.

A position is a frame, the action on it, its reward and its end. Positions p, p+1, .. of a block follow one another
in time, so a stack is the S positions up to p, and an n-step window is the positions p..p+n. To keep both within
one block, a block that continues a full one begins with a copy of its last S+n-1 frames.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from common.envs.spec import EnvSpec
from common.errors import ConfigError, ResourceError
from common.replay.rows import EnvironmentRows
from common.units import EnvSteps

_FRESH_PER_REPEATED = 64  # frames of a block per frame that it repeats: 1.6 % overhead
_LEAST_BLOCKS = 10  # per stream: the blocks that are being filled hold at most a tenth of the rows
STREAMS = 16  # environments for which a memory is laid out at least
_LONGEST_WINDOW = 255  # spans are uint8
SEGMENT_BYTES = 4 << 20  # enough for a disk to be fast, and little enough to rewrite for one new row

Stream: TypeAlias = tuple[Hashable, int]
"""A sender and the number of one of its environments."""

ArrayForms: TypeAlias = dict[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of each array of a memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a memory for a checkpoint. Within one process two segments of one `key` hold the same bytes."""

    key: str
    parts: Sequence[memoryview]  # of the memory itself: reading copies nothing, and writing fills the memory

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """Sizes and shapes of the arrays of a memory, before they are allocated."""

    env: EnvSpec
    n_step: int
    blocks: int
    fresh: int  # rows that each block adds to those before it

    @classmethod
    def plan(cls, env: EnvSpec, *, capacity: EnvSteps, n_step: int, streams: int) -> BlockLayout:
        """Plan the least number of blocks that hold `capacity` rows of `streams` environments that write concurrently.

        Raises `ConfigError` for windows that do not fit, and for a capacity too small for that many environments.
        """
        if not 1 <= n_step <= _LONGEST_WINDOW:
            raise ConfigError("n-step windows of the replay", found=n_step, wanted=f"1 to {_LONGEST_WINDOW}")
        fresh = block_rows(env.frame_stack, capacity=capacity, n_step=n_step, streams=streams)
        return cls(env=env, n_step=n_step, blocks=-(-capacity // fresh), fresh=fresh)

    @property
    def length(self) -> int:
        """Positions of a block."""
        return self.fresh + self.env.frame_stack + self.n_step - 1

    @property
    def positions(self) -> int:
        """Of all blocks."""
        return self.blocks * self.length

    @property
    def capacity(self) -> EnvSteps:
        """Env steps that fit, in whole blocks; a reset row takes the place of one."""
        return self.blocks * self.fresh

    def arrays(self) -> ArrayForms:
        """Shape and dtype of each array of the memory, `positions` long; one more frame stays blank."""
        env, action, positions = self.env, self.env.action, self.positions
        return {
            "frames": ((positions + 1, int(np.prod(env.observation_shape))), env.observation_dtype),
            "action": ((positions, *action.shape), action.dtype),
            "reward": ((positions,), "float32"),
            "terminated": ((positions,), "bool"),
            "age": ((positions,), "uint8"),
            "span": ((positions,), "uint8"),
        }

    def described(self) -> dict[str, Any]:
        """Return the settings that saved contents depend on, in JSON values."""
        return {"blocks": self.blocks, "fresh": self.fresh, "n_step": self.n_step} | described(self.env, self.arrays())

    @property
    def nbytes(self) -> int:
        """Bytes of a memory of this layout, full or not; the observations of one minibatch come on top."""
        return nbytes(self.arrays())


@dataclass(slots=True)
class _Writer:
    """The write position of one environment."""

    cursor: int  # position of its newest frame: the next row is written here
    stop: int  # first position behind its block
    pending: int = 0  # rows before the cursor with windows that need later rows


class Blocks:
    """The arrays of a memory. Blocks are recycled in the order in which they were begun."""

    def __init__(self, layout: BlockLayout) -> None:
        """Allocate everything, zeros; the system gives it pages as they are first written."""
        self.layout = layout
        self.ready = 0  # positions that can be sampled
        arrays = {name: np.zeros(shape, dtype) for name, (shape, dtype) in layout.arrays().items()}
        # [P+1, elements], the last one zeros: the part of a stack before its episode
        self.frames: NDArray[Any] = arrays["frames"]
        self.action: NDArray[Any] = arrays["action"]  # [P, *A]
        self.reward: NDArray[np.float32] = arrays["reward"]  # [P]
        self.terminated: NDArray[np.bool_] = arrays["terminated"]  # [P]
        self.age: NDArray[np.uint8] = arrays["age"]  # [P]: older frames of the same episode, S-1 at most
        self.span: NDArray[np.uint8] = arrays["span"]  # [P]: env steps of the window that begins here; 0: none (yet)
        self._writes = np.zeros(layout.blocks, np.int64)  # times this process wrote to each block
        self._begun = 0
        self._writers: dict[Stream, _Writer] = {}
        self._owner: dict[int, Stream] = {}  # by block, the stream that writes to it

    @property
    def used(self) -> int:
        """Positions of the blocks that were ever begun."""
        return min(self._begun, self.layout.blocks) * self.layout.length

    @property
    def incomplete(self) -> float:
        """Share of the blocks that are not full: each has an environment that writes to it, or that stopped."""
        return len(self._writers) / self.layout.blocks

    @property
    def senders(self) -> set[Hashable]:
        """Return the senders that may be continued: those with a write position."""
        return {sender for sender, _ in self._writers}

    def extend(self, stream: Stream, rows: EnvironmentRows, *, follows: bool) -> None:
        """Append the rows of one environment; `follows`: the first frame is the newest that `stream` has written.

        Otherwise, and where the block of the stream was recycled meanwhile, windows end at the gap.
        """
        writer = self._writers.get(stream)
        if writer is None or not follows:
            writer = self._begin(stream, writer, rows.context)
        done = 0
        while done < rows.rows:
            if writer.cursor + 1 == writer.stop:
                writer = self._continue(stream, writer)
            count = min(rows.rows - done, writer.stop - 1 - writer.cursor)
            self._write(writer, rows, done, done + count)
            done += count

    def _write(self, writer: _Writer, rows: EnvironmentRows, begin: int, end: int) -> None:
        """Write rows begin..end, which fit, at the cursor, and the spans of the windows that are now complete."""
        self._writes[(writer.stop - 1) // self.layout.length] += 1
        here = slice(writer.cursor, writer.cursor + end - begin)
        frames = slice(here.start, here.stop + 1)
        self.frames[frames] = rows.frames[begin : end + 1].reshape(end - begin + 1, -1)
        self.age[frames] = ages(rows.start[begin : end + 1], int(self.age[here.start]), self.layout.env.frame_stack - 1)
        self.action[here] = rows.action[begin:end]
        self.reward[here] = rows.reward[begin:end]
        self.terminated[here] = rows.terminated[begin:end]
        valid = np.concatenate([np.ones(writer.pending, np.bool_), rows.valid[begin:end]])  # else they were decided
        ended = np.concatenate([np.zeros(writer.pending, np.bool_), rows.ended[begin:end]])
        first = here.start - writer.pending
        self.span[first : here.stop], writer.pending = spans(valid, ended, self.layout.n_step)
        writer.cursor = here.stop
        self.ready += int(np.count_nonzero(self.span[first : here.stop]))

    def _begin(self, stream: Stream, writer: _Writer | None, context: NDArray[Any]) -> _Writer:
        """Begin behind a gap: in the rest of the stream's block, or in a new one."""
        older = len(context)
        if writer is not None and writer.cursor + older + 2 < writer.stop:
            writer = _Writer(cursor=writer.cursor + 1 + older, stop=writer.stop)
        else:
            base = self._recycle()
            writer = _Writer(cursor=base + older, stop=base + self.layout.length)
        self._own(stream, writer)
        self._writes[(writer.stop - 1) // self.layout.length] += 1
        self.frames[writer.cursor - older : writer.cursor] = context.reshape(older, self.frames.shape[1])
        self.age[writer.cursor] = older
        return writer

    def _continue(self, stream: Stream, full: _Writer) -> _Writer:
        """Continue in a new block, with copies of the rows of incomplete windows and of the frames of their stacks."""
        older = self.layout.env.frame_stack - 1
        base = self._recycle()
        count = older + full.pending
        source, target = slice(full.cursor - count, full.cursor + 1), slice(base, base + count + 1)
        for array in (self.frames, self.action, self.reward, self.terminated, self.age):
            array[target] = array[source]
        writer = _Writer(cursor=base + count, stop=base + self.layout.length, pending=full.pending)
        self._own(stream, writer)
        return writer

    def _own(self, stream: Stream, writer: _Writer) -> None:
        before = self._writers.get(stream)
        if before is not None:
            self._owner.pop((before.stop - 1) // self.layout.length, None)
        self._writers[stream] = writer
        self._owner[(writer.stop - 1) // self.layout.length] = stream

    def _recycle(self) -> int:
        """Empty the oldest block; return its first position."""
        block = self._begun % self.layout.blocks
        self._begun += 1
        self._writes[block] += 1
        base = block * self.layout.length
        span = self.span[base : base + self.layout.length]
        self.ready -= int(np.count_nonzero(span))
        span.fill(0)
        if (owner := self._owner.pop(block, None)) is not None:
            self._writers.pop(owner, None)
        return base

    def segments(self) -> list[Segment]:
        """Return the segments of all blocks that were ever begun."""
        arrays = (self.frames, self.action, self.reward, self.terminated, self.age, self.span)
        begun = min(self._begun, self.layout.blocks)
        return segments(arrays, self._writes[:begun], rows=self.layout.length)

    def state_dict(self) -> dict[str, Any]:
        """Return the state without the segments, in plain values; streams must be plain."""
        writers = [[stream, writer.cursor, writer.stop, writer.pending] for stream, writer in self._writers.items()]
        return {"layout": self.layout.described(), "begun": self._begun, "ready": self.ready, "writers": writers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; the caller then fills the `segments`. Raises `ResourceError` for a memory of another layout."""
        require_layout(state["layout"], self.layout.described())
        self._begun, self.ready = state["begun"], state["ready"]
        self._writers.clear()
        self._owner.clear()
        for stream, cursor, stop, pending in state["writers"]:
            self._own(stream, _Writer(cursor=cursor, stop=stop, pending=pending))


def block_rows(frame_stack: int, *, capacity: EnvSteps, n_step: int, streams: int) -> int:
    """Return the rows that each block of a memory adds to those before it.

    Raises `ConfigError` for a capacity too small for `streams` environments that write concurrently.
    """
    repeated = frame_stack + n_step - 1
    least = _LEAST_BLOCKS * streams * repeated
    if capacity < least:
        raise ConfigError(
            "algorithm.replay_capacity",
            found=capacity,
            wanted=f"at least {least}: {_LEAST_BLOCKS} blocks of {repeated} for each of {streams} environments",
            fix="raise it, or lower actor.count or env.num_envs",
        )
    return min(_FRESH_PER_REPEATED * repeated, capacity // (_LEAST_BLOCKS * streams))


def segments(arrays: Collection[NDArray[Any]], writes: NDArray[np.int64], *, rows: int) -> list[Segment]:
    """Return segments of about `SEGMENT_BYTES` each, of whole units of so many `rows` of all `arrays`.

    `writes` [units] has how often this process wrote to each of the units from the first on.
    """
    unit = rows * sum(array[:1].nbytes for array in arrays)
    step, used = max(1, SEGMENT_BYTES // unit), len(writes)
    return [
        Segment(
            key=f"{first}-{last}-{writes[first:last].sum()}",
            parts=[array[first * rows : last * rows].reshape(-1).view(np.uint8).data for array in arrays],
        )
        for first, last in ((first, min(first + step, used)) for first in range(0, used, step))
    ]


def nbytes(arrays: ArrayForms) -> int:
    """Bytes of arrays of these shapes and dtypes."""
    return sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in arrays.values())


def described(env: EnvSpec, arrays: ArrayForms) -> dict[str, Any]:
    """What every memory's saved contents depend on, in JSON values."""
    return {"arrays": {name: [list(shape), dtype] for name, (shape, dtype) in arrays.items()}, "frame_stack": env.frame_stack}


def require_layout(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise `ResourceError` where the `saved` contents of a memory are of another layout than its `own`."""
    if saved != own:
        found, wanted = ({name: each.get(name) for name in own if saved.get(name) != own[name]} for each in (saved, own))
        fix = "resume with its replay settings, actor.count and env.num_envs, or with checkpoint.replay=false to refill it"
        raise ResourceError("the checkpoint's replay memory is of another layout", found=found, wanted=wanted, fix=fix)


def ages(start: NDArray[np.bool_], first: int, most: int) -> NDArray[np.int64]:
    """Number of older frames of its episode before each frame [R], at most `most`; `first` for frame 0 if it starts none."""
    index = np.arange(len(start))
    begun = np.maximum.accumulate(np.where(start, index, -first))
    return np.minimum(index - begun, most)


def spans(valid: NDArray[np.bool_], ended: NDArray[np.bool_], n_step: int) -> tuple[NDArray[np.int64], int]:
    """Return the length of the window of each row [R] or [R, N]: n, or fewer up to the end of the episode or an invalid row.

    It is 0 for invalid rows and where the window needs rows behind R. Also return the number of the latter.
    """
    index = np.arange(len(valid)).reshape(-1, *[1] * (valid.ndim - 1))
    cut = np.where(~valid, index, np.where(ended, index + 1, np.iinfo(np.int64).max))
    cut = np.minimum.accumulate(cut[::-1])[::-1]
    stop = np.minimum(cut, index + n_step)
    complete = stop <= len(valid)
    return np.where(complete, stop - index, 0), int(np.count_nonzero(~complete))
