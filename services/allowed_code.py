"""The one place that decides which code a learner's configuration may name in a worker, before anything is imported.

A Welcome carries the run's configuration as JSON, and some of its values name Python code. `read_run` refuses those that the
owner of the worker did not allow, and is the only way from a Welcome to a `RunConfig` or an `EnvRunConfig`.
"""

from __future__ import annotations

import json

from common import extensions
from common.config.code_references import CodeReference, code_references
from common.config.run_config import EnvRunConfig, RunConfig
from common.config.schema import Settings
from common.config.sections import ConnectedSettings
from common.errors import ConfigError
from common.protocol.messages import ENV_WORKER, server_of


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
        if (reference.setting, reference.value) not in named and not extensions.is_within(reference.module, own.allow_code):
            raise _refusal(reference, role, own)
    checked = json.dumps(values)  # written anew, so that validation reads exactly the values checked here
    return EnvRunConfig.from_json(checked) if role == ENV_WORKER else RunConfig.from_json(checked)


def _refusal(reference: CodeReference, role: str, own: ConnectedSettings) -> ConfigError:
    server, worker = server_of(role), role.replace("_", " ")
    return ConfigError(
        f"the {server} at {getattr(own, server.replace(' ', '_'))} names code that the owner of this {worker} did not allow",
        found=f"{reference.setting} {reference.value!r:.200} (module {reference.module!r:.200})",
        wanted=f"a module of {role}.allow_code ({', '.join(own.allow_code) or 'none'}), or a value of this {role}'s own settings",
        fix=f"if you trust that {server}, start with {extensions.allow_option(reference.module)}",
    )
