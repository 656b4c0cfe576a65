"""Frozen dataclasses <-> plain maps, checked by their annotations. Each class is planned once, when this is imported.

Kinds of field: str, bool, int and float (with `AtLeast`), dataclasses of these, and tuples of one kind. Unknown entries
are ignored, so that a newer peer may add fields; a missing field takes its default, so that it may add them with one.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, Final, NamedTuple, TypeAlias, cast, get_args, get_origin, get_type_hints

from common.errors import DecodeError
from common.units import AtLeast
from common.wire.limits import INTEGER_MAX

Reader: TypeAlias = Callable[[object, str], Any]
"""(what came, where) -> the checked value. Raises `DecodeError`."""

# A foreign value in an error sentence comes escaped and cut short, whatever it is.
shown: Final = reprlib.repr


class Entry(NamedTuple):
    """How one field goes to a plain value and back."""

    name: str
    read: Reader
    write: Callable[[Any], object]
    default: Callable[[], object] | None  # None: the field must be there


def plan(cls: type, *, without: Sequence[str] = ()) -> tuple[Entry, ...]:
    """The entries of dataclass `cls`. Raises `TypeError` for an annotation that has no place on the wire."""
    hints = get_type_hints(cls, include_extras=True)
    return tuple(
        Entry(field.name, _reader(hints[field.name]), _writer(hints[field.name]), _default(field))
        for field in fields(cls)
        if field.name not in without
    )


def write(value: object, entries: Sequence[Entry]) -> dict[str, object]:
    """The fields of `value`, in their declared order, as plain values."""
    return {entry.name: entry.write(getattr(value, entry.name)) for entry in entries}


def read(found: Mapping[str, object], entries: Sequence[Entry], where: str) -> dict[str, Any]:
    """Keyword arguments for the planned class, from a map of unknown content."""
    return {entry.name: _read_entry(found, entry, where) for entry in entries}


def text(value: object, where: str) -> str:
    """`value` if it is a string."""
    if type(value) is not str:
        raise DecodeError(where, found=shown(value), wanted="a string")
    return value


def integer(value: object, where: str, least: float = -INTEGER_MAX) -> int:
    """`value` if it is an integer (a boolean is none) of the range."""
    if type(value) is not int or not least <= value <= INTEGER_MAX:
        raise DecodeError(where, found=shown(value), wanted=f"an integer from {least:.0f} to {INTEGER_MAX}")
    return value


def sequence(value: object, where: str) -> list[Any]:
    """`value` if it is a list."""
    if type(value) is not list:
        raise DecodeError(where, found=shown(value), wanted="a list")
    return value


def _read_entry(found: Mapping[str, object], entry: Entry, where: str) -> object:
    if entry.name in found:
        return entry.read(found[entry.name], f"{where}.{entry.name}")
    if entry.default is None:
        raise DecodeError(f"{where}.{entry.name}", found="nothing", wanted="a value")
    return entry.default()


def _default(field: Field[Any]) -> Callable[[], object] | None:
    if field.default is not MISSING:
        return lambda: field.default
    return None if field.default_factory is MISSING else field.default_factory


def _reader(hint: Any) -> Reader:
    kind, least = _bounded(hint)
    if kind is str:
        return text
    if kind is bool:
        return _boolean
    if kind is int:
        return lambda value, where: integer(value, where, least)
    if kind is float:
        return lambda value, where: _number(value, where, least)
    if is_dataclass(kind):
        return _record_reader(kind)
    item = _reader(_item(kind))
    return lambda value, where: tuple(item(each, f"{where}[{i}]") for i, each in enumerate(sequence(value, where)))


def _writer(hint: Any) -> Callable[[Any], object]:
    kind: Callable[[Any], object] = _bounded(hint)[0]
    if kind in (str, bool, int, float):
        return kind
    if is_dataclass(kind):
        entries = plan(cast("type", kind))
        return lambda value: write(value, entries)
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


def _record_reader(kind: Any) -> Reader:
    entries = plan(kind)

    def record(value: object, where: str) -> Any:
        if type(value) is not dict:
            raise DecodeError(where, found=shown(value), wanted="a map")
        return kind(**read(value, entries, where))

    return record


def _boolean(value: object, where: str) -> bool:
    if type(value) is not bool:
        raise DecodeError(where, found=shown(value), wanted="true or false")
    return value


def _number(value: Any, where: str, least: float) -> float:
    # An integer is a number too: not every msgpack writer keeps the point of 2.0.
    if type(value) not in (int, float) or not (math.isfinite(value) and value >= least):
        raise DecodeError(where, found=shown(value), wanted=f"a finite number from {least:.0f}")
    return float(value)
