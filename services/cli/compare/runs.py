"""Runs on the disk, and their configurations: runs with equal settings but for the seed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from common.config.layers import comparable, dotted
from common.config.schema import Settings
from common.config.sections import TargetSettings
from common.errors import ConfigError
from common.runtime.run_directory import RunDirectory, read_config, run_folders
from services.cli.series.grid import SERIES_FILE, members
from services.cli.train.outcome import SCORES, curve_points, is_evaluation_older, own_end, read_curve

_BUDGETS = ("target.env_steps", "target.wall_seconds")
MAX_LABEL_SETTINGS = 4  # named in the label of a configuration; the table of settings has all

# Chosen for each run, or without effect on what it learns.
_OWN_KEYS = {"run.id", "run.dir", "run.seed", "run.preset", "run.tracking", "run.store"}
_OWN_SECTIONS = {"metrics", "log", "checkpoint", "env_worker"}
_SERVICES = {"learner", "actor", "evaluator", "policy_server"}
_OWN_SERVICE_KEYS = {"learner", "bind", "name", "keys", "insecure", "allow_code", "ranks_seconds", "learner_seconds"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """The files of one run. Values that a file lacks are missing here too: the run may have just begun."""

    path: Path
    settings: Mapping[str, Any]  # by dotted key
    curve: Sequence[Mapping[str, str]]  # rows of learning_curve.csv
    summary: Mapping[str, Any]
    command: str
    settings_changed: Sequence[Mapping[str, Any]] = ()  # at resumes
    copies: Sequence[Path] = ()  # of the same run, which do not count

    @property
    def target(self) -> dict[str, Any]:
        """Return section `target` of its settings."""
        return {name: self.settings.get(f"target.{name}") for name in TargetSettings.model_fields}

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return int(self.settings.get("run.seed", 0))

    @property
    def preset(self) -> str:
        """Name of the preset; "run" without one."""
        return str(self.settings.get("run.preset") or "run")

    def points(self, x: str, y: str) -> tuple[list[float], list[float]]:
        """Return the values of two columns of the learning curve, without the rows in which one is empty."""
        return curve_points(self.curve, x, y)

    def number(self, *keys: str) -> float | None:
        """Return the number at `keys` of the summary; None where there is none."""
        value: Any = self.summary
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return float(value) if isinstance(value, int | float) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Runs with equal settings but for the seed, ordered by seed."""

    number: int  # from 1, by which tables and figures name it
    label: str
    runs: Sequence[RunData]

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the first run."""
        return self.runs[0].settings

    @property
    def env(self) -> str:
        """Name of the environment."""
        return str(self.settings.get("env.entry_point") or self.settings.get("env.id"))


def read_runs(
    paths: Iterable[Path], *, copies: Iterable[Path] = (), warn: Callable[[Path], None] = lambda _: None
) -> list[RunData]:
    """Return the runs in `paths`, each a run directory or a folder of such, and in the run directories `copies`, each run once.

    Of a run and its copies, wherever they are, one that has finished counts, else the one with the longest curve. `warn` is
    called with each folder that may not be entered, whose runs are left out. Raises `ConfigError` where a path holds no run.
    """
    found: dict[Path, RunData] = {}
    for path in paths:
        inside = list(run_folders(path, warn=warn))
        if not inside:
            kind = "an empty folder" if path.is_dir() and not any(path.iterdir()) else "a folder without one"
            what = kind if path.is_dir() else "no folder"
            wanted = "a run directory, with a config.yaml, or a folder of such"
            raise ConfigError(f"no run in {path}", found=what, wanted=wanted)
        found |= {folder.resolve(): read_run(folder) for folder in inside}
    equal: dict[tuple[str, str], list[RunData]] = {}
    every = (*found.values(), *map(read_run, dict.fromkeys(copies)))
    for run in sorted(every, key=lambda run: not run.curve):  # one without a point may be a copy of several
        origin, first = _identity(run)
        known = (key for key in equal if key[0] == origin and (key[1] == first or "" in (key[1], first)))
        equal.setdefault(next(known, (origin, first)), []).append(run)
    return [_furthest(runs) for runs in equal.values()]


def _furthest(copies: Sequence[RunData]) -> RunData:
    furthest = max(copies, key=lambda run: (bool(own_end(run.summary, run.target)), len(run.curve)))
    return replace(furthest, copies=[run.path for run in copies if run is not furthest])


def _identity(run: RunData) -> tuple[str, str]:
    """Return what a run has in common with its copies alone: id, seed and settings; and its first point, "" before it has one.

    No other run has the wall-clock time of the point. In versions before, runs that began with the config.yaml of another run had
    its id; and a copy that was resumed with other settings is another run.
    """
    run_id, first = run.settings.get("run.id"), str([*run.curve[0].values()]) if run.curve else ""
    return (f"{run_id} {run.seed} {_compared_text(run)}" if run_id else str(run.path.resolve())), first


def _compared_text(run: RunData) -> str:
    return comparable(compared_settings(run))


def read_run(path: Path) -> RunData:
    """Return the run in the directory `path`. Raises `ConfigError` where a file of it cannot be read."""
    directory = RunDirectory(path)
    try:
        values = read_config(directory)
        summary = json.loads(_text(directory.summary) or "{}")
        changed = json.loads(_text(directory.settings_changed) or "[]")
        curve = read_curve(directory.learning_curve_csv)
        command = _text(directory.command).strip()
        if not isinstance(summary, dict) or not isinstance(changed, list):
            raise TypeError("no mapping")  # noqa: TRY301  one error for all faults of these files
        run = RunData(path=path, settings=dotted(values), curve=curve, summary=summary, command=command, settings_changed=changed)
        _require_numbers(run)
        further = max((float(row.get("env_steps") or 0) for row in curve), default=0.0) > summary.get("env_steps", 0)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ConfigError(f"the files of the run in {path} cannot be read", found=str(error), wanted="files of a run") from error
    return replace(run, summary={}) if further else run  # of an earlier end: the run was resumed, and goes on or was killed


def _require_numbers(run: RunData) -> None:
    """Raise what tables would raise for values that are not of the types that the learner writes."""
    scores = [score for name in SCORES if (score := run.target[name]) is not None]
    math.fsum([run.seed, *scores, *(resume["env_steps"] for resume in run.settings_changed if [*resume["settings"]])])
    own_end(run.summary, run.target)
    is_evaluation_older(run.summary)


def unbegun_members(series: Path) -> tuple[list[str], int]:
    """Return the names of the runs that have not begun of the series in the folder `series`, and how many runs it has."""
    names, _ = _series(series)
    return [name for name in names if not RunDirectory(series / name).begun], len(names)


def _series(folder: Path) -> tuple[Sequence[str], Mapping[str, Any]]:
    """Return the names of the runs of the series in `folder`, and settings of its first run, without those with several values.

    Without a series, or where its file cannot be read, there are none: the runs that have begun can be compared.
    """
    try:
        values = json.loads(_text(folder / SERIES_FILE) or "{}")
        names = [member.name for member in members(values.get("grid", {}), values.get("seeds", ()))]
        return names, dict(next(iter(values.get("settings", ())), {}))
    except (OSError, ValueError, AttributeError, TypeError, ConfigError):
        return (), {}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def compared_settings(run: RunData) -> dict[str, Any]:
    """Return the settings that decide to which configuration a run belongs.

    A setting that its version did not have yet has its default.
    """
    return {key: value for key, value in {**_defaults(), **run.settings}.items() if not is_own(key)}


@cache
def _defaults() -> Mapping[str, Any]:
    """Return the default of every setting outside the section `algorithm`, which has other keys for each algorithm."""
    return dotted(Settings().model_dump(mode="json", exclude={"algorithm"}))


def is_own(key: str) -> bool:
    """Return whether each run has a value of its own for a setting, or the setting has no effect on what a run learns."""
    section, _, name = key.partition(".")
    return key in _OWN_KEYS or section in _OWN_SECTIONS or (section in _SERVICES and name in _OWN_SERVICE_KEYS)


def configurations(runs: Iterable[RunData]) -> list[Configuration]:
    """Return the configurations of `runs` in the order in which they first occur."""
    groups: dict[str, list[RunData]] = {}
    for run in map(_with_budget_of_series, runs):
        groups.setdefault(_compared_text(run), []).append(run)
    lists = [sorted(group, key=lambda run: (run.seed, str(run.path))) for group in groups.values()]
    named = enumerate(zip(_labels(lists), lists, strict=True), 1)
    return [Configuration(number=number, label=label, runs=group) for number, (label, group) in named]


def _with_budget_of_series(run: RunData) -> RunData:
    """Return the run with the budget of its series where that is larger: the series was resumed with it.

    A run that had reached its target is not resumed, and would be apart from the others by its result.
    """
    path = run.path.resolve()
    names, settings = _series(path.parent)
    larger = {key: settings[key] for key in _BUDGETS if key in settings and _limit(settings[key]) > _limit(run.settings.get(key))}
    return replace(run, settings={**run.settings, **larger}) if larger and path.name in names else run


def _limit(value: Any) -> float:
    return value if isinstance(value, int | float) else math.inf


def differing_settings(groups: Sequence[Configuration]) -> dict[str, list[Any]]:
    """Return the settings that differ among `groups`, by key, with the value of each; None where one lacks it."""
    return _differing([compared_settings(group.runs[0]) for group in groups])


def _differing(trees: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    keys = dict.fromkeys(key for tree in trees for key in tree)
    values = {key: [tree.get(key) for tree in trees] for key in keys}
    return {key: found for key, found in values.items() if len({*map(comparable, found)}) > 1}


def _labels(groups: Sequence[Sequence[RunData]]) -> list[str]:
    """Return a label for each group: its preset, and its settings that differ among the groups of that preset."""
    labels = []
    for group in groups:
        alike = [other for other in groups if other[0].preset == group[0].preset]
        own = compared_settings(group[0])
        changed = _differing([compared_settings(other[0]) for other in alike])
        parts = [f"{key}={own[key]}" for key in list(changed)[:MAX_LABEL_SETTINGS] if own.get(key) not in (None, "")]
        if len(changed) > MAX_LABEL_SETTINGS:
            parts.append("...")
        labels.append(" ".join([group[0].preset, *parts]))
    if len(set(labels)) == len(labels):
        return labels
    return [f"{label} ({group[0].path.name})" for label, group in zip(labels, groups, strict=True)]
