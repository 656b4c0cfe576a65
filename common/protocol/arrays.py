"""Arrays on the wire: an ndarray as one raw little-endian, C-ordered buffer, and back without a copy.

The declared dtype and shape are checked against the length of the buffer, and arrays that arrive are read-only. No dtype but the
eight below can be named, so no object ever comes out of a buffer.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from common.errors import DecodeError, InternalError
from common.protocol.limits import ARRAY_BYTES, ARRAY_NAME_BYTES, ARRAY_RANK

DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "bool": np.dtype("?"),
    "uint8": np.dtype("u1"),
    "uint16": np.dtype("<u2"),  # also holds the bits of bfloat16
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
}
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_BYTE: Final = np.dtype(np.uint8)
_BOOL: Final = DTYPES["bool"]


def dtype_name(array: np.ndarray) -> str:
    """The name of the array's dtype; numpy composes it anew each time, which takes longer than all the rest of a message."""
    return _NAMES.get(array.dtype) or array.dtype.name


def to_buffer(name: str, array: np.ndarray) -> memoryview:
    """The bytes of `array`, not copied where it is C-contiguous: it must not be written to until they are sent."""
    dtype = DTYPES.get(dtype_name(array))
    if dtype is None:
        raise InternalError(f"array {name} cannot be sent", found=array.dtype.name, wanted=", ".join(DTYPES))
    # A flat view of bytes: casting a memoryview refuses arrays of length 0, a view does not.
    return np.ascontiguousarray(array, dtype=dtype).reshape(-1).view(_BYTE).data


class Layout(NamedTuple):
    """Declaration of an array that was checked."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int


def layout(name: str, dtype: str, shape: Sequence[int]) -> Layout:
    """The layout of a declared array. Raises `DecodeError` where it is none that may be sent."""
    if not name.isidentifier() or len(name) > ARRAY_NAME_BYTES:
        raise DecodeError("name of an array", found=repr(name[:ARRAY_NAME_BYTES]), wanted="an identifier")
    kind = DTYPES.get(dtype)
    if kind is None:
        raise DecodeError(f"dtype of array {name}", found=repr(dtype[:ARRAY_NAME_BYTES]), wanted=", ".join(DTYPES))
    _check_shape(name, shape)
    return Layout(name, kind, tuple(shape), math.prod(shape) * kind.itemsize)


def from_buffer(declared: Layout, buffer: bytes | memoryview) -> np.ndarray:
    """A read-only array on `buffer`, as declared. Raises `DecodeError` before anything is allocated."""
    name, kind, shape, wanted = declared
    found = len(buffer)
    if found != wanted or wanted > ARRAY_BYTES:
        raise DecodeError(f"bytes of array {name} {list(shape)} {kind.name}", found=found, wanted=min(wanted, ARRAY_BYTES))
    array: np.ndarray = np.ndarray(shape, kind, buffer=buffer)
    # numpy's loops assume that a bool is 0 or 1: any other byte would be neither true nor false.
    if kind is _BOOL and (others := bytes(buffer).translate(None, b"\0\1")):
        raise DecodeError(f"bytes of bool array {name}", found=max(others), wanted="0 or 1")
    if not array.flags.aligned:  # torch takes the pointer as it is
        array = array.copy()
    array.flags.writeable = False
    return array


def _check_shape(name: str, shape: Sequence[object]) -> None:
    if len(shape) > ARRAY_RANK:
        raise DecodeError(f"dimensions of array {name}", found=len(shape), wanted=f"at most {ARRAY_RANK}")
    elements = 1  # of the lengths beside a 0 too: numpy cannot hold any, though an empty buffer has the bytes of their product
    for length in shape:
        if type(length) is not int or not 0 <= length <= ARRAY_BYTES:
            raise DecodeError(f"shape of array {name}", found=reprlib.repr(length), wanted=f"lengths from 0 to {ARRAY_BYTES}")
        elements *= length or 1
    if elements > ARRAY_BYTES:
        raise DecodeError(f"shape of array {name}", found=list(shape), wanted=f"at most {ARRAY_BYTES} elements")
