"""Imports of code that a user names in the settings, `package.module:attribute`, with errors of one line.

This is the only module that imports by a name from data. `common.config` imports a user's code when settings are loaded, so that
code which does not import is refused before anything is built. Where the data may come from somebody else, such as the directory
of a run, `restricted` refuses code that is neither in the current directory nor allowed.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from common.errors import ConfigError

# Of the project, which may be named as those of a user are.
ENVIRONMENTS = ("common.envs.functional", "common.envs.hidden", "common.envs.probes")

EXTRAS = {
    "flax": "jax",
    "jax": "jax",
    "minigrid": "minigrid",
    "mpe2": "pettingzoo",
    "pettingzoo": "pettingzoo",
    "popgym": "popgym",
    "vizdoom": "vizdoom",
}
"""The extra of this project that installs a package of environments."""

_allowed: tuple[str, ...] | None = None  # modules and packages that data may name; None: all


@contextmanager
def restricted(allowed: Iterable[str]) -> Iterator[None]:
    """Import by a name from data, while inside, only modules of the current directory and those in the packages `allowed`."""
    global _allowed  # noqa: PLW0603  a restriction of the process, whoever reads the data
    before = _allowed
    _allowed = (*(before or ()), *allowed)
    try:
        yield
    finally:
        _allowed = before


class NotAllowedError(ConfigError):
    """Data names code that is `restricted`."""


def is_restricted() -> bool:
    """Return whether this process is inside `restricted`."""
    return _allowed is not None


def is_within(module: str, packages: Iterable[str]) -> bool:
    """Return whether `module` is one of `packages` or lies in one, compared by whole components of the dotted name."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def require_allowed(module: str, *, setting: str) -> None:
    """Refuse (ConfigError) a module that is `restricted`; nothing is imported to find out."""
    if _allowed is None or is_within(module, _allowed) or is_local(module):
        return
    top = module.partition(".")[0]
    raise NotAllowedError(
        f"{setting} of the run names code that is not in the current directory",
        found=f"module {module!r:.200}",
        wanted=f"a module in {Path.cwd()}, or one that is allowed",
        fix=f"if you trust it, add --allow-code {top if top.isidentifier() else 'PACKAGE'}",
    )


def is_local(module: str) -> bool:
    """Return whether data may always name `module`: Python would import its top-level package from the current directory itself.

    So may `ENVIRONMENTS` of the project. Nothing is imported to find out.
    """
    if is_within(module, ENVIRONMENTS):
        return True
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return False
    places = [*(spec.submodule_search_locations or [])] or ([spec.origin] if spec.has_location and spec.origin else [])
    return bool(places) and all(Path(place).resolve().parent == Path.cwd().resolve() for place in places)  # built in: no place


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
    require_allowed(module_name, setting=setting)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(error.name or "")
        raise ConfigError(
            f"{setting} names a module that does not exist",
            found=f"{module_name} ({error})",
            wanted="a module that Python can import",
            fix=f"pip install 'rookery[{extra}]'" if extra else "install it, or start in the folder that contains it",
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
    if isinstance(error, SyntaxError):
        return f"{error.filename} line {error.lineno}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename} line {last.lineno}"
