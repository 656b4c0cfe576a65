"""The one place that decides which code a learner's configuration may name in a worker, before anything is imported.

A Welcome carries the run's configuration as JSON, and some of its values name Python code. `read_run` refuses those that the
owner of the worker did not allow, and is the only way from a Welcome to a `RunConfig` or an `EnvRunConfig`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

import gymnasium

from common import extensions
from common.config.run_config import EnvRunConfig, RunConfig
from common.config.schema import ConnectedSettings, Settings
from common.errors import ConfigError
from common.protocol.messages import ENV_WORKER

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


def read_run(config: str, *, role: str, settings: Settings) -> RunConfig | EnvRunConfig:
    """Return the configuration in the Welcome of a server, for a worker of this `role` that was started with `settings`.

    Raises `ConfigError` where it names code that is neither of the packages in `allow_code` nor named in the worker's own
    settings, before that code is imported; and as `from_json`.
    """
    try:
        values = json.loads(config)
    except (ValueError, RecursionError) as error:
        fix = "run the same rookery version on both sides"
        raise ConfigError("the run configuration in the Welcome is no JSON", found=f"{error}", fix=fix) from error
    own: ConnectedSettings = getattr(settings, role)
    named = {(reference.setting, reference.value) for reference in code_references(settings.model_dump(mode="json"))}
    for reference in code_references(values):
        if (reference.setting, reference.value) not in named and not _allowed(reference.module, own.allow_code):
            raise _refusal(reference, role, own)
    checked = json.dumps(values)  # written anew, so that validation reads exactly the values checked here
    return EnvRunConfig.from_json(checked) if role == ENV_WORKER else RunConfig.from_json(checked)


def _allowed(module: str, packages: tuple[str, ...]) -> bool:
    """Return whether `module` is one of `packages` or lies in one, compared by whole components of the dotted name."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _refusal(reference: CodeReference, role: str, own: ConnectedSettings) -> ConfigError:
    package, server = reference.module.partition(".")[0], "policy server" if role == ENV_WORKER else "learner"
    return ConfigError(
        f"the {server} at {own.server} names code that the owner of this {role.replace('_', ' ')} did not allow",
        found=f"{reference.setting} {reference.value!r:.200} (module {reference.module!r:.200})",
        wanted=f"a module of {role}.allow_code ({', '.join(own.allow_code) or 'none'}), or a value of this {role}'s own settings",
        fix=f"if you trust that {server}, start with --allow-code {package if package.isidentifier() else 'PACKAGE'}",
    )


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
    spec = gymnasium.registry.get(env_id)
    if spec is None:
        return
    for entry_point in (spec.entry_point, spec.vector_entry_point, *(one.entry_point for one in spec.additional_wrappers)):
        if entry_point is None:
            continue
        module = entry_point.partition(":")[0] if isinstance(entry_point, str) else str(getattr(entry_point, "__module__", ""))
        if not _allowed(module, _TRUSTED_REGISTRY):
            yield module
