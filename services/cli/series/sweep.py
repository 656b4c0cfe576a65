"""`rookery sweep`: trials, each a `rookery train` with settings that Optuna chooses; a bad learning curve ends one early."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy import URL

from common.conditions import unmet
from common.config.code_references import allow_code
from common.config.layers import differences
from common.config.load import LoadedSettings, load_settings
from common.errors import ConfigError
from common.runtime.process import INTERRUPTED
from common.runtime.run_directory import RunDirectory, held
from common.units import Seconds
from services.cli.compare.runs import RunData, read_run
from services.cli.compare.tables import TextTable, print_tables, reached_target, remark_on_evaluation, remark_on_mean
from services.cli.series.plan import SWEEP_FILE, effective_settings, require_own_ids, require_settings, try_runs, written_folder
from services.cli.series.run import TrainProcesses, is_finished, is_readable, train_arguments
from services.cli.series.space import Choices, Sweep, as_text, read_sweep
from services.cli.train.view import number

FILE, STUDY = "sweep.yaml", "study.sqlite"
SWEEP = "sweep"  # attribute of the study: the file, less what may change from one start to the next
SETTINGS = "settings"  # the same: settings of trials but for those searched, those of variables and of the preset among them
VALUES = {  # of the goals, as a line on a trial without one names them
    "curve": "a learning curve: some environment ended no episode",
    "mean100": "an episode that ended",
    "evaluation": "an evaluation",
}
REMARKS = {"mean100": remark_on_mean, "evaluation": remark_on_evaluation}  # beside the value of a goal
STAGES = 20  # points of a curve, at equal distances over the budget, at which trials are compared
FIRST_STAGE = 5  # that is compared; the first of all is 1
MAX_FAILURES = 2  # in a row: their cause is not the settings that were drawn, but such as a full disk
MAX_CONFLICTS = 20  # in a row, none of which takes time: where so many values conflict, the space is at fault
STARTUP_TRIALS = 4  # before the first trial that is compared
POLL_SECONDS: Seconds = 2.0  # between two looks at a curve


@contextmanager
def open_sweep(file: Path | None, folder: Path, *, resume: bool, environ: Mapping[str, str]) -> Iterator[Sweep]:
    """Yield the sweep, make its folder, and hold the lock of the folder while inside.

    A resumed sweep has the file in its folder, where none is named. Only `trials` and `prune` may differ from before: values of
    other searches cannot be compared. Raises `ConfigError` or `ResourceError` before anything is written.
    """
    source = file or folder / FILE
    if resume and not (folder / STUDY).is_file():
        raise ConfigError("no sweep to resume", found=str(folder), wanted=f"a folder with {STUDY}", fix="set --run-dir to it")
    with held(RunDirectory(folder)) if resume else nullcontext():  # the files that are read are those that are continued
        sweep = read_sweep(source)
        if resume:
            _check_resumed(sweep, folder, environ)
        else:
            _check_new(sweep, environ)
        files = {} if source == folder / FILE else {FILE: source.read_bytes()}
        with written_folder(folder, files, what="sweep", resume=resume):
            yield sweep


def _check_new(sweep: Sweep, environ: Mapping[str, str]) -> None:
    """Raise `ConfigError` for settings of trials that cannot be compared, or with which a trial would be refused."""
    sweep.require_once()
    corners = _corners(sweep, environ)
    for loaded in corners:
        require_own_ids(loaded)
        target = loaded.settings.target
        scores = {f"target.{key}": value for key in ("mean100", "evaluation") if (value := getattr(target, key)) is not None}
        if sweep.goal != "curve" and scores:
            raise ConfigError(
                f"goal {sweep.goal} compares trials that end as soon as they reach a target",
                found=", ".join(f"{key} {value:g}" for key, value in scores.items()),
                wanted="null",
                fix=f"set it under `settings` ({{{', '.join(f'{key}: null' for key in scores)}}}), or take goal: curve",
            )
        if sweep.goal == "evaluation" and not loaded.settings.evaluator.enabled:
            fact, fix = "goal evaluation needs an evaluator in each trial", "set it under `settings`, or take goal: curve"
            raise ConfigError(fact, found="evaluator.enabled false", wanted="true", fix=fix)
        if sweep.goal == "curve" and target.wall_seconds is not None:
            raise ConfigError(
                "goal curve compares trials over the whole budget of env steps",
                found=f"target.wall_seconds {target.wall_seconds:g}, at which a trial may end before",
                wanted="null",
                fix="set it to null under `settings`, or take goal: mean100 or evaluation",
            )
    try_runs(corners, environ)


def _check_resumed(sweep: Sweep, folder: Path, environ: Mapping[str, str]) -> None:
    """Raise `ConfigError` for settings of trials that cannot be compared with those before."""
    corners = _corners(sweep, environ)
    with _study(folder, sweep) as study:
        found, wanted = differences(_lasting(sweep), study.user_attrs.get(SWEEP, _lasting(sweep)))
        settings = study.user_attrs.get(SETTINGS)
    if found or wanted:
        fix = "begin another sweep, or change trials and prune alone"
        raise ConfigError("the sweep to resume searches otherwise", found=found or "less", wanted=wanted or "no more", fix=fix)
    if settings is not None:
        fix = "set them as they were, or begin another sweep"
        require_settings(corners, settings, apart=sweep.search, fix=fix)


def run_sweep(
    sweep: Sweep,
    folder: Path,
    *,
    trainer: TrainProcesses,
    show: Callable[[str], None],
    stdout: TextIO,
    environ: Mapping[str, str],
    options: tuple[str, ...] = (),
) -> int:
    """Run trials until `sweep.trials` have not failed, or too many in a row have, show the best, and return the exit code.

    0: all trials ended, or a stop was requested; 1: a trial failed; 130: a trial was stopped at once.
    """
    with _study(folder, sweep) as study:
        if SWEEP not in study.user_attrs:
            study.set_user_attr(SWEEP, _lasting(sweep))
        if SETTINGS not in study.user_attrs:
            study.set_user_attr(SETTINGS, effective_settings(_corners(sweep, environ), apart=sweep.search))
        study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))  # a resumed search draws other values than the first
        code = failures = conflicts = 0
        while not trainer.stopped and failures < MAX_FAILURES and (trial := _next_trial(study, sweep)) is not None:
            place = folder / f"t{trial.number:03}"
            values = _suggest(trial, sweep)
            chosen = ", ".join(f"{key}={as_text(key, value)}" for key, value in values.items())
            show(f"trial {_counted(study)} of {sweep.trials}, {place.name}: {chosen}")
            try:
                ended = _run_trial(trial, sweep, values, place, trainer=trainer, show=show, environ=environ, options=options)
            except ConfigError as error:  # values that conflict: only bounds and choices were checked before
                study.tell(trial, state=TrialState.FAIL)
                show(f"{place.name} counts as failed: {error}")
                code, conflicts = 1, conflicts + 1
                if conflicts == MAX_CONFLICTS:
                    show(f"the sweep ends, because {MAX_CONFLICTS} trials in a row conflict: narrow their bounds in a new sweep")
                    break
                continue
            conflicts = 0
            if ended == INTERRUPTED:
                code = ended
                break
            failures = failures + 1 if ended else 0
            code = max(code, ended)
        if failures == MAX_FAILURES:
            show(f"the sweep ends, because {MAX_FAILURES} trials in a row failed: remove the cause, and go on")
        _show_best(study, sweep, folder, show=show, stdout=stdout, environ=environ)
    return code


@contextmanager
def _study(folder: Path, sweep: Sweep) -> Iterator[optuna.Study]:
    """Yield the study in `folder`, a new one where there is none; its file is open while inside."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    place = URL.create("sqlite", database=str((folder / STUDY).absolute()))  # as text "?" would end the path, "{" be a template
    storage = optuna.storages.RDBStorage(place.render_as_string())
    with ExitStack() as opened:  # connections to the file
        opened.callback(storage.engine.dispose)
        opened.callback(storage.remove_session)
        median = optuna.pruners.MedianPruner(n_startup_trials=STARTUP_TRIALS, n_warmup_steps=FIRST_STAGE)
        pruner = median if sweep.prune else optuna.pruners.NopPruner()
        yield optuna.create_study(storage=storage, study_name="sweep", load_if_exists=True, direction="maximize", pruner=pruner)


def _lasting(sweep: Sweep) -> dict[str, Any]:
    """Return, as JSON values, what the values of trials follow from."""
    return sweep.model_dump(mode="json", exclude={"trials", "prune"})


def _corners(sweep: Sweep, environ: Mapping[str, str]) -> list[LoadedSettings]:
    """Return the settings of trials with each bound and each choice."""
    return [_load(sweep, values, environ) for values in sweep.corners()]


def _load(sweep: Sweep, values: Mapping[str, Any], environ: Mapping[str, str]) -> LoadedSettings:
    """Return the settings of a trial with `values` for the settings that are searched."""
    return load_settings(preset=sweep.preset, overrides=sweep.overrides(values), environ=environ, source=SWEEP_FILE)


def _next_trial(study: optuna.Study, sweep: Sweep) -> Trial | None:
    """Return a trial that was interrupted, else a new one; None once there are enough."""
    interrupted = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    if interrupted:
        return Trial(study, interrupted[0]._trial_id)  # noqa: SLF001  Optuna has no public way to continue a trial
    return study.ask() if _counted(study) < sweep.trials else None


def _counted(study: optuna.Study) -> int:
    """Return the number of trials that have not failed."""
    return sum(trial.state is not TrialState.FAIL for trial in study.get_trials(deepcopy=False))


def _suggest(trial: Trial, sweep: Sweep) -> dict[str, Any]:
    """Return a value for each searched setting; those of an interrupted trial are the same as before."""
    values: dict[str, Any] = {}
    for key, part in sweep.search.items():
        if isinstance(part, Choices):  # as text, because Optuna stores no lists
            values[key] = json.loads(trial.suggest_categorical(key, [json.dumps(choice) for choice in part.choices]))
        elif part.whole:
            values[key] = trial.suggest_int(key, int(part.low), int(part.high), log=part.log)
        else:
            values[key] = trial.suggest_float(key, part.low, part.high, log=part.log)
    return values


def _run_trial(
    trial: Trial,
    sweep: Sweep,
    values: Mapping[str, Any],
    place: Path,
    *,
    trainer: TrainProcesses,
    show: Callable[[str], None],
    environ: Mapping[str, str],
    options: tuple[str, ...],
) -> int:
    """Run or continue one trial and store its result; return 0, 1 for a failure, or 130.

    Raises `ConfigError` for values that conflict, and for files of the run that cannot be read.
    """
    overrides = sweep.overrides(values)
    budget = _load(sweep, values, environ).settings.target.env_steps
    earlier = trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values  # of an interrupted trial
    watch = _Watch(trial=trial, place=place, budget=budget, reported=max(earlier, default=0))
    code = trainer.train(train_arguments(sweep.preset, overrides, options, place), over=watch.should_end)
    if code == INTERRUPTED:
        return code
    if code != 0:
        trial.study.tell(trial, state=TrialState.FAIL)
        return 1
    if is_finished(place, overrides=overrides, environ=environ):  # also where it was to end early and had reached its target
        run = read_run(place)
        watch.report_rest(run)
        result = goal_value(run, sweep.goal, budget=budget)
        trial.study.tell(trial, result, state=TrialState.FAIL if result is None else TrialState.COMPLETE)
        if result is None:
            show(f"{place.name} counts as failed, because it ended without {VALUES[sweep.goal]}")
        return int(result is None)
    if watch.pruned:
        trial.study.tell(trial, state=TrialState.PRUNED)
    return 0  # a trial that was stopped stays open, for --resume


@dataclass(slots=True, kw_only=True)
class _Watch:
    """Reports the curve of a trial while it runs, and decides whether it is to end early."""

    trial: Trial
    place: Path
    budget: int
    reported: int  # stages
    pruned: bool = False
    _next: Seconds = 0.0

    def should_end(self) -> bool:
        """Return whether the trial is worse than the median of the earlier ones. Called several times a second."""
        if self.pruned or time.monotonic() < self._next or not RunDirectory(self.place).begun:
            return self.pruned
        self._next = time.monotonic() + POLL_SECONDS
        try:
            env_steps, returns = read_run(self.place).points("env_steps", "episode_return_mean")
        except ConfigError:  # a file that is just being written
            return False
        spent = bool(env_steps) and env_steps[-1] >= self.budget  # the last evaluation alone is left, and the value is known
        for _ in self._report(env_steps, returns):
            self.pruned = self.pruned or (not spent and self.trial.should_prune())
        return self.pruned

    def report_rest(self, run: RunData) -> None:
        """Report the stages that were not seen, of a run that reached its target early its last return, as `curve` counts it.

        A run that `target.wall_seconds` ended has no return at later stages.
        """
        env_steps, returns = run.points("env_steps", "episode_return_mean")
        if returns and (reached_target(run) or (run.number("env_steps") or 0) >= self.budget):
            env_steps, returns = [*env_steps, float(self.budget)], [*returns, returns[-1]]
        list(self._report(env_steps, returns))

    def _report(self, env_steps: list[float], returns: list[float]) -> Iterator[int]:
        for stage, value in stages(env_steps, returns, budget=self.budget):
            if stage > self.reported:
                self.reported = stage
                self.trial.report(value, stage)
                yield stage


def stages(env_steps: list[float], returns: list[float], *, budget: int) -> list[tuple[int, float]]:
    """Return number and return of each stage of the budget that the curve has passed: its newest point at that time."""
    passed = []
    for stage in range(1, STAGES + 1):
        before = [value for at, value in zip(env_steps, returns, strict=True) if at <= stage * budget / STAGES]
        if before and env_steps[-1] >= stage * budget / STAGES:
            passed.append((stage, before[-1]))
    return passed


def goal_value(run: RunData, goal: str, *, budget: int) -> float | None:
    """Return the value that a sweep maximises; None where the run has none. A curve is a straight line between its points."""
    if goal == "mean100":
        return run.number("mean100")
    if goal == "evaluation":
        return run.number("last_evaluation", "mean")
    env_steps, returns = run.points("env_steps", "episode_return_mean")
    if not returns:
        return None
    # Before the curve begins its first return counts, and after a target that is reached early the last one.
    steps = [0.0, *env_steps, max(float(budget), env_steps[-1])]
    values = [returns[0], *returns, returns[-1]]
    pairs = zip(pairwise(steps), pairwise(values), strict=True)
    area = sum((end - start) * (first + last) / 2 for (start, end), (first, last) in pairs)
    return area / steps[-1] if steps[-1] else returns[-1]


def _show_best(
    study: optuna.Study, sweep: Sweep, folder: Path, *, show: Callable[[str], None], stdout: TextIO, environ: Mapping[str, str]
) -> None:
    trials = study.get_trials(deepcopy=False)
    complete = [trial for trial in trials if trial.state is TrialState.COMPLETE]
    complete.sort(key=lambda trial: trial.value or 0.0, reverse=True)
    others = [trial for trial in trials if trial.state is not TrialState.COMPLETE]
    rows = []
    for trial in (*complete, *others):
        place = folder / f"t{trial.number:03}"
        counted = sweep.goal in REMARKS and trial.state is TrialState.COMPLETE and is_readable(place)
        reached = trial.value if trial.state is TrialState.COMPLETE else None  # of a pruned trial Optuna keeps its last return
        value = number(reached) + (REMARKS[sweep.goal]([read_run(place)]) if counted else "")
        rows.append([place.name, trial.state.name.lower(), *(_param(trial, key) for key in sweep.search), value])
    if rows:
        columns = ["trial", "state", *sweep.search, sweep.goal]
        table = TextTable(title=f"Trials by {sweep.goal}", columns=columns, rows=rows, text_columns=len(columns) - 1)
        print_tables([table], stdout=stdout)
    if complete:
        best = {key: json.loads(_param(complete[0], key)) for key in sweep.search}
        overrides = sweep.overrides(best)
        settings = _load(sweep, best, environ).settings
        # `rookery train` refuses what has no effect. What would do harm has a value here that does none, and the preset's may.
        idle = {key for key, condition, *_ in unmet(settings) if not condition.why}
        effective = [word for word in overrides if word.partition("=")[0] not in idle]
        words = " ".join(map(shlex.quote, effective))
        show(f"  best     rookery train {sweep.preset} {words}")
    show(f"  compare  rookery report {folder}")
    if _counted(study) - len([trial for trial in others if trial.state is TrialState.RUNNING]) < sweep.trials:
        code = (allow_code(each.settings.model_dump(mode="json"), run=folder) for each in _corners(sweep, environ))
        show(f"  go on    rookery sweep --resume --run-dir {folder}{''.join(dict.fromkeys(code))}")


def _param(trial: FrozenTrial, key: str) -> str:
    """Return the value of a setting in JSON, as which Optuna has the choices already."""
    value = trial.params.get(key)
    return value if isinstance(value, str) else json.dumps(value)
