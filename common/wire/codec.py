"""Envelope <-> list of byte frames: a msgpack header, then one raw buffer per array. Pure, and safe on any bytes.

    frame 0      {"v": 1, "tag": "trajectory", "run": "...", <fields of the message>, "arrays": [[name, dtype, shape], ...]}
    frame 1..n   the buffers, in the order of "arrays"

Only `DecodeError` (and its `ProtocolVersionError`) leaves `decode`, whatever the bytes. See `docs/protocol.md`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from common.errors import DecodeError, InternalError, ProtocolVersionError
from common.wire import fields, header
from common.wire.arrays import from_buffer, to_buffer
from common.wire.limits import ARRAYS, MESSAGE_BYTES
from common.wire.messages import MESSAGE_TYPES, PROTOCOL_VERSION, Arrays, Envelope, Message

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

RESERVED: Final = ("v", "tag", "run", "arrays")
"""Keys of the header that no message may use as a field. `v` and `tag` keep their place in every protocol version."""

_DECLARED: Final = 3  # name, dtype, shape
_TYPES: Final = {cls.tag: cls for cls in MESSAGE_TYPES}
_PLANS: Final = {cls.tag: fields.plan(cls, without=("arrays",)) for cls in MESSAGE_TYPES}


def encode(envelope: Envelope) -> list[bytes | memoryview]:
    """The frames of a message; array frames are views, so the arrays must not be written to until they are sent."""
    message, arrays = envelope.message, envelope.message.arrays
    buffers = [to_buffer(name, array) for name, array in arrays.items()]
    if len(buffers) > ARRAYS or sum(buffer.nbytes for buffer in buffers) > MESSAGE_BYTES:
        size = sum(buffer.nbytes for buffer in buffers)
        raise InternalError(
            "message too large", found=f"{len(buffers)} arrays, {size} bytes", wanted=f"{ARRAYS}, {MESSAGE_BYTES}"
        )
    first = {"v": PROTOCOL_VERSION, "tag": message.tag, "run": envelope.run}
    last = {"arrays": [[name, array.dtype.name, array.shape] for name, array in arrays.items()]}
    return [header.pack(first | fields.write(message, _PLANS[message.tag]) | last), *buffers]


def decode(frames: Sequence[bytes | memoryview]) -> Envelope:
    """The message in `frames`; its arrays are read-only views on them. Raises `DecodeError`."""
    if not frames:
        raise DecodeError("frames of a message", found=0, wanted="at least 1")
    found = header.unpack(frames[0])
    version = fields.integer(found.get("v"), "header.v", 0)
    if version != PROTOCOL_VERSION:
        raise ProtocolVersionError(found=version, wanted=PROTOCOL_VERSION)
    tag = fields.text(found.get("tag"), "header.tag")
    if tag not in _TYPES:
        raise DecodeError("message tag", found=fields.shown(tag), wanted=", ".join(_TYPES))
    run = fields.text(found.get("run"), "header.run")
    values = fields.read(found, _PLANS[tag], tag)
    return Envelope(run=run, message=_message(_TYPES[tag], values, _arrays(found.get("arrays", []), frames[1:])))


def _message(cls: type[Message], values: dict[str, Any], arrays: Arrays) -> Message:
    return cls(arrays=arrays, **values)


def _arrays(declared: object, buffers: Sequence[bytes | memoryview]) -> Arrays:
    items = fields.sequence(declared, "header.arrays")
    if len(items) > ARRAYS or len(items) != len(buffers):
        raise DecodeError("array frames", found=len(buffers), wanted=f"{len(items)} as declared, at most {ARRAYS}")
    size = sum(memoryview(buffer).nbytes for buffer in buffers)
    if size > MESSAGE_BYTES:
        raise DecodeError("bytes of the message", found=size, wanted=f"at most {MESSAGE_BYTES}")
    arrays: dict[str, np.ndarray] = {}
    for item, buffer in zip(items, buffers, strict=True):
        name, dtype, shape = _declaration(item)
        if name in arrays:
            raise DecodeError("name of an array twice", found=fields.shown(name))
        arrays[name] = from_buffer(name, dtype, shape, buffer)
    return MappingProxyType(arrays)


def _declaration(item: object) -> tuple[str, str, list[Any]]:
    if type(item) is list and len(item) == _DECLARED and [type(part) for part in item] == [str, str, list]:
        return item[0], item[1], item[2]
    raise DecodeError("declaration of an array", found=fields.shown(item), wanted="[name, dtype, shape]")
