"""Envelope <-> list of message parts: a msgpack header, then one raw buffer per array. Pure, and safe on any bytes.

    part 0      {"v": 2, "tag": "trajectory", "run": "...", <fields of the message>, "arrays": [[name, dtype, shape], ...]}
    part 1..n   the buffers, in the order of "arrays"

Only `DecodeError` (and its `ProtocolVersionError`) leaves `decode`, whatever the bytes. See `docs/protocol.md`.

The fields of a message are read and written by the annotations of its frozen dataclass, planned once at import. Kinds of
field: str, bool, int and float (with `AtLeast`), dataclasses of these, and tuples of one kind. Unknown fields are ignored and a
missing field takes its default, so that a newer sender may add fields with a default.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated, Any, Final, NamedTuple, TypeAlias, cast, get_args, get_origin, get_type_hints

import msgpack

from common.errors import DecodeError, InternalError, ProtocolVersionError
from common.protocol import header
from common.protocol.arrays import Layout, dtype_name, from_buffer, layout, to_buffer
from common.protocol.limits import ARRAY_BYTES, ARRAYS, INTEGER_MAX, MESSAGE_BYTES
from common.protocol.messages import MESSAGE_TYPES, PROTOCOL_VERSION, Arrays, Envelope
from common.units import KIB, AtLeast

_DECLARED: Final = 3  # name, dtype, shape
_TYPES: Final = {cls.tag: cls for cls in MESSAGE_TYPES}

Reader: TypeAlias = Callable[[object, str], Any]
"""(value received, its place in the message) -> the checked value. Raises `DecodeError`."""

# A foreign value in an error sentence comes escaped and cut short, whatever it is.
_shown: Final = reprlib.repr


def encode(envelope: Envelope) -> list[bytes | memoryview]:
    """Return the parts of a message; those of arrays are views, so the arrays must not be written to until they are sent."""
    message, arrays = envelope.message, envelope.message.arrays
    buffers = [to_buffer(name, array) for name, array in arrays.items()]
    sizes = [buffer.nbytes for buffer in buffers]
    if len(sizes) > ARRAYS or sum(sizes) > MESSAGE_BYTES or max(sizes, default=0) > ARRAY_BYTES:
        found = f"{len(sizes)} arrays, {sum(sizes)} bytes, {max(sizes)} in one"
        raise InternalError("message too large", found=found, wanted=f"{ARRAYS}, {MESSAGE_BYTES}, {ARRAY_BYTES}")
    # No message may use these keys as a field, nor `arrays`. `v` and `tag` keep their place in every protocol version.
    first = {"v": PROTOCOL_VERSION, "tag": message.tag, "run": envelope.run}
    last = {"arrays": [[name, dtype_name(array), array.shape] for name, array in arrays.items()]}
    return [header.pack(first | write_fields(message, _PLANS[message.tag]) | last), *buffers]


def decode(frames: Sequence[bytes | memoryview]) -> Envelope:
    """Return the message whose parts are `frames`; its arrays are read-only views on them. Raises `DecodeError`."""
    if not frames:
        raise DecodeError("parts of a message", found=0, wanted="at least 1")
    found = header.unpack(frames[0])
    version = _integer(found.get("v"), "header.v", 0)
    if version != PROTOCOL_VERSION:
        raise ProtocolVersionError(found=version, wanted=PROTOCOL_VERSION)
    tag = _text(found.get("tag"), "header.tag")
    if tag not in _TYPES:
        raise DecodeError("message tag", found=_shown(tag), wanted=", ".join(_TYPES))
    run = _text(found.get("run"), "header.run")
    values = read_fields(found, _PLANS[tag], tag)
    return Envelope(run=run, message=_TYPES[tag](arrays=_arrays(found.get("arrays", []), frames[1:]), **values))


def _arrays(declared: object, buffers: Sequence[bytes | memoryview]) -> Arrays:
    items = _sequence(declared, "header.arrays")
    if len(items) > ARRAYS or len(items) != len(buffers):
        raise DecodeError("parts of arrays", found=len(buffers), wanted=f"{len(items)} as declared, at most {ARRAYS}")
    if (size := sum(map(len, buffers))) > MESSAGE_BYTES:
        raise DecodeError("bytes of the message", found=size, wanted=f"at most {MESSAGE_BYTES}")
    packed: bytes = msgpack.packb(items, buf_size=_KEPT_BYTES)  # its own is 256 KiB, whatever is packed
    layouts = _kept_layouts(packed) if len(packed) <= _KEPT_BYTES else _layouts(packed)
    return MappingProxyType({each.name: from_buffer(each, buffer) for each, buffer in zip(layouts, buffers, strict=True)})


def _layouts(packed: bytes) -> tuple[Layout, ...]:
    layouts: dict[str, Layout] = {}
    for item in msgpack.unpackb(packed):
        name, dtype, shape = _declaration(item)
        if name in layouts:
            raise DecodeError("name of an array twice", found=_shown(name))
        layouts[name] = layout(name, dtype, shape)
    return tuple(layouts.values())


_KEPT_BYTES: Final = 2 * KIB
_kept_layouts = lru_cache(maxsize=64)(_layouts)
"""The messages of a run repeat a few declarations, each of which is checked once."""


def _declaration(item: object) -> tuple[str, str, list[Any]]:
    if type(item) is list and len(item) == _DECLARED and [type(part) for part in item] == [str, str, list]:
        return item[0], item[1], item[2]
    raise DecodeError("declaration of an array", found=_shown(item), wanted="[name, dtype, shape]")


# --- fields ---


class FieldCodec(NamedTuple):
    """Reader and writer of one field."""

    name: str
    read: Reader
    write: Callable[[Any], object]
    default: Callable[[], object] | None  # None: the field must be there


def plan_fields(cls: type, *, without: Sequence[str] = ()) -> tuple[FieldCodec, ...]:
    """The codecs of the fields of dataclass `cls`. Raises `TypeError` for an annotation that has no place on the wire."""
    hints = get_type_hints(cls, include_extras=True)
    return tuple(
        FieldCodec(field.name, _reader(hints[field.name]), _writer(hints[field.name]), _default(field))
        for field in fields(cls)
        if field.name not in without
    )


def write_fields(value: object, codecs: Sequence[FieldCodec]) -> dict[str, object]:
    """The fields of `value`, in their declared order, as plain values."""
    return {codec.name: codec.write(getattr(value, codec.name)) for codec in codecs}


def read_fields(found: Mapping[str, object], codecs: Sequence[FieldCodec], where: str) -> dict[str, Any]:
    """Keyword arguments for the planned class, from a map of unknown content."""
    return {codec.name: _read_field(found, codec, where) for codec in codecs}


def _text(value: object, where: str) -> str:
    if type(value) is not str:
        raise DecodeError(where, found=_shown(value), wanted="a string")
    return value


def _integer(value: object, where: str, least: float = -INTEGER_MAX) -> int:
    if type(value) is not int or not least <= value <= INTEGER_MAX:
        raise DecodeError(where, found=_shown(value), wanted=f"an integer from {least:.0f} to {INTEGER_MAX}")
    return value


def _sequence(value: object, where: str) -> list[Any]:
    if type(value) is not list:
        raise DecodeError(where, found=_shown(value), wanted="a list")
    return value


def _read_field(found: Mapping[str, object], codec: FieldCodec, where: str) -> object:
    if codec.name in found:
        return codec.read(found[codec.name], f"{where}.{codec.name}")
    if codec.default is None:
        raise DecodeError(f"{where}.{codec.name}", found="nothing", wanted="a value")
    return codec.default()


def _default(field: Field[Any]) -> Callable[[], object] | None:
    if field.default is not MISSING:
        return lambda: field.default
    return None if field.default_factory is MISSING else field.default_factory


def _reader(hint: Any) -> Reader:
    kind, least = _bounded(hint)
    if kind is str:
        return _text
    if kind is bool:
        return _boolean
    if kind is int:
        return lambda value, where: _integer(value, where, least)
    if kind is float:
        return lambda value, where: _number(value, where, least)
    if is_dataclass(kind):
        return _structure_reader(kind)
    item = _reader(_item(kind))
    return lambda value, where: tuple(item(each, f"{where}[{i}]") for i, each in enumerate(_sequence(value, where)))


def _writer(hint: Any) -> Callable[[Any], object]:
    kind: Callable[[Any], object] = _bounded(hint)[0]
    if kind in (str, bool, int, float):
        return kind
    if is_dataclass(kind):
        entries = plan_fields(cast("type", kind))
        return lambda value: write_fields(value, entries)
    item = _writer(_item(kind))
    return lambda values: [item(value) for value in values]


def _bounded(hint: Any) -> tuple[Any, float]:
    """The type and the least value of an annotation; of several bounds the outermost, which comes last, holds."""
    if get_origin(hint) is not Annotated:
        return hint, -INTEGER_MAX
    kind, *notes = get_args(hint)
    return kind, [note for note in notes if isinstance(note, AtLeast)][-1].least


def _item(kind: Any) -> Any:
    match get_origin(kind), get_args(kind):
        case (origin, (item, more)) if origin is tuple and more is Ellipsis:
            return item
    raise TypeError(f"no place on the wire for a field of type {kind}")


def _structure_reader(kind: Any) -> Reader:
    entries = plan_fields(kind)

    def structure(value: object, where: str) -> Any:
        if type(value) is not dict:
            raise DecodeError(where, found=_shown(value), wanted="a map")
        return kind(**read_fields(value, entries, where))

    return structure


def _boolean(value: object, where: str) -> bool:
    if type(value) is not bool:
        raise DecodeError(where, found=_shown(value), wanted="true or false")
    return value


def _number(value: Any, where: str, least: float) -> float:
    # An integer is a number too: not every msgpack writer keeps the point of 2.0.
    if type(value) not in (int, float) or not (math.isfinite(value) and value >= least):
        raise DecodeError(where, found=_shown(value), wanted=f"a finite number from {least:.0f}")
    return float(value)


_PLANS: Final = {cls.tag: plan_fields(cls, without=("arrays",)) for cls in MESSAGE_TYPES}
