"""Plain values to bytes and back, and bytes that are none."""

from __future__ import annotations

import math
from contextlib import suppress

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from common.errors import DecodeError, InternalError
from common.protocol.plain import is_plain, pack, unpack

pytestmark = pytest.mark.pure

SCALARS = st.none() | st.booleans() | st.integers(-(2**140), 2**140) | st.floats(allow_nan=False) | st.text(max_size=5)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@given(TREES)
def test_what_was_packed_is_what_comes_back(tree):
    """Types too: a tuple is no list, 1 is no True, a key 1 is no key "1"."""
    found = unpack(pack(tree))
    assert found == tree
    assert repr(found) == repr(tree)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "uint32", "uint64", "int64", "float16", "float32", "float64"])
def test_arrays_and_their_scalars_keep_dtype_shape_and_every_bit(dtype):
    """A float32 scalar is no float: what it is added to would be rounded otherwise."""
    array = np.arange(12).reshape(3, 4).astype(dtype)
    for value in (array, array[:, ::2], array.T, array[1, 1], np.array(array[0, 0]), array[:0]):
        found = unpack(pack({"value": value}))["value"]
        assert type(found) is type(value)
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        assert np.array_equal(found, value)


def test_one_array_in_two_places_is_one_array_again():
    array = np.arange(3)
    first, (second, other) = unpack(pack([array, (array, array.copy())]))
    assert first is second
    assert first is not other


def test_infinities_and_nan_come_back():
    """An environment may hold them."""
    low, high, none = unpack(pack([-math.inf, math.inf, math.nan]))
    assert (low, high) == (-math.inf, math.inf)
    assert math.isnan(none)


class Text(str):
    """A string with more to it."""

    __slots__ = ()


@pytest.mark.parametrize("value", [object(), {1, 2}, {(1, 2): 3}, Text("x"), np.array(["x"]), np.array([None]), len, 1j])
def test_what_is_not_plain_is_not_packed(value):
    """Objects would need pickle."""
    assert not is_plain([value])
    with pytest.raises(InternalError):
        pack({"a": [value]})


GOOD = pack({"a": [1, np.arange(5)], "b": (True, None)}).tobytes()


@given(st.binary(max_size=200) | st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)))
def test_any_bytes_are_plain_values_or_an_error(damage):
    """Random bytes, and one byte changed in good ones."""
    if isinstance(damage, tuple):
        place, value = damage
        data = bytearray(GOOD)
        data[place] = value
    else:
        data = damage
    with suppress(DecodeError):
        assert is_plain(unpack(np.frombuffer(bytes(data), np.uint8)))


@pytest.mark.parametrize(
    "structure",
    [b"", b"[]", b"[1]", b"{}", b'{"rope": 1}', b'{"array": "9"}', b'{"array": [1]}', b'{"mapping": 3}',
     b'{"mapping": [[[1], 2]]}', b'{"list": 1}', b'{"a": 1, "b": 2}', b"\xff", b'{"list": [' * 50_000, b"9" * 5_000],
)  # fmt: skip
def test_a_structure_of_another_kind_is_one_clear_error(structure):
    """A file that is whole, and speaks of what is not there."""
    data = safetensors.numpy.save({"structure": np.frombuffer(structure, np.uint8)})
    with pytest.raises(DecodeError, match="packed values"):
        unpack(np.frombuffer(data, np.uint8))
