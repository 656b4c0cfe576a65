"""The values of a configuration that name Python code, found without importing any of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import gymnasium

from common import extensions

_NAMING = (("env", "entry_point"), ("model", "entry_point"), ("algorithm", "name"))  # settings that take package.module:attribute
_TRUSTED_REGISTRY = ("gymnasium", "ale_py")  # their ids may be built by every worker; ids that other packages register may not


class CodeReference(NamedTuple):
    """One value of a configuration that names code."""

    setting: str  # dotted key
    value: str
    module: str  # imported or run when the value is used


def code_references(values: object) -> Iterator[CodeReference]:
    """Yield every value of a parsed configuration (of a RunConfig or of Settings) that names code outside the project.

    Nothing is imported, and nothing is assumed of `values`: a value of the wrong type is skipped, since validation refuses it.
    """
    for section, key in _NAMING:
        text = _text(values, section, key)
        if extensions.is_user_code(text):
            yield CodeReference(f"{section}.{key}", text, text.partition(":")[0])
    env_id = _text(values, "env", "id")
    for module in _modules_of(env_id):
        yield CodeReference("env.id", env_id, module)
    for section, inner in values.items() if isinstance(values, dict) else ():
        allowed = inner.get("allow_code") if isinstance(inner, dict) else None  # what a worker's learner may name
        for module in allowed if isinstance(allowed, list | set | tuple) else ():
            yield CodeReference(f"{section}.allow_code", str(module), str(module))


def allow_code(values: object, *, run: Path | None = None) -> str:
    """Return ` --allow-code MODULE` for each module that a parsed configuration names; empty where it names none.

    With a directory `run` only for those that need it in a command that reads this run.
    """
    modules = dict.fromkeys(reference.module for reference in code_references(values))
    named = [module for module in modules if run is None or not extensions.is_local(module, run=run)]
    kept = (module for module in named if not extensions.is_within(module.rpartition(".")[0], named))
    return "".join(f" {extensions.allow_option(module)}" for module in kept)


def named_modules(overrides: Iterable[str]) -> Iterator[str]:
    """Yield the modules that settings `section.key=value` name."""
    for section, key in (*_NAMING, ("env", "id")):
        for text in overrides:
            name, _, value = text.partition("=")
            if name == f"{section}.{key}" and ":" in value:
                yield value.partition(":")[0].strip("'\" ")
    for name, _, value in (text.partition("=") for text in overrides):
        if name.endswith(".allow_code"):
            yield from (module.strip("[]'\" ") for module in value.split(","))


def _text(values: object, section: str, key: str) -> str:
    """Return the text at `section.key`, empty where there is none."""
    inner = values.get(section) if isinstance(values, dict) else None
    found = inner.get(key) if isinstance(inner, dict) else None
    return found if isinstance(found, str) else ""


def _modules_of(env_id: str) -> Iterator[str]:
    """Yield the modules that gymnasium imports or runs to build `env_id`, except gymnasium's own and ale-py's."""
    module, colon, env_id = env_id.rpartition(":")
    if colon:
        yield module  # module:Env-v0 imports the module, which is to register the id
        if extensions.exists(f"{module}.{env_id}"):
            yield f"{module}.{env_id}"  # PettingZoo's PACKAGE:NAME
    spec = gymnasium.registry.get(env_id)
    if spec is None:
        return
    for entry_point in (spec.entry_point, spec.vector_entry_point, *(one.entry_point for one in spec.additional_wrappers)):
        if entry_point is None:
            continue
        module = entry_point.partition(":")[0] if isinstance(entry_point, str) else str(getattr(entry_point, "__module__", ""))
        if not extensions.is_within(module, _TRUSTED_REGISTRY):
            yield module
