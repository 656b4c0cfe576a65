"""Settings from their layers: defaults < YAML (preset or file) < environment < command line.

Every value is YAML wherever it is written, and is then checked strictly against the schema. So `8` is a number in a file and
`"8"` is text that no number setting accepts; the text after `=` in `ROOKERY_ACTOR__COUNT=8` and `actor.count=8` is YAML too,
except for a setting that is text, which takes it unchanged. Names of variables are read in lower case.

The caller passes the environment as a mapping.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from common import conditions, extensions
from common.conditions import COMMAND_LINE, DEFAULT
from common.config.errors import config_error, joined, schema_at, settings_class, variants_with
from common.config.layers import Layer, Tree, comparable, dotted, leaves, merge_layers, nest, parse_yaml, source_of
from common.config.schema import Settings
from common.config.sections import as_run_name
from common.errors import ConfigError

ENV_PREFIX = "ROOKERY_"
CHOSEN = "chosen for this run"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSettings:
    """Checked settings, and the source of each leaf by its dotted key."""

    settings: Settings
    provenance: Mapping[str, str]
    notes: tuple[str, ...] = ()  # a line each on values that may not do what the user expects


def load_settings(
    *,
    preset: str | None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str],
    strict: bool = False,
    source: str = COMMAND_LINE,
) -> LoadedSettings:
    """Return the settings of `preset` (a name, a path, or None for the defaults), changed by `environ` and `overrides`.

    `overrides` are `section.key=value`, from `source`. Raises `ConfigError` with all invalid values at once: key, value found,
    value wanted, source. A value without effect (`common.conditions`) has a note, or with `strict` is refused where `overrides`
    set it.
    """
    default = Layer(source=DEFAULT, values=nest(("algorithm", "name"), Settings().algorithm.name))
    chosen = list(_preset_layers(find_preset(preset))) if preset else []
    stack = [default, *chosen, *_environment_layers(environ), *(override_layer(text, source=source) for text in overrides)]
    return _named_by_environment(_with_notes(_validated(stack, environ), chosen, strict=strict), chosen)


def _validated(stack: Sequence[Layer], environ: Mapping[str, str]) -> LoadedSettings:
    values, sources = merge_layers(_of_one_algorithm(stack))
    if extensions.is_restricted():
        from common.config.code_references import code_references  # noqa: PLC0415  imports gymnasium

        for reference in code_references(values):
            extensions.require_allowed(reference.module, setting=reference.setting)
    _require_separators(environ, values)
    try:
        # JSON mode turns lists into tuples and changes no other type.
        settings = settings_class(values).model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        raise config_error(error, values, sources) from error
    for section in ("env", "model"):
        if entry_point := getattr(settings, section).entry_point:
            extensions.import_attribute(entry_point, setting=f"{section}.entry_point")
    inside = {key: source for key, source in sources.items() if "." in key}  # an empty section sets nothing
    provenance = {".".join(path): source_of(path, inside) for path, _ in leaves(settings.model_dump(mode="json"))}
    return LoadedSettings(settings=settings, provenance=MappingProxyType(provenance))


def _with_notes(loaded: LoadedSettings, preset: Sequence[Layer], *, strict: bool) -> LoadedSettings:
    """Return `loaded` with its notes. Raises `ConfigError` for values that contradict one another."""

    def source(key: str) -> str:
        return source_of(tuple(key.split(".")), loaded.provenance)

    refused, notes = conditions.contradictions(
        loaded.settings,
        source,
        files={layer.source for layer in preset},
        begun=any(layer.values.get("run", {}).get("dir") for layer in preset),  # its config.yaml
        strict=strict,
    )
    if refused:
        raise ConfigError(joined(refused))
    keyed = ((note.partition(":")[0], note) for note in loaded.settings.algorithm.notes_on(loaded.settings.scale))
    return replace(loaded, notes=(*notes, *(f"{note} ({key} from {source(key)})" for key, note in keyed)))


def _named_by_environment(loaded: LoadedSettings, preset: Sequence[Layer]) -> LoadedSettings:
    """Return `loaded`, named by its environment and algorithm where the environment is not that of its preset."""
    values, _ = merge_layers(preset)
    env = values.get("env", {})
    before, settings = env.get("entry_point") or env.get("id"), loaded.settings
    if before in (None, settings.env.name) or settings.run.preset != values["run"]["preset"]:
        return loaded
    source, idle = preset[0].source, {key for key, *_ in conditions.unmet(settings)}
    kept = [
        f"{key}={conditions.yaml_text(value)}"
        for key, mark in conditions.marks(settings)
        if mark == conditions.PER_ENVIRONMENT and key not in idle
        if (value := conditions.value_of(settings, key)[0]) is not None
        if source_of(tuple(key.split(".")), loaded.provenance) == source
    ]
    what = f"inherited from {source}, which is for {before} and not for {settings.env.name}"
    notes = (f"{what}: {', '.join(kept)}; set your own where they do not fit",) if kept else ()
    return replace(with_chosen(loaded, {"run.preset": _run_name(settings)}), notes=(*notes, *loaded.notes))


def _run_name(settings: Settings) -> str:
    """Return environment and algorithm in the characters of a run id, such as `LunarLander-v3-ppo`."""
    env = settings.env.entry_point.replace(":", ".") or settings.env.id.rpartition(":")[2].rpartition("/")[2]
    return as_run_name(f"{env}-{settings.algorithm.name}")


def _of_one_algorithm(stack: Sequence[Layer]) -> list[Layer]:
    """Return the layers without the `algorithm` sections of other algorithms, so that `algorithm.name=impala` is enough."""
    sections = [section for layer in stack if isinstance(section := layer.values.get("algorithm"), dict)]
    selected = next((section["name"] for section in reversed(sections) if "name" in section), None)

    def is_kept(key: str, value: Any) -> bool:
        return key != "algorithm" or not isinstance(value, dict) or value.get("name", selected) == selected

    return [replace(layer, values={key: value for key, value in layer.values.items() if is_kept(key, value)}) for layer in stack]


def with_chosen(loaded: LoadedSettings, chosen: Mapping[str, Any]) -> LoadedSettings:
    """Return `loaded` with the values that the program chose: `chosen` maps dotted keys to values.

    The source of a value that differs becomes `CHOSEN`.
    """
    settings, provenance = loaded.settings, dict(loaded.provenance)
    for key, value in chosen.items():
        section, _, name = key.partition(".")
        before: BaseModel = getattr(settings, section)
        if getattr(before, name) != value:
            settings = settings.model_copy(update={section: before.model_copy(update={name: value})})
            provenance[key] = CHOSEN
    return replace(loaded, settings=settings, provenance=MappingProxyType(provenance))


def with_absolute_key_paths(loaded: LoadedSettings) -> LoadedSettings:
    """Return `loaded` with absolute paths of the key folders, because a run's config.yaml is read from other folders too."""
    sections = ("learner", "actor", "evaluator", "policy_server", "env_worker")
    folders = {f"{name}.keys": getattr(loaded.settings, name).keys for name in sections}
    absolute = with_chosen(loaded, {key: str(Path(folder).absolute()) for key, folder in folders.items() if folder})
    return replace(loaded, settings=absolute.settings)  # the sources of the values stay the same


def as_yaml(settings: Settings, provenance: Mapping[str, str] | None = None, *, describe: bool = False) -> str:
    """Return YAML from which `load_settings` gives `settings` again.

    With `provenance` a comment names each value's source; with `describe` a comment above each value describes it.
    """
    lines = []
    for section, values in settings.model_dump(mode="json").items():
        lines.append(f"{section}:")
        fields = type(getattr(settings, section)).model_fields
        for key, value in values.items():
            path = f"{section}.{key}"
            if describe and (description := fields[key].description):
                lines += textwrap.wrap(description, width=118, initial_indent="  # ", subsequent_indent="  # ")
            sources = sorted({s for p, s in (provenance or {}).items() if p == path or p.startswith(f"{path}.")})
            lines.append(f"  {key}: {_yaml_value(value)}" + (f"  # {', '.join(sources)}" if sources else ""))
    return "\n".join(lines) + "\n"


def _yaml_value(value: Any) -> str:
    if isinstance(value, str) and value and "\n" not in value:
        try:
            if parse_yaml(value, source="text") == value:
                return value  # needs no quotes
        except ConfigError:
            pass
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """YAML text of a run: a preset of the package, or a user's file."""

    name: str
    source: str  # as error messages and config.yaml name it
    text: str


def preset_names() -> tuple[str, ...]:
    """Return the names of the presets in the package, sorted."""
    files = (entry.name for entry in resources.files("presets").iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml")))


def find_preset(name: str) -> Preset:
    """Return the preset called `name`, or the file where `name` ends in .yaml or .yml.

    Raises `ConfigError` with close matches.
    """
    if name.endswith((".yaml", ".yml")):
        text = read_text(name, what="configuration file", wanted="a readable YAML file")
        return Preset(name=Path(name).stem, source=f"file {name}", text=text)
    names = preset_names()
    if name not in names:
        close = get_close_matches(name, names, n=2)
        fix = f"did you mean {' or '.join(close)}?" if close else "or the path of your own .yaml file"
        raise ConfigError("unknown preset", found=repr(name), wanted=f"one of {', '.join(names)}", fix=fix)
    text = (resources.files("presets") / f"{name}.yaml").read_text(encoding="utf-8")
    return Preset(name=name, source=f"preset {name}", text=text)


class PresetHeader(NamedTuple):
    """The first comment lines of a preset: what it trains, how often that was measured, and its spaces."""

    content: str
    measured: str
    spaces: str


def preset_header(preset: Preset) -> PresetHeader:
    """Return the header of a preset of the package: a sentence, then the lines `# Measured: ...` and `# Spaces: ...`."""
    content, measured, spaces = preset.text.split("\n", 3)[:3]
    return PresetHeader(content.removeprefix("# "), measured.removeprefix("# Measured: "), spaces.removeprefix("# Spaces: "))


def read_text(path: str, *, what: str, wanted: str) -> str:
    """Return the text of a file; raises `ConfigError` where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no UTF-8 text"
        raise ConfigError(f"{what} cannot be read: {reason}", found=path, wanted=wanted) from error


def _preset_layers(preset: Preset) -> Iterator[Layer]:
    values = parse_yaml(preset.text, source=preset.source)
    if values is not None and not isinstance(values, dict):
        raise ConfigError(f"{preset.source} holds no sections", found=values, wanted="a mapping such as `env: {id: CartPole-v1}`")
    yield Layer(source=preset.source, values=nest(("run", "preset"), preset.name))
    # A section without any key, as where all are comments, has the defaults.
    sections = {key: value for key, value in (values or {}).items() if value is not None or key not in Settings.model_fields}
    yield Layer(source=preset.source, values=sections)


def require_once(overrides: Sequence[str]) -> None:
    """Raise `ConfigError` for a setting of which `overrides` have two different values: the first would have no effect."""
    first: dict[str, tuple[str, str]] = {}
    for text in overrides:
        for key, value in _set_by(text).items():
            removed = [earlier for inside, (earlier, _) in first.items() if value == {} and inside.startswith(f"{key}.")]
            before, other = first.setdefault(key, (text, comparable(value)))
            if removed or comparable(value) != other:
                found = f"{[*removed, before][0]} and {text}"
                raise ConfigError(f"{key} is set twice", found=found, wanted="one value")


def _set_by(text: str) -> Tree:
    """Return the value of a setting by its key and, of a mapping, those in it by theirs."""
    key = text.partition("=")[0]
    try:
        values = override_layer(text).values
    except ConfigError:  # several values of a series, such as [64],[32]
        return {key: text}
    return {key: values} | dotted(values)


def _environment_layers(environ: Mapping[str, str]) -> Iterator[Layer]:
    """Yield a layer for each `ROOKERY_SECTION__KEY`; other names, such as Kubernetes' ROOKERY_LEARNER_PORT, are ignored."""
    for name in sorted(name for name in environ if name.startswith(ENV_PREFIX)):
        text = name.removeprefix(ENV_PREFIX).lower()
        if "__" in text:
            path = tuple(text.split("__"))
            yield Layer(source=name, values=nest(path, _value(path, environ[name], source=name)))


def _require_separators(environ: Mapping[str, str], values: Tree) -> None:
    """Raise `ConfigError` for a variable of a setting with one underscore too few; `values` name the algorithm."""
    for name in sorted(name for name in environ if name.startswith(ENV_PREFIX)):
        text = name.removeprefix(ENV_PREFIX).lower()
        for section in Settings.model_fields:
            path = section, text.removeprefix(f"{section}_")
            if text != path[1] and (schema_at(path, values) or variants_with(path, {})):
                wanted = f"{ENV_PREFIX}{'__'.join(path)}".upper()
                raise ConfigError("environment variable sets nothing", found=name, wanted=wanted)


def override_layer(text: str, *, source: str = COMMAND_LINE) -> Layer:
    """Return the layer of one `section.key=value` from `source`.

    Raises `ConfigError` for other text, and for a value that is no YAML.
    """
    key, equals, value = text.partition("=")
    path = tuple(key.split("."))
    if not equals or not all(path):
        raise ConfigError("argument is no setting", found=repr(text), wanted="section.key=value, such as env.num_envs=16")
    return Layer(source=source, values=nest(path, _value(path, value, source=f"{source} {key}")))


def _value(path: tuple[str, ...], text: str, *, source: str) -> Any:
    schema = schema_at(path, {}) or {}
    return text if schema.get("type") == "string" else parse_yaml(text, source=source)
