"""The outcome of a run: exit code, result, next steps and learning curve."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from common.runtime.run_directory import RunDirectory
from services.cli.train.instructions import Outcome
from services.cli.train.view import MEAN_COUNTS, clock, mean_remark, number

Summary = Mapping[str, Any]
"""The content of the learner's summary.json."""

SCORES = ("mean100", "evaluation")
"""Settings of `target` at which a run is solved."""

X_AXES = (("env_steps", "env steps", 1.0), ("wall_seconds", "wall-clock minutes", 60.0))
"""Columns of the learning curve over which it is drawn, each with its label and unit."""

_REFUSED = {
    False: (2, "not run: a setting is invalid"),
    True: (1, "failed: after training had begun, a process refused a setting or lacked a file, folder or port"),
}
"""Exit code and result of a run that a child refused, by whether it had worked: as a process that is started again."""

_DRAWN = (("episode_return_mean", "training, mean of 100 episodes", "-"), ("evaluation_return", "evaluation", "o"))


def read_summary(path: Path) -> Summary | None:
    """Return the summary in the file `path`; None without a valid one."""
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) else None


def written(path: Path) -> tuple[int, int] | None:
    """Return when the file `path` was written, in nanoseconds, and its size; None without one."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def verdict(
    outcome: Outcome, summary: Summary | None, *, worked: bool, resumed: bool, target: Mapping[str, Any]
) -> tuple[int, str]:
    """Return exit code and result.

    `summary` is that of this start, not of one before, and `worked` whether experience was accepted in it; `resumed` is whether
    it began with a checkpoint, and `target` the section of that name.
    """
    match outcome:
        case Outcome.STOPPED if summary is None and worked:  # the learner had died, and was not yet back
            return 1, "stopped on request: progress since the last checkpoint is lost"
        case Outcome.STOPPED if summary is None and resumed:
            return 0, "stopped on request, before the first update of this start: the run is as its checkpoint left it"
        case Outcome.STOPPED if summary is None or not summary["learner_updates"]:
            return 0, "stopped on request, before the first update"
        case Outcome.STOPPED:
            return 0, "stopped on request, all work saved"
        case Outcome.REFUSED:
            return _REFUSED[worked]
        case Outcome.KILLED:
            return 130, "killed on request: progress since the last checkpoint is lost"
        case Outcome.FINISHED if summary is not None:
            if end := own_end(summary, target):
                return 0, end
            early = "not solved: the learner ended before its target and its budget"
            return 1, early if has_score(target) else "failed: the learner ended before its budget was spent"
        case Outcome.FINISHED:
            return 1, "failed: the learner ended and left no readable summary.json, as on a full disk"
        case _:
            return 1, "failed"


def own_end(summary: Summary, target: Mapping[str, Any]) -> str:
    """Return how the run came to its own end, by the values of section `target`; "" where it did not."""
    if is_solved(summary, target):
        return "solved: the target was reached"
    unsolved = "not solved: " if has_score(target) else ""
    env_steps, wall_seconds = target.get("env_steps"), target.get("wall_seconds")
    if env_steps is not None and summary.get("env_steps", 0) >= env_steps:
        return f"{unsolved}the budget of env steps is spent"
    if wall_seconds is not None and summary.get("wall_seconds", 0) >= wall_seconds:
        return f"{unsolved}the budget of time is spent"
    return ""


def is_solved(summary: Summary, target: Mapping[str, Any]) -> bool:
    """Return whether the run reached the scores of section `target`: others than those that it had are not reached."""
    reached = summary.get("target") or {}
    same = all(reached.get(name, score) == score for name, score in target.items() if name in SCORES)
    return bool(summary.get("solved")) and same


def is_evaluation_older(summary: Summary) -> bool:
    """Return whether the last evaluation is of an older policy than the last one."""
    version = (summary.get("last_evaluation") or {}).get("version")
    return version is not None and version < summary.get("version", version)


def has_score(target: Mapping[str, Any]) -> bool:
    """Return whether a run with these values of section `target` can be solved, and not only spend its budget."""
    return any(target.get(name) is not None for name in SCORES)


def final_lines(result: str, summary: Summary | None, *, run_dir: Path, go_on: str = "", lost: str = "") -> Iterator[str]:
    """Yield the lines shown after the end; `go_on` is the command that resumes the run, `lost` what its results lack."""
    yield result
    if summary is not None:
        time = f"{clock(summary['wall_seconds'])} ({summary['frames_per_second']:,.0f} frames/s from the first update on)"
        remark = mean_remark(*(summary.get(name, 0) for name in MEAN_COUNTS))
        target = summary.get("target") or {}
        reached = target.get("mean100")
        yield f"  {summary['env_steps']:,} env steps in {time}, mean100 {number(summary['mean100'], reached)}{remark}"
        if (last := summary.get("last_evaluation")) is not None:
            below = summary.get("solved") and reached is not None and last["mean"] < reached
            beside = reached if below else target.get("evaluation")
            seen = f"  last evaluation {number(last['mean'], beside)} over {last['episodes']} episodes ({last['mode']})"
            older = is_evaluation_older(summary)
            seen += f" of v{last['version']}, not of the final v{summary['version']}" if older else ""
            seen += (
                f", below the target of {number(reached, last['mean'])}: rookery evaluate {run_dir} plays more" if below else ""
            )
            yield seen
        if summary.get("reproducible"):
            yield f"  parameters     sha256 {summary['parameters_sha256']}: the same in every run of these settings here"
    if lost:
        yield f"  lost           {lost}"
    yield f"  run directory  {run_dir}"
    if summary is not None and RunDirectory(run_dir).tensorboard.is_dir():
        yield f"  look closer    tensorboard --logdir {run_dir}"
    if go_on:
        yield f"  go on          {go_on}"


def read_curve(path: Path) -> list[Mapping[str, str]]:
    """Return the rows of the learning_curve.csv at `path` without those that a kill cut short; none without the file."""
    if not path.is_file():
        return []
    whole_lines = path.read_text(encoding="utf-8", errors="replace").rpartition("\n")[0]  # not a last one that was cut short
    return [row for row in csv.DictReader(whole_lines.splitlines()) if _whole(row)]


def _whole(row: Mapping[str | None, Any]) -> bool:
    """Return False for a row that a kill cut short: its text is no number, or columns are missing."""
    try:
        return None not in row.values() and all(float(value) == float(value) for value in row.values() if value)
    except (TypeError, ValueError):
        return False


def curve_points(rows: Iterable[Mapping[str, str]], x: str, y: str) -> tuple[list[float], list[float]]:
    """Return the values of two columns, without the rows in which one is empty."""
    points = [(float(row[x]), float(row[y])) for row in rows if row.get(x) and row.get(y)]
    return [point[0] for point in points], [point[1] for point in points]


def draw_curve(directory: RunDirectory, *, title: str, target: float | None) -> Path | None:
    """Draw `learning_curve.png`, the return over env steps and time; None for a run too short for a point."""
    rows = read_curve(directory.learning_curve_csv)
    if not any(curve_points(rows, "env_steps", column)[0] for column, *_ in _DRAWN):
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  # slow to import
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (x, label, unit) in zip(figure.subplots(1, 2, sharey=True), X_AXES, strict=True):
        for y, name, style in _DRAWN:
            xs, ys = curve_points(rows, x, y)
            axes.plot([value / unit for value in xs], ys, style, label=name, markersize=4)
        if target is not None:
            axes.axhline(target, linestyle="--", color="grey", linewidth=1, label=f"target {target:g}")
        axes.set_xlabel(label)
        axes.grid(visible=True, alpha=0.3)
    figure.axes[0].set_ylabel("episode return")
    figure.axes[0].legend(loc="lower right")
    figure.suptitle(title)
    figure.savefig(directory.learning_curve_png, dpi=120)
    return directory.learning_curve_png
