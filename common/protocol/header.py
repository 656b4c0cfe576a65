"""Part 0 of a message: a msgpack map, packed and unpacked within the limits.

msgpack turns one byte into much memory (an empty map: 1 byte in, 64 out), and its own limits bound each container but
not their sum. So values and containers are counted first, in a walk over the bytes unless these are too few to pass a limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgpack

from common.errors import DecodeError, InternalError
from common.protocol.limits import HEADER_BYTES, HEADER_CONTAINERS, HEADER_VALUES, STRING_BYTES

# The first byte of a msgpack value gives its kind; that of small ones holds their number or length too.
_SMALL_MAP, _SMALL_LIST, _SHORT_STRING, _OTHERS, _NEGATIVE = 0x80, 0x90, 0xA0, 0xC0, 0xE0
# First byte of a msgpack value -> bytes after it (numbers), or bytes of the length after it (strings, containers).
_SIZES: Final = (
    {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8} | {0xCC + i: 1 << i for i in range(4)} | {0xD0 + i: 1 << i for i in range(4)}
)
_STRINGS: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_CONTAINERS: Final = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}  # and values per entry: 2 in a map
_SMALL_CONTAINERS: Final = bytes(range(_SMALL_MAP, _SHORT_STRING))  # of at most 15 entries
_LARGE_CONTAINERS: Final = bytes(_CONTAINERS)


def pack(fields: Mapping[str, object]) -> bytes:
    """`fields` as msgpack. Raises `InternalError` where they are no header that the other side would take."""
    try:
        data: bytes = msgpack.packb(fields)
        if not _within_limits(data):
            check_structure(data)
    except (TypeError, ValueError, OverflowError, DecodeError) as error:
        raise InternalError(f"header cannot be sent: {error}") from error
    return data


def unpack(frame: bytes | memoryview) -> dict[str, Any]:
    """Return the map in `frame`. Raises `DecodeError`; allocates at most a few times its length plus a fixed floor."""
    size = memoryview(frame).nbytes
    if size > HEADER_BYTES:
        raise DecodeError("bytes of the header", found=size, wanted=f"at most {HEADER_BYTES}")
    data = bytes(frame)
    if not _within_limits(data):
        check_structure(data)
    try:
        fields = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_str_len=STRING_BYTES,
            max_bin_len=STRING_BYTES,
            max_array_len=HEADER_VALUES,
            max_map_len=HEADER_VALUES,
            max_ext_len=0,
            ext_hook=_refuse_extension,
        )
    except (ValueError, msgpack.UnpackException) as error:  # among them keys that are no strings, and broken UTF-8
        check_structure(data)
        raise DecodeError(f"header is not msgpack: {type(error).__name__}") from None
    if not isinstance(fields, dict):
        raise DecodeError("header", found=type(fields).__name__, wanted="a map")
    return fields


def _within_limits(data: bytes) -> bool:
    """Return whether `data` is surely within the limits, because it has fewer bytes than they allow values and containers.

    Most headers are, and need no walk: each value has a byte of its own, the first byte of a container is one of few, and only
    a large container makes msgpack allocate for more entries than it has bytes.
    """
    return (
        len(data) <= HEADER_VALUES
        and len(data.translate(None, _LARGE_CONTAINERS)) == len(data)
        and len(data) - len(data.translate(None, _SMALL_CONTAINERS)) <= HEADER_CONTAINERS
    )


def _refuse_extension(code: int, content: bytes) -> None:
    raise ValueError(f"extension type {code} of {len(content)} bytes")


def check_structure(data: bytes) -> None:
    """Walk one msgpack value without building it. Raises `DecodeError` at the first limit passed, or where bytes are missing."""
    if len(data) > HEADER_BYTES:
        raise DecodeError("bytes of the header", found=len(data), wanted=f"at most {HEADER_BYTES}")
    position, missing, values, containers = 0, 1, 1, 0
    try:
        while missing:
            first = data[position]
            position += 1
            missing -= 1
            if first < _SMALL_MAP or first >= _NEGATIVE:  # a small integer
                continue
            if _SHORT_STRING <= first < _OTHERS:  # a short string
                position += first & 0x1F
            elif first in _SIZES:
                position += _SIZES[first]
            elif first in _STRINGS:
                position += _STRINGS[first] + _length(data, position, _STRINGS[first], STRING_BYTES)
            else:
                size, entries = _entries(data, position, first)
                position += size
                missing += entries
                values += entries
                containers += 1
                if values > HEADER_VALUES or containers > HEADER_CONTAINERS:
                    raise DecodeError(
                        "header", found=f"{values} values in {containers} maps and lists or more",
                        wanted=f"at most {HEADER_VALUES} in {HEADER_CONTAINERS}",
                    )  # fmt: skip
    except IndexError:
        raise DecodeError("header ends too early", found=len(data)) from None
    if position != len(data):
        raise DecodeError("bytes of the header", found=len(data), wanted=position)


def _entries(data: bytes, position: int, first: int) -> tuple[int, int]:
    """Bytes of the length field of the container that `first` opens, and the number of values inside."""
    if first < _SHORT_STRING:
        return 0, (first & 0x0F) * (2 if first < _SMALL_LIST else 1)
    if first not in _CONTAINERS:  # extension types, and 0xc1, which msgpack never uses
        raise DecodeError("header", found=f"type byte 0x{first:02x}", wanted="maps, lists, strings, numbers, booleans")
    size, each = _CONTAINERS[first]
    return size, _length(data, position, size, HEADER_VALUES) * each


def _length(data: bytes, position: int, size: int, most: int) -> int:
    if position + size > len(data):
        raise IndexError
    length = int.from_bytes(data[position : position + size], "big")
    if length > most:
        raise DecodeError("length in the header", found=length, wanted=f"at most {most}")
    return length
