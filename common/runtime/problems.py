"""What is wrong with a configuration, in words: key, value found and its source, value wanted or the closest key.

Everything is read from the tree's JSON schema, so that a new setting is explained without a line here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any, TypeAlias

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from common.errors import ConfigError
from common.runtime.layers import Path, Tree, source_of
from common.runtime.tree import Settings, tree_of

Node: TypeAlias = Mapping[str, Any]
"""A node of the JSON schema."""


def tree(values: Tree) -> type[Settings]:
    """The tree that `values` are to fill: it has the sections that they name."""
    return tree_of(Settings, _at(("algorithm", "name"), values))


@cache
def schema(settings: type[Settings] = Settings) -> Node:
    """JSON schema of a whole tree. Shared: do not change it."""
    return settings.model_json_schema()


def node_at(path: Sequence[str | int], values: Tree) -> Node | None:
    """Schema of the setting or section at `path`, None where there is none; `values` tell variants of a section apart."""
    root = schema(tree(values))
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
    """The values that `node` accepts, in words."""
    if "enum" in node or "const" in node:
        return "one of " + ", ".join(map(str, node.get("enum", [node.get("const")])))
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


def explain(error: ValidationError, values: Tree, sources: Mapping[str, str]) -> ConfigError:
    """All problems of `error` in one error: a line each."""
    lines = [line for details in error.errors(include_url=False) for line in _lines(details, values, sources)]
    unique = list(dict.fromkeys(lines))
    if len(unique) == 1:
        return ConfigError(unique[0])
    numbered = [f"{number}. {line}" for number, line in enumerate(unique, start=1)]  # told apart where all is put on one line
    return ConfigError("\n  ".join([f"{len(unique)} problems in the configuration:", *numbered]))


def _lines(details: ErrorDetails, values: Tree, sources: Mapping[str, str]) -> Iterator[str]:
    path = _setting(details["loc"], values)
    name = ".".join(path)
    origin = source_of(path, sources)
    reason = details.get("ctx", {}).get("error")
    if not path:  # settings that do not fit each other: one sentence a line, each beginning with its key
        for sentence in str(reason).splitlines():
            key = tuple(sentence.split(":")[0].split("."))
            yield f"{sentence} ({'.'.join(key)} from {source_of(key, sources)})"
    elif details["type"] == "union_tag_invalid":
        yield from _tag(path, values, sources)
    elif details["type"] == "extra_forbidden":
        yield _unknown(path, values, origin)
    elif reason is not None and "properties" in (node_at(path, values) or {}):
        yield f"{name}: {reason}"
    else:
        want = str(reason) if reason is not None else wanted(node_at(path, values) or {})
        yield f"{name}: found {_at(path, values)!r} ({origin}), wanted {want}"


def _tag(path: Path, values: Tree, sources: Mapping[str, str]) -> Iterator[str]:
    """The `name` that says which variant a section is, is none."""
    name = (*path, "name")
    want = f"{wanted(node_at(name, values) or {})}, or your own package.module:ENTRY"
    yield f"{'.'.join(name)}: found {_at(name, values)!r} ({source_of(name, sources)}), wanted {want}"


def _unknown(path: Path, values: Tree, origin: str) -> str:
    *parent, key = path
    known = list((node_at(parent, values) or {})["properties"])
    elsewhere = [f"{section}.{key}" for section in schema(tree(values))["properties"] if node_at((section, key), values)]
    close = get_close_matches(key, known, n=1) or elsewhere
    hint = f"did you mean {close[0]}? " if close else ""
    if others := _variants_with(path, values):
        hint = f"it is a setting of {' and '.join(others)}, and {'.'.join(parent)}.name is {_at((*parent, 'name'), values)}; "
    kind, owner = ("key", ".".join(parent)) if parent else ("section", "the configuration")
    return f"{'.'.join(path)}: unknown {kind} ({origin}); {hint}{owner} has {', '.join(known)}"


def _variants_with(path: Path, values: Tree) -> list[str]:
    """The other variants of the section, by name, that know its key `path`: what is set belongs to one of them."""
    section, *_ = path
    names: list[str] = (node_at((section, "name"), values) or {}).get("enum", [])
    return [name for name in names if node_at(path, {section: {"name": name}})]


def _setting(location: Sequence[str | int], values: Tree) -> Path:
    """The path of the setting (no list indices, no names of variants) that pydantic's `location` lies in."""
    path: Path = ()
    for key in map(str, location):
        node = node_at(path, values) or {}
        if "properties" not in node:
            break
        if key in node["properties"] or key in (_at(path, values) or {}):
            path = (*path, key)
    return path


def _resolved(node: Node, value: Any, root: Node) -> Node:
    if "discriminator" in node:  # the section's `name` says which variant it is
        mapping = node["discriminator"]["mapping"]
        name = value.get("name") if isinstance(value, dict) else None
        node = {"$ref": mapping.get(name) or mapping[node["default"]["name"]]}
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
