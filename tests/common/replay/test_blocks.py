"""The layout's arithmetic, and the two rules by which rows become windows and stacks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.envs.spec import ActionSpec, EnvSpec
from common.errors import ConfigError
from common.replay.blocks import BlockLayout, Blocks, ages, spans
from common.replay.rows import EnvironmentRows

pytestmark = pytest.mark.pure

ENV = EnvSpec(
    observation_shape=(84, 84), observation_dtype="uint8", action=ActionSpec(choices=(6,), shape=()), frame_stack=4, frame_skip=4
)


@pytest.mark.parametrize("n_step", [1, 3, 10])
def test_little_is_stored_twice(n_step: int) -> None:
    """Frames beyond one per env step are under 3 %, and so is what lies beside the frames."""
    layout = BlockLayout.plan(ENV, capacity=1_000_000, n_step=n_step, streams=64)
    assert layout.capacity <= layout.positions < 1.03 * layout.capacity
    assert layout.nbytes < 1.03 * layout.positions * 84 * 84


@given(st.integers(1, 300_000), st.integers(1, 20), st.integers(1, 256))
def test_a_layout_holds_what_was_asked_for_or_says_why_not(capacity: int, n_step: int, streams: int) -> None:
    """At least the capacity, at most a block more, and ten blocks for each environment that writes."""
    least = 10 * streams * (4 + n_step - 1)
    if capacity < least:
        with pytest.raises(ConfigError, match=f"found {capacity}, wanted at least {least}"):
            BlockLayout.plan(ENV, capacity=capacity, n_step=n_step, streams=streams)
        return
    layout = BlockLayout.plan(ENV, capacity=capacity, n_step=n_step, streams=streams)
    assert capacity <= layout.capacity < capacity + layout.fresh
    assert layout.blocks >= 10 * streams


@pytest.mark.parametrize("n_step", [0, 256])
def test_windows_that_cannot_be_kept_are_refused(n_step: int) -> None:
    """A span is one byte, and 0 says that there is none."""
    with pytest.raises(ConfigError, match="n-step windows"):
        BlockLayout.plan(ENV, capacity=1_000_000, n_step=n_step, streams=1)


def test_the_bytes_are_those_of_the_arrays() -> None:
    """The planned bytes are those allocated."""
    layout = BlockLayout.plan(ENV, capacity=2_000, n_step=3, streams=1)
    blocks = Blocks(layout)
    arrays = [getattr(blocks, name) for name in layout.arrays()]
    assert sum(array.nbytes for array in arrays) == layout.nbytes


rows = st.integers(0, 12).flatmap(
    lambda size: st.tuples(*[st.lists(st.booleans(), min_size=size, max_size=size).map(np.array) for _ in range(2)])
)


@given(rows, st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_spans_follow_the_definition(flags: tuple[np.ndarray, np.ndarray], n_step: int) -> None:
    """Walk on from each row: to n, to the end of the episode, or to a row that does not count, whichever is first."""
    valid, ended = (each.astype(bool) for each in flags)
    found, pending = spans(valid, ended, n_step)
    waiting = 0
    for row in range(len(valid)):
        length, known = 0, False
        while not known:
            at = row + length
            if at < len(valid) and valid[at]:
                length += 1
                known = ended[at] or length == n_step
            else:
                known = at < len(valid)
                break
        assert found[row] == (length if known else 0)
        waiting += not known
    assert pending == waiting
    assert not found[len(valid) - pending :].any()  # those that wait are the last


def test_ages_count_from_the_start_or_from_before() -> None:
    """The first frame goes on from what was known, unless an episode starts with it."""
    start = np.array([False, False, True, False, False, False, True])
    np.testing.assert_array_equal(ages(start, 1, 3), [1, 2, 0, 1, 2, 3, 0])
    start[0] = True
    np.testing.assert_array_equal(ages(start, 1, 2), [0, 1, 0, 1, 2, 2, 0])


def test_a_window_that_missing_rows_cut_behind_a_full_block_does_not_terminate() -> None:
    """Its rows are copied to a recycled block, in which each row had terminated."""
    layout = BlockLayout(env=replace(ENV, observation_shape=(1,), frame_stack=1), n_step=3, blocks=4, fresh=8)
    blocks = Blocks(layout)

    def extend(rows: int, *, over: bool, follows: bool, valid: bool = True) -> None:
        flags, no = np.full(rows, over), np.zeros(rows + 1, np.bool_)
        frames = np.zeros((rows + 1, 1), np.uint8)
        of_one = EnvironmentRows(
            context=frames[:0],
            frames=frames,
            start=no,
            action=np.zeros(rows, np.int64),
            reward=np.zeros(rows, np.float32),
            terminated=flags,
            ended=flags,
            valid=np.full(rows, valid),
        )
        blocks.extend(("a", 0), of_one, follows=follows)

    extend(layout.blocks * (layout.length - 1), over=True, follows=False)
    extend(layout.length - 1, over=False, follows=False)  # fills a block; the last two rows wait for later ones
    extend(1, over=False, follows=True, valid=False)
    first = layout.length  # the block that was recycled next
    assert blocks.span[first : first + 3].tolist() == [2, 1, 0]
    assert not blocks.terminated[first : first + 3].any()


def test_a_memory_takes_pages_as_it_is_written() -> None:
    """So one that is too large is refused by its size before it fills the machine, also where allocating it succeeds."""
    layout = BlockLayout.plan(replace(ENV, observation_shape=(1,)), capacity=1 << 28, n_step=3, streams=16)
    before = psutil.Process().memory_info().rss
    blocks = Blocks(layout)
    assert psutil.Process().memory_info().rss - before < 1 << 26
    assert not blocks.span[-1000:].any()
