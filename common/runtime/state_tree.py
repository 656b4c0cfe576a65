"""Nested training state to named tensors plus a JSON structure, and back bit for bit. Knows no files, and no pickle.

In the structure every container is a one-key object that names its kind, so that `{0: ...}`, `{"0": ...}`, lists and tuples
come back as what they were; a tensor or a numpy array stands as its name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from common.errors import InternalError


def flatten(state: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Structure (JSON) and tensors by dotted name, on the CPU, contiguous, each with memory of its own."""
    tensors: dict[str, torch.Tensor] = {}
    return _packed(state, "", tensors), tensors


def _packed(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    match value:
        case torch.Tensor():
            while name in tensors:  # {"a.b": ...} beside {"a": {"b": ...}}: names are for people, they need not parse
                name += "+"
            tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
            return {"tensor": name}
        case np.ndarray():
            return {"array": _packed(torch.from_numpy(np.array(value)), name, tensors)["tensor"]}
        case Mapping():
            if wrong := [key for key in value if type(key) not in (str, int)]:
                raise InternalError(f"state key under {name!r}", found=wrong[0], wanted="text or int")
            return {"mapping": [[key, _packed(item, _under(name, key), tensors)] for key, item in value.items()]}
        case list() | tuple():
            items = [_packed(item, _under(name, index), tensors) for index, item in enumerate(value)]
            return {"list" if isinstance(value, list) else "tuple": items}
        case float() if not math.isfinite(value):
            return {"float": str(value)}
    if value is not None and type(value) not in (bool, int, float, str):
        raise InternalError(f"state at {name!r} cannot be saved", found=type(value).__name__, wanted="tensor or JSON scalar")
    return value


def restore(structure: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Inverse of `flatten`. Raises `KeyError`, `TypeError` or `ValueError` on a structure that `flatten` does not make."""
    if not isinstance(structure, dict):
        return structure
    ((kind, content),) = structure.items()
    match kind:
        case "tensor":
            return tensors[content]
        case "array":
            return tensors[content].numpy()
        case "mapping":
            return {key: restore(item, tensors) for key, item in content}
        case "list":
            return [restore(item, tensors) for item in content]
        case "tuple":
            return tuple(restore(item, tensors) for item in content)
        case "float":
            return float(content)
    raise ValueError(f"unknown kind {kind!r}")


def _under(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)
