"""Settings from their layers: defaults < YAML (preset or file) < environment < command line.

One rule for types: every value is YAML wherever it is written, and is then checked strictly against the tree. So in a
file `8` is a number and `"8"` is text that no number setting accepts; in `ROOKERY_ACTOR__COUNT=8` and `actor.count=8` the
text after `=` is YAML too, except where the setting is text, which takes it as it stands.
Names of variables are read in lower case.

Only the callers know the real environment; it comes in as a mapping.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ValidationError

from common import extensions
from common.errors import ConfigError
from common.runtime.layers import DEFAULT, Layer, Path, leaves, merge, nest, parse, source_of
from common.runtime.presets import Preset, find_preset
from common.runtime.problems import explain, node_at, tree
from common.runtime.tree import Settings

ENV_PREFIX = "ROOKERY_"
COMMAND_LINE = "command line"
SETTLED = "chosen for this run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Checked settings, and for each leaf's dotted key where its value came from."""

    settings: Settings
    provenance: Mapping[str, str]


def load(*, preset: str | None, overrides: Sequence[str] = (), environ: Mapping[str, str]) -> Loaded:
    """Settings of `preset` (a name, a path, or None for the defaults), changed by environment and `section.key=value`.

    Raises `ConfigError` with all problems of the values at once: key, value found, value wanted, where it came from.
    """
    layers = [Layer(source=DEFAULT, values=nest(("algorithm", "name"), Settings().algorithm.name))]
    layers += _preset_layers(find_preset(preset)) if preset else ()
    layers += _environment_layers(environ)
    layers += [_override_layer(text) for text in overrides]
    return build(layers)


def build(layers: Sequence[Layer]) -> Loaded:
    """Merge and check `layers`, the strongest last."""
    values, sources = merge(_of_one_algorithm(layers))
    try:
        # by way of JSON, so that lists become tuples and nothing else changes its type
        settings = tree(values).model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        raise explain(error, values, sources) from error
    for setting, entry_point in (
        ("env.entry_point", settings.env.entry_point),
        ("model.entry_point", settings.model.entry_point),
    ):
        if entry_point:
            extensions.find(entry_point, setting=setting)
    found = {".".join(path): source_of(path, sources) for path, _ in leaves(settings.model_dump(mode="json"))}
    return Loaded(settings=settings, provenance=MappingProxyType(found))


def _of_one_algorithm(layers: Sequence[Layer]) -> list[Layer]:
    """The layers without what a preset says of another algorithm than the one that runs: `algorithm.name=impala` is enough."""
    named = [section.get("name") for layer in layers if isinstance(section := layer.values.get("algorithm"), dict)]
    runs = next((name for name in reversed(named) if name is not None), None)
    kept = []
    for layer in layers:
        section = layer.values.get("algorithm")
        other = isinstance(section, dict) and section.get("name", runs) != runs
        values = {key: value for key, value in layer.values.items() if not (other and key == "algorithm")}
        kept.append(Layer(source=layer.source, values=values))
    return kept


def settle(loaded: Loaded, chosen: Mapping[str, Any]) -> Loaded:
    """`loaded` with what the user left open: `chosen` maps dotted keys to values, and those that differ come from `SETTLED`."""
    settings, provenance = loaded.settings, dict(loaded.provenance)
    for key, value in chosen.items():
        section, _, name = key.partition(".")
        before: BaseModel = getattr(settings, section)
        if getattr(before, name) != value:
            settings = settings.model_copy(update={section: before.model_copy(update={name: value})})
            provenance[key] = SETTLED
    return Loaded(settings=settings, provenance=MappingProxyType(provenance))


def rooted(loaded: Loaded) -> Loaded:
    """`loaded` with whole paths of the folders of keys: a run's config.yaml is read from other folders, too."""
    roles = "learner", "actor", "evaluator"
    named = {f"{role}.keys": getattr(loaded.settings, role).keys for role in roles}
    whole = settle(loaded, {key: str(pathlib.Path(folder).absolute()) for key, folder in named.items() if folder})
    return replace(loaded, settings=whole.settings)  # they come from where they came from


def as_yaml(settings: Settings, provenance: Mapping[str, str] | None = None) -> str:
    """A file from which `load` gives `settings` again; with `provenance`, each value's source stands in a comment."""
    lines = []
    for section, values in settings.model_dump(mode="json").items():
        lines.append(f"{section}:")
        for key, value in values.items():
            path = f"{section}.{key}"
            sources = sorted({s for p, s in (provenance or {}).items() if p == path or p.startswith(f"{path}.")})
            lines.append(f"  {key}: {_yaml_value(value)}" + (f"  # {', '.join(sources)}" if sources else ""))
    return "\n".join(lines) + "\n"


def _yaml_value(value: Any) -> str:
    if isinstance(value, str) and value and "\n" not in value:
        try:
            if parse(value, source="text") == value:
                return value  # needs no quotes
        except ConfigError:
            pass
    return json.dumps(value, ensure_ascii=False)


def _preset_layers(preset: Preset) -> Iterator[Layer]:
    values = parse(preset.text, source=preset.source)
    if values is not None and not isinstance(values, dict):
        raise ConfigError(f"{preset.source} holds no sections", found=values, wanted="a mapping such as `env: {id: CartPole-v1}`")
    yield Layer(source=preset.source, values=nest(("run", "preset"), preset.name))
    yield Layer(source=preset.source, values=values or {})


def _environment_layers(environ: Mapping[str, str]) -> Iterator[Layer]:
    """`ROOKERY_SECTION__KEY`. Other names are none of ours (Kubernetes sets ROOKERY_LEARNER_PORT and such)..."""
    for name in sorted(environ):
        text = name.removeprefix(ENV_PREFIX).lower()
        if not name.startswith(ENV_PREFIX):
            continue
        if "__" in text:
            path = tuple(text.split("__"))
            yield Layer(source=name, values=nest(path, _value(path, environ[name], source=name)))
            continue
        section, _, key = text.partition("_")
        if key and node_at((section, key), {}):  # ...but one that is a setting but for one underscore is a slip
            raise ConfigError("environment variable sets nothing", found=name, wanted=f"{ENV_PREFIX}{section}__{key}".upper())


def _override_layer(text: str) -> Layer:
    key, equals, value = text.partition("=")
    path = tuple(key.split("."))
    if not equals or not all(path):
        raise ConfigError("argument is no setting", found=repr(text), wanted="section.key=value, such as env.num_envs=16")
    return Layer(source=COMMAND_LINE, values=nest(path, _value(path, value, source=f"{COMMAND_LINE} {key}")))


def _value(path: Path, text: str, *, source: str) -> Any:
    node = node_at(path, {}) or {}
    return text if node.get("type") == "string" else parse(text, source=source)
