"""Configuration text to nested values, and nested values to one tree with a source for each leaf. Knows no settings.

Numbers and truth values are those of YAML 1.2 (`5e-4` is a number, `no` and `12:30` are text). What a document could say
twice or by reference (duplicate keys, anchors, merge keys) is refused, so that a file means what it shows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import yaml

from common.errors import ConfigError

Tree: TypeAlias = dict[str, Any]
"""Mappings with text keys; leaves are text, numbers, truth values, null, and lists of these."""

Path: TypeAlias = tuple[str, ...]
"""Keys from the root of a tree to a value; dotted in text."""

DEFAULT = "default"

_SCALARS = (
    ("tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$")),
    ("tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9][0-9_]*)$")),
    ("tag:yaml.org,2002:float", re.compile(r"^[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?$")),
    ("tag:yaml.org,2002:null", re.compile(r"^(~|null|Null|NULL|)$")),
)  # tried in this order


class _Loader(yaml.SafeLoader):
    """SafeLoader with the rules of the module's docstring."""

    yaml_implicit_resolvers = {None: list(_SCALARS)}  # noqa: RUF012 - the attribute by which PyYAML is told

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.constructor.ConstructorError(None, None, "aliases are not allowed", parent.start_mark if parent else None)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Tree:  # type: ignore[override]
        seen: Tree = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str) or key in seen:
                problem = f"key {key!r} stands twice" if isinstance(key, str) else f"key {key!r} is no text"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen[key] = self.construct_object(value_node, deep=deep)
        return seen

    def construct_float(self, node: yaml.ScalarNode) -> float:
        value = float(node.value)
        if not math.isfinite(value):
            raise yaml.constructor.ConstructorError(None, None, f"number {node.value} is too large", node.start_mark)
        return value


_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_float)


def parse(text: str, *, source: str) -> Any:
    """One YAML document as plain values. Raises `ConfigError` that names `source`, line and column."""
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
    """Values of one source; a later layer wins over an earlier one, leaf by leaf."""

    source: str
    values: Tree


def nest(path: Sequence[str], value: Any) -> Tree:
    """`value` as the only leaf of a tree, at `path`."""
    tree: Any = value
    for key in reversed(path):
        tree = {key: tree}
    return dict(tree)


def leaves(tree: Mapping[str, Any], prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Path and value of everything that is not a mapping with something in it."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*prefix, key))
        else:
            yield (*prefix, key), value


def merge(layers: Sequence[Layer]) -> tuple[Tree, dict[str, str]]:
    """All layers in one tree, and the source of each leaf by its dotted path. Mappings merge, all else is replaced."""
    tree: Tree = {}
    sources: dict[str, str] = {}
    for layer in layers:
        tree = _merged(tree, layer.values)
        sources.update({".".join(path): layer.source for path, _ in leaves(layer.values)})
    return tree, sources


def source_of(path: Path, sources: Mapping[str, str]) -> str:
    """Where the value at `path` came from: named for itself, for what it lies in, or for something in it."""
    for length in range(len(path), 0, -1):
        if source := sources.get(".".join(path[:length])):
            return source
    inside = [source for key, source in sources.items() if key.startswith(".".join(path) + ".")]
    return inside[-1] if inside else DEFAULT


def _merged(under: Tree, over: Tree) -> Tree:
    both = {**under, **over}
    for key in under.keys() & over.keys():
        if isinstance(under[key], dict) and isinstance(over[key], dict):
            both[key] = _merged(under[key], over[key])
    return both
