"""Arrays on the wire: an ndarray as one raw little-endian, C-ordered buffer, and back without a copy.

The declared dtype and shape are checked against the length of the buffer, and arrays that arrive are read-only. No dtype but the
eight below can be named, so no object ever comes out of a buffer.
"""

from __future__ import annotations

import math
import reprlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from common.errors import DecodeError, DropReason, InternalError, ProtocolError
from common.protocol.limits import ARRAY_BYTES, ARRAY_NAME_BYTES, ARRAY_RANK, FREE_LENGTH

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from common.protocol.messages import Arrays, ArraySpec

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
_NO_DTYPE: Final = np.dtype(object)
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_BYTE: Final = np.dtype(np.uint8)


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
    if kind.kind == "b" and found and (most := int(np.maximum.reduce(array.view(_BYTE), axis=None))) > 1:
        raise DecodeError(f"bytes of bool array {name}", found=most, wanted="0 or 1")
    if not array.flags.aligned:  # torch takes the pointer as it is
        array = array.copy()
    array.flags.writeable = False
    return array


def _check_shape(name: str, shape: Sequence[object]) -> None:
    if len(shape) > ARRAY_RANK:
        raise DecodeError(f"dimensions of array {name}", found=len(shape), wanted=f"at most {ARRAY_RANK}")
    # Each length has a limit of its own: beside a 0 the product would not show one that numpy cannot hold.
    for length in shape:
        if type(length) is not int or not 0 <= length <= ARRAY_BYTES:
            raise DecodeError(f"shape of array {name}", found=reprlib.repr(length), wanted=f"lengths from 0 to {ARRAY_BYTES}")


def check_schema(arrays: Arrays, schema: Sequence[ArraySpec]) -> None:
    """Raise `ProtocolError` (schema) unless `arrays` are exactly those of `schema`; a length of -1 is free up to a limit."""
    for spec in schema:
        array = arrays.get(spec.name)
        if array is None:
            raise ProtocolError(DropReason.SCHEMA, f"array {spec.name}", found="none", wanted=_described(spec.dtype, spec.shape))
        # A dtype's `name` takes longer than all the rest of the check, so it is only looked up for the sentence.
        if array.dtype != DTYPES.get(spec.dtype, _NO_DTYPE) or not _fits(array.shape, spec.shape):
            found = _described(array.dtype.name, array.shape)
            raise ProtocolError(DropReason.SCHEMA, f"array {spec.name}", found=found, wanted=_described(spec.dtype, spec.shape))
    if len(arrays) != len(schema):
        surplus = sorted(set(arrays) - {spec.name for spec in schema})
        raise ProtocolError(DropReason.SCHEMA, "arrays outside the schema", found=surplus, wanted=[spec.name for spec in schema])


def _fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return shape == wanted or (
        len(shape) == len(wanted)
        and all(length == want or (want == -1 and length <= FREE_LENGTH) for length, want in zip(shape, wanted, strict=True))
    )


def _described(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype} {list(shape)}"


def check_numbers(arrays: Arrays, largest: Mapping[str, float] = MappingProxyType({})) -> None:
    """Raise `ProtocolError` where a float array holds NaN or infinity (non_finite), or more than its `largest` (out_of_range)."""
    with np.errstate(all="ignore"):
        for name, array in arrays.items():
            if array.dtype.kind != "f" or not array.size:
                continue
            limit = largest.get(name, math.inf)
            if not (_finite(array) if limit == math.inf else _between(array, -limit, limit)):
                raise _bad_number(name, array, limit)


def _bad_number(name: str, array: np.ndarray, limit: float) -> ProtocolError:
    finite = np.isfinite(array)
    row = tuple(int(i) for i in np.argwhere(~(finite & (np.abs(array) <= limit)))[0])
    fact, found = f"array {name} at {list(row)}", str(array[row])
    if not finite[row]:
        return ProtocolError(DropReason.NON_FINITE, fact, found=found, wanted="finite numbers")
    fix = "scale it in the environment"
    return ProtocolError(DropReason.OUT_OF_RANGE, fact, found=found, wanted=f"at most {limit:,} either way", fix=fix)


def _between(array: np.ndarray, least: float, most: float) -> bool:
    """Return whether all values, of at least one, are in the range; no for NaN."""
    return bool(least <= np.minimum.reduce(array, axis=None) and np.maximum.reduce(array, axis=None) <= most)


def _finite(array: np.ndarray) -> bool:
    # One bad value spoils the sum, so a finite sum clears the array in one pass that allocates nothing.
    # A sum can also overflow by itself; only then is each value looked at.
    return math.isfinite(np.add.reduce(array, axis=None)) or bool(np.isfinite(array).all())
