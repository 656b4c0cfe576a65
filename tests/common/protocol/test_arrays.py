"""Raw buffers as arrays, and arrays against the run's schema."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import DecodeError, DropReason, InternalError, ProtocolError
from common.protocol import limits
from common.protocol.arrays import DTYPES, from_buffer, layout, to_buffer
from common.protocol.content import check_numbers, check_schema
from common.protocol.messages import ArraySpec

pytestmark = pytest.mark.wire

SCHEMA = (
    ArraySpec(name="obs", dtype="uint8", shape=(5, 2, 4)),
    ArraySpec(name="reward", dtype="float32", shape=(4, 2)),
    ArraySpec(name="episode_return", dtype="float32", shape=(-1,)),
)


def rollout(**changes: np.ndarray) -> dict[str, np.ndarray]:
    """Arrays that fit the schema, but for `changes`."""
    good = {
        "obs": np.zeros((5, 2, 4), np.uint8),
        "reward": np.zeros((4, 2), np.float32),
        "episode_return": np.zeros(3, np.float32),
    }
    return good | changes


@given(
    st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 5), max_size=limits.ARRAY_RANK), st.randoms(use_true_random=False)
)
def test_bits_survive(dtype: str, shape: list[int], random: object) -> None:
    """Any dtype and shape: NaNs and negative zeros too, since a buffer is only bytes."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    data = bytes(random.getrandbits(1 if dtype == "bool" else 8) for _ in range(size))
    array = np.frombuffer(data, dtype).reshape(shape)
    found = from_buffer(layout("x", dtype, shape), to_buffer("x", array))
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, data)


def test_a_view_that_is_not_contiguous_is_sent_in_order() -> None:
    """An actor sends every second environment of a larger rollout: a copy is made, the values are right."""
    array = np.arange(24, dtype=np.int32).reshape(4, 6)[:, ::2].T
    assert from_buffer(layout("x", "int32", [3, 4]), to_buffer("x", array)).tolist() == array.tolist()


def test_the_wire_is_little_endian_whatever_the_machine() -> None:
    """An array in the other byte order is turned around before it is sent."""
    assert bytes(to_buffer("x", np.array([1], ">i4"))) == b"\x01\x00\x00\x00"


def test_contiguous_arrays_are_not_copied() -> None:
    """A rollout is 14 MB: encoding it must not double it."""
    array = np.zeros((128, 16, 84, 84), np.uint8)
    tracemalloc.start()
    from_buffer(layout("obs", "uint8", array.shape), to_buffer("obs", array))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000


def test_an_array_of_an_unlisted_dtype_is_not_sent() -> None:
    """Objects and complex numbers have no place on the wire: our own bug."""
    for array in (np.array([{}]), np.zeros(1, np.complex64), np.array(["text"])):
        with pytest.raises(InternalError, match="array x cannot be sent"):
            to_buffer("x", array)


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "size", "sentence"),
    [
        ("obs", "object", [1], 8, "dtype of array obs: found 'object', wanted bool, uint8"),
        ("obs", "O", [1], 8, "dtype of array"),
        ("obs", ">f4", [1], 4, "dtype of array"),
        ("obs", "V8", [1], 8, "dtype of array"),
        ("a\nb", "uint8", [1], 1, r"name of an array: found 'a\\nb', wanted an identifier"),
        ("", "uint8", [1], 1, "name of an array"),
        ("a" * 65, "uint8", [1], 1, "name of an array"),
        ("obs", "uint8", [3], 2, r"bytes of array obs \[3\] uint8: found 2, wanted 3"),
        ("obs", "float32", [3], 13, "found 13, wanted 12"),
        ("obs", "uint8", [-1], 1, "shape of array obs: found -1, wanted lengths from 0"),
        ("obs", "uint8", [True], 1, "shape of array obs: found True"),
        ("obs", "uint8", [1.0], 1, "shape of array obs: found 1.0"),
        ("obs", "uint8", ["1"], 1, "shape of array obs: found '1'"),
        ("obs", "uint8", [0, 2**62], 0, "shape of array obs: found 4611686018427387904"),
        ("obs", "uint8", [2**28, 2], 0, rf"shape of array obs: found \[{2**28}, 2\], wanted at most {2**28} elements"),
        ("obs", "bool", [0, 2**28, 2**28, 2**28], 0, r"shape of array obs: found \[0, "),
        ("obs", "uint8", [1] * 9, 1, "dimensions of array obs: found 9, wanted at most 8"),
        ("done", "bool", [2], b"\x01\x02", "bytes of bool array done: found 2, wanted 0 or 1"),
    ],
)
def test_a_wrong_declaration_is_refused(name: str, dtype: str, shape: list[object], size: int | bytes, sentence: str) -> None:
    """A declared shape is a claim about the buffer, checked before an array exists."""
    with pytest.raises(DecodeError, match=sentence):
        from_buffer(layout(name, dtype, shape), size if isinstance(size, bytes) else bytes(size))


def test_an_array_over_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit holds even where buffer and declaration agree."""
    monkeypatch.setattr("common.protocol.arrays.ARRAY_BYTES", 7)
    with pytest.raises(DecodeError, match="found 8, wanted 7"):
        from_buffer(layout("x", "float64", [1]), bytes(8))


def test_an_unaligned_buffer_becomes_an_aligned_array() -> None:
    """A small frame may lie anywhere in the receive buffer, and torch takes pointers as they are."""
    array = from_buffer(layout("x", "float32", [2]), memoryview(b"\0" + np.array([1.5, 2.5], "<f4").tobytes())[1:])
    assert array.flags.aligned
    assert not array.flags.writeable
    assert array.tolist() == [1.5, 2.5]


def test_arrays_of_the_schema_pass() -> None:
    """Free lengths may be anything up to the limit, zero too."""
    check_schema(rollout(), SCHEMA)
    check_schema(rollout(episode_return=np.zeros(0, np.float32)), SCHEMA)
    check_schema(rollout(episode_return=np.zeros(limits.FREE_LENGTH, np.float32)), SCHEMA)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"obs": np.zeros((5, 2, 5), np.uint8)}, r"array obs: found uint8 \[5, 2, 5\], wanted uint8 \[5, 2, 4\]"),
        ({"obs": np.zeros((5, 2), np.uint8)}, r"array obs: found uint8 \[5, 2\]"),
        ({"reward": np.zeros((4, 2), np.float64)}, r"array reward: found float64 \[4, 2\], wanted float32 \[4, 2\]"),
        (
            {"episode_return": np.zeros((1, 1), np.float32)},
            r"array episode_return: found float32 \[1, 1\], wanted float32 \[-1\]",
        ),
        ({"episode_return": np.zeros(limits.FREE_LENGTH + 1, np.float32)}, "array episode_return: found"),
        (
            {"extra": np.zeros(1, np.uint8)},
            r"arrays outside the schema: found \['extra'\], wanted \['obs', 'reward', 'episode_return'\]",
        ),
    ],
)
def test_arrays_outside_the_schema_are_named(changes: dict[str, np.ndarray], sentence: str) -> None:
    """An actor of another run, or of another release: the refusal says which array, what came, what was wanted."""
    with pytest.raises(ProtocolError, match=sentence) as caught:
        check_schema(rollout(**changes), SCHEMA)
    assert caught.value.reason == DropReason.SCHEMA


def test_a_missing_array_is_named() -> None:
    """An actor that does not record the log-probability the algorithm needs."""
    arrays = rollout()
    del arrays["reward"]
    with pytest.raises(ProtocolError, match=r"array reward: found none, wanted float32 \[4, 2\]"):
        check_schema(arrays, SCHEMA)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_one_value_that_is_not_finite_is_found(bad: float, dtype: str) -> None:
    """A simulator blew up in one environment: training on its NaN would destroy the network."""
    reward = np.zeros((4, 2), dtype)
    reward[2, 1] = bad
    with pytest.raises(ProtocolError, match=rf"array reward at \[2, 1\]: found {bad}, wanted finite numbers") as caught:
        check_numbers(rollout(reward=reward))
    assert caught.value.reason == DropReason.NON_FINITE


def test_infinities_of_both_signs_do_not_cancel() -> None:
    """Their sum is NaN, never a finite number."""
    with pytest.raises(ProtocolError):
        check_numbers({"x": np.array([np.inf, -np.inf], np.float32)})


def test_large_finite_values_pass_although_their_sum_overflows() -> None:
    """Legal returns near the end of the range must not be called infinite."""
    check_numbers({"x": np.full(100, np.finfo(np.float32).max, np.float32), "none": np.zeros(0, np.float32)})


def test_integers_are_not_searched_for_infinities() -> None:
    """Frames and actions have none."""
    check_numbers({"obs": np.full(4, 255, np.uint8), "done": np.ones(3, bool)})


@pytest.mark.parametrize("value", [1e7 + 1, -3e38])
def test_a_number_beyond_its_limit_is_refused_with_what_to_do(value: float) -> None:
    """Finite, and squared it is not: one such reward would stop the training of DQN for good."""
    reward = np.array([0.0, 1e7, value], np.float32)
    with pytest.raises(
        ProtocolError, match=r"array reward at \[2\]: found .*, wanted at most 10,000,000 either way; scale"
    ) as refused:
        check_numbers({"x": np.full(2, 3e38, np.float32), "reward": reward}, {"reward": 10_000_000})
    assert refused.value.reason is DropReason.OUT_OF_RANGE
    check_numbers({"reward": reward[:2]}, {"reward": 10_000_000})


def test_nan_under_a_limit_is_not_finite() -> None:
    """Neither above nor below anything."""
    with pytest.raises(ProtocolError, match="found nan, wanted finite") as refused:
        check_numbers({"reward": np.array([0.0, np.nan], np.float32)}, {"reward": 1.0})
    assert refused.value.reason is DropReason.NON_FINITE
