"""Imports of code that a user names in the settings, `package.module:attribute`, with errors of one line.

This is the only module that imports by a name from data. `common.config` imports a user's code when settings are loaded, so that
code which does not import is refused before anything is built. Where the data may come from somebody else, such as the directory
of a run, `restricted` refuses code that is neither local nor allowed.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from threading import get_ident
from types import ModuleType
from typing import Any, NamedTuple

from common.errors import ConfigError

_PROBES = (
    *("observed_value", "discounted_value", "matching_action", "recalled_action", "aimed_action", "joint_action", "named_action"),
    *("pictured_action", "mixed_action", "leaving_agents", "counting"),
)
ENVIRONMENTS = {
    "common.envs.functional:gymnax",
    "common.envs.hidden:TMaze",
    "common.envs.hidden:cartpole",
    *(f"common.envs.probes:{name}" for name in _PROBES),
}
"""Environments of the project, which any data may name: they run no code that their arguments name."""

_SAFE = "PYTHONSAFEPATH"  # environment variable of Python
_ROOT = Path(__file__).resolve().parents[1]
PROJECT = tuple(_ROOT / name for name in ("benchmarks", "common", "docker", "presets", "rookery.py", "services", "tests"))
"""Places of the project's own modules, which are no user's code, also where the current directory is in a clone."""

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


class _Restriction(NamedTuple):
    allowed: tuple[str, ...]  # modules and packages
    run: Path  # directory that names code


_restrictions: dict[object, tuple[int, _Restriction]] = {}  # of what data may name, with the threads that read it; innermost last


@contextmanager
def restricted(allowed: Iterable[str], *, run: Path) -> Iterator[None]:
    """Import by a name from the data of the directory `run`, while inside, only local code and the packages `allowed`."""
    _restrictions[key := object()] = get_ident(), _Restriction(tuple(allowed), run)
    try:
        yield
    finally:
        del _restrictions[key]


def _in_force() -> list[_Restriction]:
    """Return the innermost restriction of this thread; of a thread without one, which another may have started, all."""
    found = list(_restrictions.values())
    return [each for thread, each in found if thread == get_ident()][-1:] or [each for _, each in found]


class NotAllowedError(ConfigError):
    """Data names code that is `restricted`."""


def is_restricted() -> bool:
    """Return whether this thread, or one that may have started it, is inside `restricted`."""
    return bool(_in_force())


def is_within(module: str, packages: Iterable[str]) -> bool:
    """Return whether `module` is one of `packages` or lies in one, compared by whole components of the dotted name."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def require_allowed(module: str, *, setting: str) -> None:
    """Refuse (ConfigError) a module that is `restricted`; nothing is imported to find out."""
    if all(is_within(module, each.allowed) or is_local(module, run=each.run) for each in _in_force()):
        return
    raise NotAllowedError(
        f"{setting} of the run names code that needs permission",
        found=f"module {module!r:.200}",
        wanted=f"a module in {Path.cwd()} that is part of neither rookery nor the folder of the run, or one that is allowed",
        fix=f"if you trust it, add {allow_option(module)}",
    )


def allow_option(module: str) -> str:
    """Return the option that allows `module` and no more."""
    return f"--allow-code {module if all(part.isidentifier() for part in module.split('.')) else 'PACKAGE'}"


def is_local(module: str, *, run: Path) -> bool:
    """Return whether the data of the directory `run` may always name `module`: a user's own, in the current directory.

    `import_module` would take its top-level package from the current directory itself, where no link leads out of that. No part
    of it is the project's, its folder does not contain the run, and the run does not contain the module. Nothing is imported
    to find out.
    """
    places = [_places(spec) for spec in _specs(module)]
    if not all(places):
        return False
    here, found, runs = Path.cwd().resolve(), [*itertools.chain(*places)], (run.resolve(), Path(os.path.normpath(run.absolute())))
    in_here = places[0][0].parent == here and all(place.is_relative_to(here) for place in found)
    of_project = any(place.is_relative_to(part) for place in found for part in PROJECT)
    with_run = any(run.is_relative_to(place) for run in runs for place in places[0])
    in_run = any(place.is_relative_to(run) for run in runs for place in found)
    return in_here and not (of_project or with_run or in_run)


def exists(module: str) -> bool:
    """Return whether `import_module` would find `module`; nothing is imported to find out."""
    return None not in _specs(module)


def _specs(module: str) -> Iterator[ModuleSpec | None]:
    """Yield how `import_module` finds each package around `module`, outermost first, and `module`; None for a missing one."""
    top, *inner = module.split(".")
    if top in sys.modules and getattr(getattr(sys.modules[top], "__spec__", None), "name", "") != top:
        yield None  # `__main__` is the program that runs, not a file of this name
        return
    yield (spec := _installed(top) or PathFinder.find_spec(top, [*sys.path, *_working_directory()]))
    for name in inner:
        spec = PathFinder.find_spec(name, (spec and spec.submodule_search_locations) or [])
        yield spec


def _places(spec: ModuleSpec | None) -> list[Path]:
    """Return the folders of a package, and the file that is imported, where links lead; empty for what is built in."""
    if spec is None:
        return []
    file = [spec.origin] if spec.has_location and spec.origin else []
    return [Path(place).resolve() for place in (*(spec.submodule_search_locations or ()), *file)]


def is_user_code(text: object) -> bool:
    """Return True where `text` names a user's code, False for a part of the project, such as one of `ENVIRONMENTS`."""
    return isinstance(text, str) and ":" in text and text not in ENVIRONMENTS


def import_attribute(
    entry_point: str, *, setting: str, what: str = "function", accepts: Callable[[object], bool] = callable
) -> Any:
    """Return the attribute `package.module:attribute` that `setting` names.

    Raises `ConfigError` where it cannot be imported, and where `accepts` is False for it: it is not a `what`, such as a function.
    """
    module_name, _, name = entry_point.partition(":")
    if not (module_name and name):
        raise ConfigError(f"{setting} is not complete", found=repr(entry_point), wanted=f"package.module:{what}")
    module = (import_module if is_user_code(entry_point) else _import)(module_name, setting=setting)
    found = getattr(module, name, None)
    if not accepts(found):
        known = [public for public, value in vars(module).items() if public[0] != "_" and accepts(value)]
        known.sort(key=lambda public: getattr(vars(module)[public], "__module__", "") != module_name)  # last what it imports
        shown = name if found is None else f"{name}, a value of type {type(found).__name__}"
        wanted = similar_names(name, known, first=5)
        raise ConfigError(f"{setting} names no {what} of {module_name}", found=shown, wanted=wanted)
    return found


def import_module(module_name: str, *, setting: str) -> ModuleType:
    """Import the user's module that `setting` names. Raises `ConfigError`."""
    require_allowed(module_name, setting=setting)
    # Last, and not before code is named: a folder there may have the name of a package.
    sys.path += _working_directory()
    return _import(module_name, setting=setting)


def _installed(top: str) -> ModuleSpec | None:
    """Return how Python imports a top-level module; None for one that is missing, or only a folder without __init__.py."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    return spec if spec and spec.origin else None


def _working_directory() -> list[str]:
    """Return the entry of sys.path for the working directory, unless it is there, or forbidden as an unsafe path."""
    here = str(Path.cwd())
    return [here] if not {"", here} & set(sys.path) and not os.environ.get(_SAFE) else []


def _import(module_name: str, *, setting: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        extra, safe = EXTRAS.get(error.name or ""), f", without {_SAFE}" if os.environ.get(_SAFE) else ""
        raise ConfigError(
            f"{setting} names a module that does not exist",
            found=f"{module_name} ({error})",
            wanted="a module that Python can import",
            fix=f"pip install 'rookery[{extra}]'" if extra else f"install it, or start in the folder that contains it{safe}",
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
        wanted = f"arguments {inspect.signature(function)}"
        raise ConfigError(f"{entry_point} does not take {setting}", found=f"{dict(kwargs)} ({wrong})", wanted=wanted)
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


def similar_names(name: str, known: Iterable[str], *, first: int = 0) -> str:
    """Return the names in `known` that resemble `name`, or else the `first` ones, for an error message."""
    names = list(known)
    close, some = difflib.get_close_matches(name, names), ", ".join(names[:first])
    return " or ".join(close) or (f"one such as {some}" if some else "one that exists")


def _place(error: Exception) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.filename} line {error.lineno}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename} line {last.lineno}"
