"""What a user names in the settings as `package.module:attribute`: found, or refused in one line.

An import statement whose name is data, and the only one. Whoever reads settings asks first, so that what does not import is
refused before anything is built; whoever builds from the settings then finds the module imported already.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from common.errors import ConfigError


def named(text: object) -> bool:
    """Whether `text` names something of the user's, and nothing that comes with the project."""
    return isinstance(text, str) and ":" in text


def find(entry_point: str, *, setting: str, what: str = "function", accepts: Callable[[object], bool] = callable) -> Any:
    """Import `package.module:attribute`, which `setting` names: a `what`, told by `accepts`. Raises `ConfigError`."""
    module_name, _, name = entry_point.partition(":")
    if not (module_name and name):
        raise ConfigError(f"{setting} is not complete", found=repr(entry_point), wanted=f"package.module:{what}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{setting} names a module that is not there",
            found=f"{module_name} ({error})",
            wanted="a module that Python can import",
            fix="install it, or start where it lies",
        ) from error
    except Exception as error:  # whatever the user's module does while it is imported
        raise ConfigError(
            f"{setting} names a module that does not import",
            found=f"{type(error).__name__}: {error} ({_place(error)})",
            wanted=module_name,
            fix=f"`python -c 'import {module_name}'` shows more",
        ) from error
    found = getattr(module, name, None)
    if not accepts(found):
        known = [public for public, value in vars(module).items() if public[0] != "_" and accepts(value)]
        shown = name if found is None else f"{name}, a {type(found).__name__}"
        raise ConfigError(f"{setting} names no {what} of {module_name}", found=shown, wanted=closest(name, known))
    return found


def bound(function: Callable[..., Any], *args: object, entry_point: str, setting: str, kwargs: Mapping[str, Any]) -> partial[Any]:
    """`function`, ready to be called with `args`, and with `kwargs`, which are `setting`. ConfigError where it takes others."""
    if wrong := misfit(function, *args, **kwargs):
        raise ConfigError(f"{entry_point} does not take {setting}", found=dict(kwargs), wanted=wrong)
    return partial(function, *args, **kwargs)


def misfit(function: Callable[..., Any], *args: object, **kwargs: object) -> str:
    """Why `function` cannot be called so; empty where it can, or where nobody knows."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    except ValueError:  # written in C, and without a signature
        return ""
    return ""


def closest(name: str, known: Iterable[str]) -> str:
    """What `name` was perhaps meant to be, in words."""
    return " or ".join(difflib.get_close_matches(name, list(known))) or "one that exists"


def _place(error: Exception) -> str:
    """File and line, of the text itself where that is no Python."""
    if isinstance(error, SyntaxError):
        return f"{error.filename} line {error.lineno}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename} line {last.lineno}"
