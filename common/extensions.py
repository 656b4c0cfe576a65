"""Imports of code that a user names in the settings, `package.module:attribute`, with errors of one line.

This is the only module that imports by a name from data. `common.config` imports a user's code when settings are loaded, so that
code which does not import is refused before anything is built.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

from common.errors import ConfigError


def is_user_code(text: object) -> bool:
    """Return True where `text` names a user's code, False for a part of the project."""
    return isinstance(text, str) and ":" in text


def import_attribute(
    entry_point: str, *, setting: str, what: str = "function", accepts: Callable[[object], bool] = callable
) -> Any:
    """Return the attribute `package.module:attribute` that `setting` names.

    Raises `ConfigError` where it cannot be imported, and where `accepts` is False for it: it is not a `what`, such as a function.
    """
    module_name, _, name = entry_point.partition(":")
    if not (module_name and name):
        raise ConfigError(f"{setting} is not complete", found=repr(entry_point), wanted=f"package.module:{what}")
    module = import_module(module_name, setting=setting)
    found = getattr(module, name, None)
    if not accepts(found):
        known = [public for public, value in vars(module).items() if public[0] != "_" and accepts(value)]
        shown = name if found is None else f"{name}, a {type(found).__name__}"
        raise ConfigError(f"{setting} names no {what} of {module_name}", found=shown, wanted=similar_names(name, known))
    return found


def import_module(module_name: str, *, setting: str) -> ModuleType:
    """Import the module that `setting` names. Raises `ConfigError`."""
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{setting} names a module that does not exist",
            found=f"{module_name} ({error})",
            wanted="a module that Python can import",
            fix="install it, or start in the folder that contains it",
        ) from error
    except Exception as error:  # the import runs the user's code
        raise ConfigError(
            f"{setting} names a module that does not import",
            found=f"{type(error).__name__}: {error} ({_place(error)})",
            wanted=module_name,
            fix=f"`python -c 'import {module_name}'` shows more",
        ) from error


def bind_arguments(
    function: Callable[..., Any], *args: object, entry_point: str, setting: str, kwargs: Mapping[str, Any]
) -> partial[Any]:
    """Return `function` with `args`, and with `kwargs` from `setting`. Raises `ConfigError` where it takes other arguments."""
    if wrong := signature_error(function, *args, **kwargs):
        raise ConfigError(f"{entry_point} does not take {setting}", found=dict(kwargs), wanted=wrong)
    return partial(function, *args, **kwargs)


def signature_error(function: Callable[..., Any], *args: object, **kwargs: object) -> str:
    """Return why `function` cannot be called with these arguments; empty where it can, or has no signature."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    except ValueError:  # a function in C without a signature
        return ""
    return ""


def similar_names(name: str, known: Iterable[str]) -> str:
    """Return the names in `known` that resemble `name`, for an error message."""
    return " or ".join(difflib.get_close_matches(name, list(known))) or "one that exists"


def _place(error: Exception) -> str:
    """Return the file and line of an error."""
    if isinstance(error, SyntaxError):
        return f"{error.filename} line {error.lineno}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename} line {last.lineno}"
