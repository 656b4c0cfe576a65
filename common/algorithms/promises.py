"""Whether somebody's class keeps what the protocols of `common.algorithms.api` promise; asked before a run is begun."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from common.errors import ConfigError
from common.extensions import misfit


def require(thing: object, protocol: type, *, of: str) -> None:
    """Refuse (ConfigError) a class or an object of algorithm `of` that lacks what `protocol` names.

    A class may still set what is no method when it is built. A function that builds is believed until it has built.
    """
    kind = thing if isinstance(thing, type) else type(thing)
    if not isinstance(thing, type) and inspect.isroutine(thing):
        return
    promised = [name for name in vars(protocol) if not name.startswith("_")]
    if isinstance(thing, type):
        promised = [name for name in promised if callable(getattr(protocol, name))]
    missing = [name for name in promised if not hasattr(thing, name) or getattr(kind, name, None) is getattr(protocol, name)]
    abstract = [name for name in dir(kind) if getattr(getattr(kind, name, None), "__isabstractmethod__", False)]
    if missing or abstract:
        raise ConfigError(
            f"{of}: {kind.__name__} is no {protocol.__name__}",
            found=f"no {', '.join([*missing, *abstract])}",
            wanted=f"what common.algorithms.api.{protocol.__name__} names",
            fix="write what is missing, or derive from a class that has it",
        )


def require_call(function: Callable[..., object], words: tuple[str, ...], *, of: str) -> None:
    """Refuse (ConfigError) what cannot be called with arguments of these names."""
    if wrong := misfit(function, **dict.fromkeys(words)):
        name = getattr(function, "__name__", repr(function))
        raise ConfigError(f"{of}: {name} cannot be built", found=wrong, wanted=f"arguments {', '.join(words)}")
