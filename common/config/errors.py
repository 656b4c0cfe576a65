"""Messages for invalid configurations: key, value found and its source, values wanted or the closest key.

All of it is read from the JSON schema of the settings, so that a new setting needs no code here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any, TypeAlias

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from common.config.layers import Path, Tree, source_of
from common.config.schema import Settings, with_algorithm_section
from common.errors import ConfigError

Node: TypeAlias = Mapping[str, Any]
"""A node of the JSON schema."""


def settings_class(values: Tree) -> type[Settings]:
    """Return the class that validates `values`, with the section of the algorithm that they name."""
    return with_algorithm_section(Settings, _at(("algorithm", "name"), values))


@cache
def json_schema(settings: type[Settings] = Settings) -> Node:
    """Return the JSON schema of all settings. The result is cached: do not change it."""
    return settings.model_json_schema()


def schema_at(path: Sequence[str | int], values: Tree) -> Node | None:
    """Return the schema of the setting or section at `path`, or None; `values` select the variant of a section."""
    root = json_schema(settings_class(values))
    node = root
    for depth, key in enumerate(path):
        variants = node.get("discriminator")
        if variants and key == variants["propertyName"]:
            return {"enum": list(variants["mapping"])}
        properties = _resolved(node, _at(path[:depth], values), root).get("properties", {})
        if key not in properties:
            return None
        node = properties[key]
    return _resolved(node, _at(path, values), root)


def wanted(node: Node) -> str:
    """Describe the values that `node` accepts."""
    if "enum" in node or "const" in node:
        texts = [str(value) for value in node.get("enum", [node.get("const")])]
        return ("one of " if len(texts) > 1 else "") + ", ".join(texts)
    if "anyOf" in node:
        return " or ".join(map(wanted, node["anyOf"]))
    match node.get("type"):
        case "integer" | "number":
            return f"{node['type']}{_range(node)}"
        case "string":
            return f"text matching {node['pattern']}" if "pattern" in node else "text"
        case "boolean":
            return "true or false"
        case "array" if "prefixItems" in node:
            return f"list of ({', '.join(map(wanted, node['prefixItems']))})"
        case "array":
            return f"list of {wanted(node['items'])}"
        case "object" if "properties" in node:
            return f"mapping with some of {', '.join(node['properties'])}"
        case "object":
            return "mapping"
        case kind:
            return str(kind)


def config_error(error: ValidationError, values: Tree, sources: Mapping[str, str]) -> ConfigError:
    """Return one error with a line for each problem in `error`."""
    lines = [line for details in error.errors(include_url=False) for line in _lines(details, values, sources)]
    return ConfigError(joined(list(dict.fromkeys(lines))))


def joined(lines: Sequence[str]) -> str:
    """Return the problems in one text, numbered where there are several, because a log joins the lines."""
    if len(lines) == 1:
        return lines[0]
    numbered = [f"{number}. {line}" for number, line in enumerate(lines, start=1)]
    return "\n  ".join([f"{len(lines)} problems in the configuration:", *numbered])


def _lines(details: ErrorDetails, values: Tree, sources: Mapping[str, str]) -> Iterator[str]:
    path = _setting(details["loc"], values)
    key = ".".join(path)
    origin = source_of(path, sources)
    reason = details.get("ctx", {}).get("error")
    if not path:  # settings that conflict with one another: a sentence per line, each beginning with its key
        for sentence in str(reason).splitlines():
            first = tuple(sentence.split(":")[0].split("."))
            yield f"{sentence} ({'.'.join(first)} from {source_of(first, sources)})"
    elif details["type"] == "union_tag_invalid":  # `name` selects no variant of its section
        name = (*path, "name")
        want = f"{wanted(schema_at(name, values) or {})}, or your own package.module:ENTRY"
        yield f"{'.'.join(name)}: found {_at(name, values)!r} ({source_of(name, sources)}), wanted {want}"
    elif details["type"] == "extra_forbidden":
        yield _unknown(path, values, origin)
    elif reason is not None and "properties" in (schema_at(path, values) or {}):
        yield f"{key}: {reason}"
    else:
        want = str(reason) if reason is not None else wanted(schema_at(path, values) or {})
        yield f"{key}: found {_at(path, values)!r} ({origin}), wanted {want}"


def _unknown(path: Path, values: Tree, origin: str) -> str:
    *parent, key = path
    known = list((schema_at(parent, values) or {})["properties"])
    elsewhere = [
        f"{section}.{key}" for section in json_schema(settings_class(values))["properties"] if schema_at((section, key), values)
    ]
    similar = get_close_matches(key, known, n=1)
    of_a_section = parent or isinstance(_at(path, values), dict)  # else it is a value without its section
    close = similar or elsewhere if of_a_section else elsewhere or similar
    hint = f"did you mean {close[0]}? " if close else ""
    if others := variants_with(path, values):
        owners = " and ".join([*filter(None, [", ".join(others[:-1])]), others[-1]])
        hint = f"it is a setting of {owners}, and {'.'.join(parent)}.name is {_at((*parent, 'name'), values)}; "
    kind, owner = ("key", ".".join(parent)) if parent else ("section", "the configuration")
    return f"{'.'.join(path)}: unknown {kind} ({origin}); {hint}{owner} has {', '.join(known)}"


def variants_with(path: Path, values: Tree) -> list[str]:
    """Return the names of the variants of a section, such as algorithms, that have the key at `path`."""
    section, *_ = path
    names: list[str] = (schema_at((section, "name"), values) or {}).get("enum", [])
    return [name for name in names if schema_at(path, {section: {"name": name}})]


def _setting(location: Sequence[str | int], values: Tree) -> Path:
    """Return the path of the setting that contains pydantic's `location`, without list indices and names of variants."""
    path: Path = ()
    for key in map(str, location):
        node = schema_at(path, values) or {}
        if "properties" not in node:
            break
        if key in node["properties"] or key in (_at(path, values) or {}):
            path = (*path, key)
    return path


def _resolved(node: Node, value: Any, root: Node) -> Node:
    if "discriminator" in node:  # the section's `name` selects the variant
        mapping = node["discriminator"]["mapping"]
        name = value.get("name") if isinstance(value, dict) else None  # from data that nothing has checked
        node = {"$ref": (mapping.get(name) if isinstance(name, str) else None) or mapping[node["default"]["name"]]}
    if "$ref" in node:
        return _resolved(root["$defs"][node["$ref"].rpartition("/")[2]], value, root)
    return node


def _at(path: Sequence[str | int], values: Any) -> Any:
    for key in path:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _range(node: Node) -> str:
    if "minimum" in node and "maximum" in node:
        return f" in {node['minimum']}..{node['maximum']}"
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {node[key]}" for key, sign in signs.items() if key in node]
    return " " + " and ".join(bounds) if bounds else ""
