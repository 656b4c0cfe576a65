"""A message taken apart: both autoreset modes read the same."""

from __future__ import annotations

import numpy as np
import pytest

from common.replay.rows import rows_by_environment

pytestmark = pytest.mark.pure


def message(**given: list[object]) -> dict[str, np.ndarray]:
    """Four rows of two environments, S = 2, frames numbered; nothing ends."""
    arrays = {
        "obs": np.arange(12.0, dtype=np.float32).reshape(6, 2, 1),
        "start": np.zeros((5, 2), np.bool_),
        "action": np.arange(10, 18).reshape(4, 2),
        "reward": np.arange(8, dtype=np.float32).reshape(4, 2),
        "terminated": np.zeros((4, 2), np.bool_),
        "truncated": np.zeros((4, 2), np.bool_),
        "valid": np.ones((4, 2), np.bool_),
        "final_obs": np.zeros((0, 1), np.float32),
        "final_index": np.zeros(0, np.int32),
    }
    for name, values in given.items():
        arrays[name] = np.array(values, arrays[name].dtype)
    return arrays


def test_a_column_is_what_one_environment_did() -> None:
    """Views of the message, context apart."""
    _, column = rows_by_environment(message())
    np.testing.assert_array_equal(column.context.ravel(), [1])
    np.testing.assert_array_equal(column.frames.ravel(), [3, 5, 7, 9, 11])
    np.testing.assert_array_equal(column.action, [11, 13, 15, 17])
    assert column.valid.all()


def test_a_last_frame_sent_apart_takes_its_place() -> None:
    """Row 1 of environment 1 was cut off and reset at once: its last frame goes before the first of the next episode."""
    arrays = message(final_index=[3], final_obs=[[99.0]])
    arrays["truncated"][1, 1] = arrays["start"][2, 1] = True
    other, column = rows_by_environment(arrays)
    assert other.rows == 4
    np.testing.assert_array_equal(column.frames.ravel(), [3, 5, 99, 7, 9, 11])
    np.testing.assert_array_equal(column.start, [0, 0, 0, 1, 0, 0])
    np.testing.assert_array_equal(column.valid, [1, 1, 0, 1, 1])
    np.testing.assert_array_equal(column.ended, [0, 1, 0, 0, 0])
    np.testing.assert_array_equal(column.action[column.valid], [11, 13, 15, 17])


def test_a_last_frame_that_no_end_asks_for_is_left_out() -> None:
    """As is one that comes twice, or after which no episode begins: a worker may send anything that fits the schema."""
    arrays = message(final_index=[3, 3, 5, 7], final_obs=[[99.0], [98.0], [97.0], [96.0]])
    arrays["truncated"][1, 1] = arrays["start"][2, 1] = arrays["truncated"][3, 1] = True
    _, column = rows_by_environment(arrays)
    np.testing.assert_array_equal(column.frames.ravel(), [3, 5, 99, 7, 9, 11])


def test_a_start_without_an_end_is_no_transition() -> None:
    """The first frame of a replaced environment does not follow the action; after a termination no frame is needed."""
    arrays = message()
    arrays["start"][2, 1] = arrays["start"][4, 1] = arrays["terminated"][3, 1] = True
    _, column = rows_by_environment(arrays)
    np.testing.assert_array_equal(column.valid, [1, 0, 1, 1])
