"""YAML text to nested values, and layers of nested values to one tree with the source of each leaf.

Numbers and booleans are those of YAML 1.2 (`5e-4` is a number, `no` and `12:30` are text). Duplicate keys, merge keys, anchors,
aliases and tags are refused, so that a file means what it shows.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import yaml

from common.conditions import DEFAULT, yaml_text
from common.errors import ConfigError

Tree: TypeAlias = dict[str, Any]
"""Mappings with text keys; leaves are text, numbers, booleans, null, and lists of these."""

Path: TypeAlias = tuple[str, ...]
"""Keys from the root of a tree to a value; dotted in text."""

_SCALARS = (
    ("tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$")),
    ("tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9][0-9_]*)$")),
    ("tag:yaml.org,2002:float", re.compile(r"^[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?$")),
    ("tag:yaml.org,2002:null", re.compile(r"^(~|null|Null|NULL|)$")),
)  # tried in this order


class _Loader(yaml.SafeLoader):
    """`SafeLoader` with the rules of the module's docstring."""

    yaml_implicit_resolvers = {None: list(_SCALARS)}  # noqa: RUF012 - PyYAML reads this attribute of the class

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if event.anchor or getattr(event, "tag", None):
            problem = "anchors, aliases and tags are not allowed; write the value itself"
            raise yaml.constructor.ConstructorError(None, None, problem, event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Tree:  # type: ignore[override]
        seen: Tree = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str) or key in seen or key == "<<":
                wrong = "is not text" if not isinstance(key, str) else "occurs twice" if key in seen else "would merge mappings"
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} {wrong}", key_node.start_mark)
            seen[key] = self.construct_object(value_node, deep=deep)
        return seen

    def construct_float(self, node: yaml.ScalarNode) -> float:
        value = float(node.value)
        if not math.isfinite(value):
            raise yaml.constructor.ConstructorError(None, None, f"number {node.value} is too large", node.start_mark)
        return value


_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_float)


def parse_yaml(text: str, *, source: str) -> Any:
    """Return one YAML document as plain values. Raises `ConfigError` with `source`, line and column."""
    try:
        return _Loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" line {mark.line + 1} column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{source}{where} is no valid YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is no valid YAML: {' '.join(str(error).split())}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The values of one source. Each leaf overrides the same leaf of earlier layers."""

    source: str
    values: Tree


def nest(path: Sequence[str], value: Any) -> Tree:
    """Return a tree whose only leaf is `value`, at `path`."""
    tree: Any = value
    for key in reversed(path):
        tree = {key: tree}
    return dict(tree)


def leaves(tree: Mapping[str, Any], prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield path and value of every leaf; an empty mapping is a leaf."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*prefix, key))
        else:
            yield (*prefix, key), value


def dotted(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of a tree by dotted key."""
    return {".".join(path): value for path, value in leaves(tree)}


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> tuple[str, str]:
    """Return the leaves in which two trees differ, as each has them; of an algorithm with another name this alone."""
    one, other = dotted(found), dotted(wanted)
    keys = [key for key in {**one, **other} if key not in one or key not in other or one[key] != other[key]]
    if "algorithm.name" in keys:
        keys = [key for key in keys if key == "algorithm.name" or not key.startswith("algorithm.")]
    first, second = (", ".join(f"{key}={yaml_text(tree[key])}" for key in keys if key in tree) for tree in (one, other))
    return first, second


def comparable(value: Any) -> str:
    """Return a text that is the same for equal values: for 1 and 1.0, and not for 1 and true, which are equal in Python."""

    def number(text: str) -> float:
        return int(found) if (found := float(text)).is_integer() else found

    return json.dumps(json.loads(json.dumps(value), parse_float=number), sort_keys=True)


def merge_layers(layers: Sequence[Layer]) -> tuple[Tree, dict[str, str]]:
    """Return all layers, merged in their order, and the source of each leaf by its dotted path."""
    tree: Tree = {}
    sources: dict[str, str] = {}
    for layer in layers:
        tree = merge(tree, layer.values, sections=True)
        for path, _ in leaves(layer.values):
            for length in range(1, len(path)):
                sources.pop(".".join(path[:length]), None)  # of a leaf that this mapping replaced
            sources[".".join(path)] = layer.source
    return tree, sources


def source_of(path: Path, sources: Mapping[str, str]) -> str:
    """Return the source of the value at `path`: its own, that of a mapping around it, or that of a leaf in it."""
    for length in range(len(path), 0, -1):
        if source := sources.get(".".join(path[:length])):
            return source
    inside = [source for key, source in sources.items() if key.startswith(".".join(path) + ".")]
    return inside[-1] if inside else DEFAULT


def merge(under: Tree, over: Tree, *, sections: bool = False) -> Tree:
    """Return `over` on `under`: mappings merge, but an empty one replaces the one below; other values are replaced.

    Of trees of `sections` an empty section changes nothing.
    """
    both = {**under, **over}
    for key in under.keys() & over.keys():
        if isinstance(under[key], dict) and isinstance(over[key], dict) and (over[key] or sections):
            both[key] = merge(under[key], over[key])
    return both
