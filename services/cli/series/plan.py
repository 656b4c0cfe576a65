"""The plan of a series: the runs that a command asks for, its settings checked, and the file that a resumed one has it from."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from common.conditions import COMMAND_LINE, DEFAULT
from common.config.layers import differences, dotted
from common.config.load import LoadedSettings, load_settings
from common.config.schema import Settings
from common.config.sections import as_run_name
from common.errors import ConfigError, ResourceError
from common.runtime.disk import write_atomically
from common.runtime.run_directory import RunDirectory, held, is_config_of_a_run
from common.tracking.remote import check_tracking
from services.cli.compare.runs import is_own
from services.cli.env_trial import check_environment
from services.cli.series.grid import SERIES_FILE, Member, members, parse_seeds, split_overrides
from services.cli.train.plan import check_workers
from services.cli.train.ports import has_port

SWEEP_FILE = "file of the sweep"  # source of the settings of its trials
SAVED_OPTIONS = {"--actors", "--log-format"}  # of `rookery train`


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The runs that one command asked for."""

    preset: str
    overrides: tuple[str, ...]  # of all members
    options: tuple[str, ...]  # of `rookery train`, of all members
    grid: Mapping[str, tuple[str, ...]]  # values by key, of the settings with several
    seeds: tuple[int, ...]
    settings: Sequence[Mapping[str, Any]] = ()  # `effective_settings` of the members

    @property
    def members(self) -> list[Member]:
        """One run for each combination of values with each seed. Raises `ConfigError` where there are too many."""
        return members(self.grid, self.seeds)

    @property
    def combinations(self) -> list[Member]:
        """One of the members with each combination of values."""
        return members(self.grid, self.seeds[:1])

    def overrides_of(self, member: Member) -> tuple[str, ...]:
        """Return all settings of a member."""
        return (*self.overrides, *member.overrides)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesRequest:
    """The command line. `seeds` is None where it names none, `folder` where it names no directory."""

    preset: str | None
    overrides: tuple[str, ...]  # a value with commas stands for several
    seeds: str | None
    named: tuple[str, ...] = ()  # settings with one value
    options: tuple[str, ...] = ()
    folder: Path | None = None
    resume: bool = False
    parallel: int = 1  # runs at a time


def is_series(folder: Path | None) -> bool:
    """Return whether `folder` holds a series."""
    return folder is not None and (folder / SERIES_FILE).is_file()


@contextmanager
def open_series(request: SeriesRequest, *, environ: Mapping[str, str], now: datetime) -> Iterator[tuple[Series, Path]]:
    """Yield the series and its folder, both written, and hold the lock of the folder while inside.

    A resumed series has the settings, values, seeds and options of its file, but for those that the command names. Raises
    `ConfigError` or `ResourceError` before anything is written.
    """
    before = _existing(request.folder) if request.resume else None
    with held(RunDirectory(before)) if before else nullcontext():  # the file that is read is the one that is replaced
        saved = _read(before) if before else None
        series, settings = _planned(request, saved, environ)
        folder = request.folder or Path("runs") / f"{as_run_name(settings.run.preset) or 'run'}-{now:%Y%m%d-%H%M%S}"
        content = (json.dumps(asdict(series), indent=2) + "\n").encode()
        with written_folder(folder, {SERIES_FILE: content}, what="series", resume=request.resume):
            yield series, folder


@contextmanager
def written_folder(folder: Path, files: Mapping[str, bytes], *, what: str, resume: bool) -> Iterator[None]:
    """Write `files` into the folder of `what`, a series or a sweep; make a new folder, and hold its lock while inside.

    Of a resumed one the caller has the lock. Raises `ConfigError` where a new folder is in use, `ResourceError` where a folder
    cannot be written.
    """
    with ExitStack() as stack:
        try:
            if not resume:
                folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(held(RunDirectory(folder)))
                if any(folder.iterdir()):
                    fact, fix = f"folder of the {what} is in use", f"name another --run-dir, or continue the {what} with --resume"
                    raise ConfigError(fact, found=str(folder), wanted="a new or empty folder", fix=fix)
            for name, content in files.items():
                write_atomically(folder / name, content)
        except OSError as error:
            found = f"{error.strerror} at {folder}"
            raise ResourceError(f"folder of the {what} cannot be written", found=found, fix="set --run-dir") from error
        yield


def _planned(request: SeriesRequest, saved: Series | None, environ: Mapping[str, str]) -> tuple[Series, Settings]:
    """Return the series with all its settings checked, and the settings of its first member."""
    if saved is not None and request.preset not in {None, saved.preset}:
        fix = "leave the preset out, or name another --run-dir"
        raise ConfigError("the series to resume is of another preset", found=saved.preset, wanted=request.preset, fix=fix)
    preset = request.preset or (saved.preset if saved else None)
    if preset is None:
        raise ConfigError("no preset named", found="a series without one", wanted="rookery train PRESET --seeds 1-5")
    shared, grid = split_overrides(request.overrides)
    shared, options = (*shared, *request.named), request.options
    named = {text.partition("=")[0] for text in shared}
    if "run.seed" in named and (saved is not None or request.seeds is not None):
        raise ConfigError("a seed beside the seeds of the series", found="run.seed", wanted="--seeds with all seeds")
    init = [text for text in (*request.overrides, *request.named) if text.startswith("run.init=")]
    if saved is not None and init:  # each of its runs would refuse it
        fix = "leave it out, or begin another series with it"
        raise ConfigError("run.init of a series that goes on", found=init[0], wanted="none: its runs have weights", fix=fix)
    if saved is not None:
        changes = (*shared, *(f"{key}={values[0]}" for key, values in grid.items()))
        overrides = ((*saved.overrides_of(member), *changes) for member in saved.combinations)
        before = [load_settings(preset=preset, overrides=each, environ=environ) for each in overrides]
        fix = "set them as they were, or name the settings on the command line"
        known = {tree.get("algorithm.name") for tree in saved.settings} | {*saved.grid.get("algorithm.name", ())}
        other = {"algorithm"} if {each.settings.algorithm.name for each in before} - known else set()  # has its own settings
        require_settings(before, saved.settings, apart={*saved.grid, *named, *grid} | other, fix=fix)
        options = _merged(saved.options, options, counted="actor.count" in {*named, *grid})
        grid = {key: values for key, values in saved.grid.items() if key not in named} | grid
        shared = (*saved.overrides, *shared)
        _require_names(saved, grid)
    first = (*shared, *(f"{key}={values[0]}" for key, values in grid.items()))
    loaded = load_settings(preset=preset, overrides=first, environ=environ, strict=not grid)
    base = loaded.settings
    if saved is None:
        require_own_ids(loaded)
    seeds = parse_seeds(request.seeds) if request.seeds is not None else saved.seeds if saved else (base.run.seed,)
    series = Series(preset=preset, overrides=shared, options=options, grid=grid, seeds=seeds)
    checked = [load_settings(preset=preset, overrides=series.overrides_of(member), environ=environ) for member in series.members]
    if request.parallel > 1:
        _require_own_ports(checked)
    combinations = checked[:: len(seeds)]
    if saved is None or request.overrides:  # others were tried when the series began
        try_runs(combinations, environ, auto_actors="auto" in options)
    return replace(series, settings=effective_settings(combinations, apart=grid)), checked[0].settings


def try_runs(runs: Iterable[LoadedSettings], environ: Mapping[str, str], *, auto_actors: bool = False) -> None:
    """Raise `ConfigError` where a run would be refused at its start.

    An environment fails in a trial or does not fit, a tracker cannot work, or a rank has no actor.
    """
    settings = [loaded.settings for loaded in runs]
    for each in settings:
        check_workers(each, auto_actors=auto_actors)
    check_environment(*settings)
    for each in settings:
        check_tracking(each.run.tracking, environ)


def _require_names(saved: Series, grid: Mapping[str, tuple[str, ...]]) -> None:
    """Raise `ConfigError` where runs that `saved` has would get other names by `grid`, and begin anew beside themselves."""
    names = {member.overrides: member.name for member in saved.members}
    same = all(names.get(member.overrides, member.name) == member.name for member in members(grid, saved.seeds))
    if grid.keys() != saved.grid.keys() or not same:
        found, wanted = (" ".join(f"{key}={','.join(each[key])}" for key in each) for each in (grid, saved.grid))
        fact, fix = "the runs of the series would get other names, and begin anew", "name several values of the same settings"
        raise ConfigError(
            fact, found=found or "no several values", wanted=wanted or "none", fix=f"{fix}, or begin another series"
        )


def effective_settings(runs: Iterable[LoadedSettings], *, apart: Collection[str]) -> list[dict[str, Any]]:
    """Return the settings of `runs` that have an effect on what a run learns, by dotted key, but for those `apart`, each once.

    Runs with other values of those `apart` may read other parts of a preset: another algorithm has other settings.
    """
    found: list[dict[str, Any]] = []
    for loaded in runs:
        values = dotted(loaded.settings.model_dump(mode="json"))
        kept = {key: value for key, value in values.items() if not (is_own(key) or _is_apart(key, apart))}
        if kept not in found:
            found.append(kept)
    return found


def _is_apart(key: str, apart: Collection[str]) -> bool:
    """Return whether `key` is one of those `apart`, or inside one, or an empty mapping around one."""
    return any(key == name or key.startswith(f"{name}.") or name.startswith(f"{key}.") for name in apart)


def require_settings(
    now: Sequence[LoadedSettings], saved: Sequence[Mapping[str, Any]], *, apart: Collection[str], fix: str
) -> None:
    """Raise `ConfigError` where a run has settings, but for those `apart`, that no run in `saved` (`effective_settings`) has.

    A setting that the version of `saved` did not have yet may have its default.
    """
    before = [{key: value for key, value in tree.items() if not _is_apart(key, apart)} for tree in saved]
    for loaded in now:
        (values,) = effective_settings([loaded], apart=apart)
        set_here = {key for key in values if loaded.provenance[key] != DEFAULT}
        known = ({key: value for key, value in values.items() if key in tree or key in set_here} for tree in before)
        changes = [differences(*both) for both in zip(known, before, strict=True)]
        if changes and ("", "") not in changes:
            found, wanted = min(changes, key=lambda texts: sum(map(len, texts)))
            fact = "variables ROOKERY_... or the preset have changed since the first start"
            raise ConfigError(fact, found=found or "less", wanted=wanted or "no more", fix=fix)


def _merged(saved: Sequence[str], newer: Sequence[str], *, counted: bool) -> tuple[str, ...]:
    """Return the options (names and values in turn) of a series, where the command that resumes it does not name them anew.

    `counted`: the command sets the number of actors, which replaces the saved `--actors`.
    """
    pairs = dict(zip(saved[::2], saved[1::2], strict=False))
    if counted:
        pairs.pop("--actors", None)
    return tuple(itertools.chain(*(pairs | dict(zip(newer[::2], newer[1::2], strict=False))).items()))


def require_own_ids(loaded: LoadedSettings) -> None:
    """Raise `ConfigError` where all runs would have one `run.id`, by which trackers know a run, or one `run.dir`."""
    run = loaded.settings.run
    if (found := run.id) and not is_config_of_a_run(loaded.provenance["run.id"]):
        raise ConfigError("run.id of a series", found=found, wanted="none: each of its runs has an id of its own")
    if (found := run.dir) and loaded.provenance["run.dir"] in {COMMAND_LINE, SWEEP_FILE}:
        raise ConfigError("run.dir of a series", found=found, wanted="none", fix="name the folder of all its runs by --run-dir")


def _require_own_ports(runs: Iterable[LoadedSettings]) -> None:
    """Raise `ConfigError` where two of the runs have the same port, on which one at a time can listen."""
    taken: set[tuple[str, object]] = set()
    for loaded in runs:
        settings = loaded.settings
        own = {"metrics.port": settings.metrics.port, "learner.bind": has_port(loaded) and settings.learner.bind}
        for key, found in own.items():
            if found and (key, found) in taken:
                fix = "set it to port 0, or run one at a time, without --parallel"
                raise ConfigError(f"{key} of several runs at a time", found=found, wanted="port 0: any free one", fix=fix)
        taken.update(own.items())


def _existing(folder: Path | None) -> Path:
    if folder is None or not is_series(folder):
        fix = "set --run-dir to the folder of a series"
        raise ConfigError(
            "no series to resume", found=str(folder or "--resume alone"), wanted=f"a folder with {SERIES_FILE}", fix=fix
        )
    return folder


def _read(folder: Path) -> Series:
    try:
        values = json.loads((folder / SERIES_FILE).read_text(encoding="utf-8"))
        options = _options(values["options"])
        return Series(
            preset=values["preset"],
            overrides=tuple(values["overrides"]),
            options=options,
            grid={key: tuple(found) for key, found in values["grid"].items()},
            seeds=tuple(values["seeds"]),
            settings=[dict(tree) for tree in values["settings"]],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder / SERIES_FILE} cannot be read", found=repr(error), wanted="the file of a series") from error


def _options(words: Sequence[str]) -> tuple[str, ...]:
    """Return the options in a file. Raises `ValueError` for others than a series saves: a file allows no code."""
    known = SAVED_OPTIONS.issuperset(words[::2]) and not any(value.startswith("-") for value in words[1::2])
    if len(words) % 2 or not known:
        raise ValueError(f"options {[*words]}, wanted a value each of {' and '.join(sorted(SAVED_OPTIONS))}")
    return tuple(words)
