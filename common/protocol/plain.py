"""A tree of plain values as one array of bytes, and back bit for bit. No pickle: reading runs no code, whatever the bytes.

Plain are None, booleans, integers, floats, strings, numpy arrays and scalars of numbers, and lists, tuples and dicts of these.
One array in several places is one array again; a list or dict in several places becomes several. The bytes are a safetensors
file: the arrays, and one more that holds the structure as JSON, in which every container and array is an object with one key that
names its kind.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from common.errors import DecodeError, InternalError

_STRUCTURE = "structure"
_NUMBERS = "biuf"  # kinds of dtypes: bool, integers, floats
TYPES = (type(None), bool, int, float, str, list, tuple, dict)  # plain ones beside numpy's


def is_plain(value: object) -> bool:
    """Return whether `value` consists of plain values."""
    for part in parts(value):
        array = isinstance(part, np.ndarray | np.generic) and part.dtype.kind in _NUMBERS
        if not (array or type(part) in TYPES) or (type(part) is dict and any(type(key) not in (str, int) for key in part)):
            return False
    return True


def parts(value: object) -> Iterator[Any]:
    """Yield `value` and all inside it where it is a list, tuple or dict; a container in several places is entered once."""
    entered, ahead = set(), [value]
    while ahead:
        yield (part := ahead.pop())
        if isinstance(part, list | tuple | dict) and id(part) not in entered:
            entered.add(id(part))
            ahead.extend(part.values() if isinstance(part, dict) else part)


def pack(tree: Any) -> NDArray[np.uint8]:
    """Return `tree`, no part of which contains itself, as bytes, [N]. Raises `InternalError` for a value that is not plain."""
    if not is_plain(tree):
        raise InternalError("a value that cannot be packed", found=repr(tree)[:200], wanted="plain values")
    arrays: dict[str, NDArray[Any]] = {}
    structure = json.dumps(_packed(tree, arrays, {})).encode()
    data = safetensors.numpy.save({**arrays, _STRUCTURE: np.frombuffer(structure, np.uint8)})
    return np.frombuffer(data, np.uint8)


def unpack(data: NDArray[np.uint8]) -> Any:
    """Return the tree that `pack` wrote; arrays are the caller's own. Raises `DecodeError` for bytes that `pack` never makes."""
    try:
        arrays = {name: np.array(array) for name, array in safetensors.numpy.load(data.tobytes()).items()}
        structure = json.loads(arrays.pop(_STRUCTURE).tobytes())
        return restored(structure, {"array": arrays.__getitem__, "scalar": lambda name: arrays[name][()]})
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        found = f"{type(error).__name__} in {data.size} bytes"
        raise DecodeError("packed values", found=found, wanted="what this version packs") from error


def _packed(value: Any, arrays: dict[str, NDArray[Any]], names: dict[int, str]) -> Any:
    """Return the structure of `value`; its arrays are added to `arrays`, and their names to `names`, by the id of each."""
    match value:
        case np.ndarray() | np.generic():
            name = names.setdefault(id(value), str(len(names)))
            arrays[name] = np.array(value, order="C")
            return {"array" if isinstance(value, np.ndarray) else "scalar": name}
        case Mapping():
            return {"mapping": [[key, _packed(item, arrays, names)] for key, item in value.items()]}
        case list() | tuple():
            return {type(value).__name__: [_packed(item, arrays, names) for item in value]}
    return value


def restored(structure: Any, leaves: Mapping[str, Callable[[Any], Any]]) -> Any:
    """Return the tree of a structure in which every container is an object with one key that names its kind.

    `leaves` return the values of all other kinds. Raises `ValueError` or `TypeError` for another structure, and what they raise.
    """
    if not isinstance(structure, dict):
        if isinstance(structure, list):
            raise ValueError("a list without its kind")  # noqa: TRY004 - found in bytes, not in an argument
        return structure
    ((kind, content),) = structure.items()
    match kind:
        case "mapping":
            return {key: restored(item, leaves) for key, item in content}
        case "list":
            return [restored(item, leaves) for item in content]
        case "tuple":
            return tuple(restored(item, leaves) for item in content)
    if kind not in leaves:
        raise ValueError(f"unknown kind {kind!r}")
    return leaves[kind](content)
