"""The stack function against its definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.envs.spec import ActionSpec, EnvSpec
from common.envs.stacking import FrameStacker, stack
from common.errors import InternalError

pytestmark = pytest.mark.pure


def slow_stack(frames: np.ndarray, start: np.ndarray) -> np.ndarray:
    """One channel at a time: walk back from the newest frame and stop at the first of the episode."""
    rows, num_envs = start.shape
    size = len(frames) - rows + 1
    stacks = np.zeros((rows, num_envs, size, *frames.shape[2:]), frames.dtype)
    for row in range(rows):
        for env in range(num_envs):
            for age in range(size):
                stacks[row, env, size - 1 - age] = frames[row + size - 1 - age, env]
                if row - age >= 0 and start[row - age, env]:
                    break
    return stacks


@st.composite
def recorded(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Frames and starts of a rollout: random sizes, from no episode end to one in every row."""
    rows, num_envs, size = draw(st.integers(1, 9)), draw(st.integers(1, 3)), draw(st.integers(2, 5))
    shape = draw(st.sampled_from([(2, 3), (2,), (2, 2, 3)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    frames = rng.integers(1, 256, (rows + size - 1, num_envs, *shape), dtype=np.uint8)
    return frames, rng.random((rows, num_envs)) < draw(st.sampled_from([0.0, 0.2, 0.6, 1.0]))


@given(recorded())
@settings(max_examples=80, deadline=None)
def test_stacks_follow_the_definition(rollout: tuple[np.ndarray, np.ndarray]) -> None:
    """A learner turns a whole rollout into stacks, with episode ends anywhere, two in a row included."""
    frames, start = rollout
    np.testing.assert_array_equal(stack(frames, start), slow_stack(frames, start))


@given(recorded())
@settings(max_examples=60, deadline=None)
def test_stacks_step_by_step_are_those_of_the_whole(rollout: tuple[np.ndarray, np.ndarray]) -> None:
    """An actor stacks one row at a time; the learner stacks all rows at once."""
    frames, start = rollout
    size = len(frames) - len(start) + 1
    start[0] = True
    stacker = FrameStacker(frames[size - 1], size)
    seen = [stacker.observation.copy()]
    for row in range(1, len(start)):
        stacker.push(frames[row + size - 1], start[row])
        seen.append(stacker.observation.copy())
    np.testing.assert_array_equal(np.stack(seen), stack(frames, start))


@given(recorded(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_rollout_cut_in_two_gives_the_same_stacks(rollout: tuple[np.ndarray, np.ndarray], data: st.DataObject) -> None:
    """A rollout ends and the next begins in the middle of an episode: the frames of the newest stack carry all that is needed."""
    frames, start = rollout
    size = len(frames) - len(start) + 1
    cut = data.draw(st.integers(1, len(start)))  # the last row of one rollout is the first of the next
    newest = np.moveaxis(stack(frames[: cut + size - 1], start[:cut])[-1], 1, 0)
    np.testing.assert_array_equal(
        stack(np.concatenate([newest, frames[cut + size - 1 :]]), start[cut - 1 :]), stack(frames, start)[cut - 1 :]
    )


@pytest.mark.parametrize("frame", [(5,), (4, 6), (3, 4, 6)])
@pytest.mark.parametrize("size", [1, 3])
def test_a_stack_has_the_shape_that_the_network_expects(frame: tuple[int, ...], size: int) -> None:
    """The network is built from the environment's description and must fit what the stack function makes."""
    spec = EnvSpec(
        observation_shape=frame,
        observation_dtype="float32",
        action=ActionSpec(choices=(2,), shape=()),
        frame_stack=size,
        frame_skip=1,
    )
    frames = np.random.default_rng(0).random((2 + size - 1, 7, *frame), dtype=np.float32)
    stacks = stack(frames, np.zeros((2, 7), np.bool_))
    assert stacks.shape == (2, 7, *spec.network_input_shape)
    assert stacks.dtype == np.float32
    assert FrameStacker(frames[-1], size).observation.shape == stacks.shape[1:]


def test_frames_and_starts_of_different_rollouts_are_refused() -> None:
    """A mistake of ours: arrays of two rollouts or two actors mixed up."""
    with pytest.raises(InternalError, match="do not belong together"):
        stack(np.ones((2, 2, 5)), np.zeros((4, 2), np.bool_))
    with pytest.raises(InternalError, match="do not belong together"):
        stack(np.ones((4, 3, 5)), np.zeros((4, 2), np.bool_))
