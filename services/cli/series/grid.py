"""The members of a series: one run for each seed and each combination of values. Pure.

A setting with several values is written `section.key=A,B`. A comma inside brackets, braces or quotes belongs to a value, so a
list is written in brackets, as everywhere: `model.hidden=[64, 64],[128]` has two values. A setting whose text is a list by
itself, such as the addresses in `actor.learner`, has one value.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.config.errors import schema_at
from common.config.layers import comparable
from common.config.load import override_layer
from common.config.sections import COMMA_LIST
from common.errors import ConfigError

SERIES_FILE = "series.json"  # in the folder of a series: its values and seeds, among others
MAX_MEMBERS = 1000
MAX_STEM = 235  # bytes of a name without number and seed: with them and `.log` a file name has 255 at most
_OPEN, _CLOSE, _QUOTES = "[{(", "]})", "\"'"
_SEEDS = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One run of a series: the name of its directory, and what it sets besides the settings that all members share."""

    name: str
    overrides: tuple[str, ...]  # section.key=value, the seed among them


def parse_seeds(text: str) -> tuple[int, ...]:
    """Return the seeds of `1-5`, `1,3,7` or `1-3,7`, each once. Raises `ConfigError`."""
    seeds: list[int] = []
    for part in text.split(","):
        match = _SEEDS.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first or last - first >= MAX_MEMBERS:
            raise ConfigError("--seeds", found=repr(text), wanted=f"at most {MAX_MEMBERS} seeds such as 1-5 or 1,3,7")
        seeds += range(first, last + 1)
    return tuple(dict.fromkeys(seeds))


def split_values(text: str) -> list[str]:
    """Return the values of `text`, which commas outside brackets, braces and quotes separate."""
    values, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in _QUOTES:
            quote = character
        elif character in _OPEN:
            depth += 1
        elif character in _CLOSE:
            depth -= 1
        elif character == "," and depth == 0:
            values.append("")
            continue
        values[-1] += character
    return [value.strip() for value in values]


def has_grid(overrides: Sequence[str]) -> bool:
    """Return whether one of the settings has several values."""
    return any(len(_values_of(text)[1]) > 1 for text in overrides)


def _values_of(text: str) -> tuple[str, list[str]]:
    """Return key and values of `section.key=A,B`."""
    key, _, value = text.partition("=")
    whole = (schema_at(key.split("."), {}) or {}).get("format") == COMMA_LIST
    return key, [value] if whole else split_values(value)


def split_overrides(overrides: Sequence[str]) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Return the settings with one value, unchanged, and the values of the others by key. Raises `ConfigError`."""
    shared: list[str] = []
    grid: dict[str, tuple[str, ...]] = {}
    named = [_values_of(text)[0] for text in overrides]
    for text in overrides:
        key, values = _values_of(text)
        if len(values) > 1 and named.count(key) > 1:
            raise ConfigError(f"{key} is set {named.count(key)} times", found=text, wanted="all of its values at once")
        if len(values) == 1:
            shared.append(text)
            continue
        if key in {"run.seed", "run.dir", "run.id"}:
            fix = "use --seeds 1-5" if key == "run.seed" else "leave it out: each run of a series has its own"
            raise ConfigError(f"{key} has several values", found=",".join(values), wanted="one value", fix=fix)
        different = {comparable(override_layer(f"{key}={value}").values) for value in values}
        if "" in values or len(different) < len(values):
            raise ConfigError(f"values of {key}", found=",".join(values), wanted="different values, separated by single commas")
        grid[key] = tuple(values)
    return tuple(shared), grid


def members(grid: Mapping[str, tuple[str, ...]], seeds: Sequence[int]) -> list[Member]:
    """Return the runs of a series: for each combination of values all seeds. Raises `ConfigError` where there are too many.

    Where values differ only in characters that a name cannot have, or one is too long, each name begins with the number of the
    combination.
    """
    count = math.prod(map(len, grid.values()))
    if count * len(seeds) > MAX_MEMBERS:
        found = f"{count} combinations of values x {len(seeds)} seeds"
        raise ConfigError("runs of a series", found=found, wanted=f"at most {MAX_MEMBERS}")
    combinations = [tuple(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    names = [key.rpartition(".")[2] for key in grid]
    short = {key: name if names.count(name) == 1 else key for key, name in zip(grid, names, strict=True)}  # without its section
    stems = ["-".join(f"{short[key]}={value}" for key, value in combination) for combination in combinations]
    stems = [re.sub(r"[^\w.=+-]+", "_", stem) for stem in stems]
    if len(set(stems)) < len(stems) or any(len(stem.encode()) > MAX_STEM for stem in stems):  # not names as they are
        stems = [f"{number:03}-{stem.encode()[:MAX_STEM].decode(errors='ignore')}" for number, stem in enumerate(stems)]
    return [
        Member(
            name=f"{stem}-s{seed}" if stem else f"s{seed}",
            overrides=(*(f"{key}={value}" for key, value in combination), f"run.seed={seed}"),
        )
        for combination, stem in zip(combinations, stems, strict=True)
        for seed in seeds
    ]
