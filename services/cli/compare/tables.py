"""The tables of a comparison as text, which the page and the terminal show alike."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any, TextIO

from rich import box
from rich.console import Console, ConsoleDimensions
from rich.table import Table
from rich.text import Text

from services.cli.compare.runs import Configuration, RunData, configurations, differing_settings, unbegun_members
from services.cli.compare.statistics import COVERAGE, Estimate, estimate
from services.cli.train.outcome import has_score, is_evaluation_older, is_solved, own_end
from services.cli.train.view import FULL_MEAN, MEAN_COUNTS, mean_remark, number

NONE = "-"
MAX_NAMES = 8  # of runs, in a note
_UNFINISHED = "no result yet", "not finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """A table of text; the first `text_columns` are words, the others numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: int = 1


def shown(found: Estimate | None, beside: float | None = None) -> str:
    """Format an estimate as `value [low, high]`, each as `number` does."""
    if found is None:
        return NONE
    bounds = "" if found.low is None else f" [{number(found.low, beside)}, {number(found.high, beside)}]"
    return number(found.value, beside) + bounds


def labels_table(groups: Sequence[Configuration]) -> TextTable:
    """Return the number, by which the other tables name a configuration, and the label of each."""
    rows = [[str(group.number), group.label + _changes_remark(group.runs)] for group in groups]
    return TextTable(title="Configurations", columns=["#", "configuration"], rows=rows, text_columns=2)


def configurations_table(groups: Sequence[Configuration]) -> TextTable:
    """Return one row for each configuration: interquartile means over its `counted_runs`, with 95 % intervals.

    Beside a mean over fewer runs than the configuration has stands their number, and beside "solved" that of the unfinished ones.
    """
    columns = ["#", "solved", "mean100", "evaluation", "env steps to target", "minutes", "env steps/s", "policy lag"]
    return TextTable(title="Results", columns=columns, rows=[_configuration_row(group) for group in groups])


def counted_runs(runs: Sequence[RunData]) -> Sequence[RunData]:
    """Return the runs of a configuration over which its means are: those that have finished, or all where none has.

    A run that has not finished has no return of the whole budget.
    """
    return [run for run in runs if result(run) not in _UNFINISHED] or runs


def _configuration_row(group: Configuration) -> list[str]:
    among, runs, target = counted_runs(group.runs), len(group.runs), group.runs[0].target

    def counted(found: Estimate | None, text: str = "") -> str:
        return (text or shown(found)) + (f" (by {found.count} of {runs})" if found and found.count < runs else "")

    mean100, evaluation, reached = _scores(group)
    unfinished = sum(result(run) in _UNFINISHED for run in group.runs)
    solved = f"{reached.count if reached else 0} of {runs}" if has_score(target) else NONE
    seconds, rate, lag = (_over(among, *keys) for keys in (("wall_seconds",), ("env_steps_per_second",), ("policy_lag", "mean")))
    return [
        str(group.number),
        solved + (f" ({unfinished} not finished)" if unfinished else ""),
        counted(mean100, shown(mean100, target["mean100"])) + remark_on_mean(among),
        counted(evaluation, shown(evaluation, target["evaluation"])) + remark_on_evaluation(among),
        counted(reached),
        counted(seconds, number(seconds.value / 60) if seconds else NONE),
        counted(rate, number(round(rate.value)) if rate else NONE),
        counted(lag, number(lag.value) if lag else NONE),
    ]


def _scores(group: Configuration) -> tuple[Estimate | None, Estimate | None, Estimate | None]:
    """Return what is shown with intervals: mean100, last evaluation, env steps to the target."""
    among = counted_runs(group.runs)
    reached = _over([run for run in group.runs if reached_target(run)], "solved_at", "env_steps")
    return _over(among, "mean100"), _over(among, "last_evaluation", "mean"), reached


def _over(runs: Sequence[RunData], *keys: str) -> Estimate | None:
    return estimate([value for run in runs if (value := run.number(*keys)) is not None])


def remark_on_mean(runs: Sequence[RunData]) -> str:
    """Return the remark on mean100 of the run with the fewest episodes, and of those with the most that bias it."""
    few = min((count for run in runs if (count := run.number("mean100_episodes"))), default=FULL_MEAN)
    most = [max(run.number(key) or 0 for run in runs) for key in MEAN_COUNTS[1:]]
    return mean_remark(few, *most)


def remark_on_evaluation(runs: Sequence[RunData]) -> str:
    """Return in how many of `runs` the last evaluation is of an older policy than the last one; "" for none."""
    older = sum(is_evaluation_older(run.summary) for run in runs)
    share = f"{older} of {len(runs)} " if len(runs) > 1 else ""
    return f" ({share}not of the last policy)" if older else ""


def _changes_remark(runs: Sequence[RunData]) -> str:
    """Return what `runs` changed at a resume, at how many env steps and in how many of them; "" where none did."""
    found: dict[str, list[tuple[float, Path]]] = {}
    for run in runs:
        for resume in run.settings_changed:
            for change in resume["settings"]:
                found.setdefault(change, []).append((resume["env_steps"], run.path))
    remarks = []
    for change, resumes in found.items():
        env_steps = " to ".join(dict.fromkeys([number(min(resumes)[0]), number(max(resumes)[0])]))
        share = f", in {len({path for _, path in resumes})} of {len(runs)} runs" if len(runs) > 1 else ""
        remarks.append(f"{change} from {env_steps} env steps on{share}")
    return f" (changed at a resume: {'; '.join(remarks)})" if remarks else ""


def settings_table(groups: Sequence[Configuration]) -> TextTable:
    """Return one row for each setting that differs: each of its values, with the numbers of the configurations that have it."""
    rows = []
    for key, values in differing_settings(groups).items():
        having: dict[str, list[str]] = {}
        for group, value in zip(groups, values, strict=True):
            having.setdefault(_value(value), []).append(str(group.number))
        rows.append([key, "; ".join(f"{value} ({', '.join(numbers)})" for value, numbers in having.items())])
    return TextTable(title="Settings that differ", columns=["setting", "value (#)"], rows=rows, text_columns=2)


def _value(value: Any) -> str:
    match value:
        case None | "":
            return NONE
        case bool():
            return str(value).lower()
        case list():
            return f"[{', '.join(map(_value, value))}]"
        case _:
            return str(value)


def runs_table(groups: Sequence[Configuration]) -> TextTable:
    """Return one row for each run."""
    columns = ["#", "result", "seed", "env steps", "updates", "minutes", "env steps/s", "mean100", "evaluation", "policy lag"]
    rows = [_run_row(group, run) for group in groups for run in group.runs]
    return TextTable(title="Runs", columns=columns, rows=rows, text_columns=2)


def _run_row(group: Configuration, run: RunData) -> list[str]:
    seconds, rate = run.number("wall_seconds"), run.number("env_steps_per_second")
    return [
        str(group.number),
        result(run) + _changes_remark([run]),
        str(run.seed),
        number(run.number("env_steps")),
        number(run.number("learner_updates")),
        number(None if seconds is None else seconds / 60),
        number(None if rate is None else round(rate)),
        number(run.number("mean100"), run.target["mean100"]) + remark_on_mean([run]),
        number(run.number("last_evaluation", "mean"), run.target["evaluation"]) + remark_on_evaluation([run]),
        number(run.number("policy_lag", "mean")),
    ]


def result(run: RunData) -> str:
    """Return how the run ended."""
    if not run.summary:
        return _UNFINISHED[0]
    return own_end(run.summary, run.target) or _UNFINISHED[1]


def reached_target(run: RunData) -> bool:
    """Return whether the run ended because it reached its target score."""
    return is_solved(run.summary, run.target)


def ledger_table(groups: Sequence[Configuration]) -> TextTable:
    """Return the ledger of each run in env steps; drop reasons without any are left out."""
    rows = [_ledger_row(group, run) for group in groups for run in group.runs]
    columns = ["#", "seed", "produced", "trained", "queued", "in flight", "dropped", "reasons", "not accounted for"]
    return TextTable(title="Ledger, in env steps", columns=columns, rows=rows)


def _ledger_row(group: Configuration, run: RunData) -> list[str]:
    ledger = run.summary.get("ledger") or {}
    dropped = {reason: count for reason, count in (ledger.get("dropped") or {}).items() if count}
    parts = [run.number("ledger", name) for name in ("produced", "trained", "queued", "in_flight")]
    lost = sum(dropped.values())
    unaccounted = None if None in parts else float(parts[0] or 0) - sum(float(part or 0) for part in parts[1:]) - lost
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(dropped.items()))
    return [str(group.number), str(run.seed), *map(number, parts), number(lost if ledger else None), reasons, number(unaccounted)]


def notes(groups: Sequence[Configuration]) -> list[str]:
    """Return sentences on which runs are behind the values of `groups`, and on what their intervals are worth."""
    found = [
        f"configuration {group.number}: {len(group.runs)} runs have only {seeds} different seeds"
        for group in groups
        if (seeds := len({run.seed for run in group.runs})) < len(group.runs)
    ]
    copied = [run for group in groups for run in group.runs if run.copies]
    found += [f"left out, as copies of {run.path}: {', '.join(map(str, run.copies))}" for run in copied]
    for series in dict.fromkeys(run.path.parent for group in groups for run in group.runs):
        left, count = unbegun_members(series)
        if left:
            names = ", ".join(left[:MAX_NAMES]) + (", ..." if left[MAX_NAMES:] else "")
            found.append(f"{len(left)} of the {count} runs of the series {series} have not begun: {names}")
    counts = {score.count for group in groups for score in _scores(group) if score and score.count in COVERAGE}
    if counts:
        shares = ", ".join(f"{COVERAGE[count]} % over {count}" for count in sorted(counts))
        found.append(f"95 % intervals over few seeds contain the true mean less often: {shares}")
    return found


PIPE_WIDTH = 120  # columns of text where the output is no terminal


def print_runs(runs: Sequence[RunData], *, stdout: TextIO, each: bool = True) -> None:
    """Print the configurations of `runs`, results, settings that differ, and notes; with `each` also a row for each run."""
    groups = configurations(runs)
    tables = [runs_table(groups)] if each else []
    tables += [labels_table(groups), configurations_table(groups), settings_table(groups)]
    print_tables([table for table in tables if table.rows], stdout=stdout)
    for note in notes(groups):
        print(note, file=stdout)


def print_tables(tables: Sequence[TextTable], *, stdout: TextIO) -> None:
    """Print tables as wide as the terminal, or wider: no word and no number is cut. What stands in brackets has its own line."""
    width = None if stdout.isatty() else PIPE_WIDTH
    for table in tables:
        words = table.text_columns
        drawn = Table(
            title=table.title,
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            show_edge=False,
            padding=(0, 1, 0, 0),
        )
        rows = [[*row[:words], *(re.sub(r" (?=[\[(])", "\n", cell) for cell in row[words:])] for row in table.rows]
        needed = 0
        for index, column in enumerate(table.columns):
            parts = [part for row in rows for part in (row[index].split() if index < words else row[index].splitlines())]
            least = max(map(len, [*wrap(column, len(column) // 2 + 1, break_long_words=False), *parts]))
            needed += least + 2  # with the gap to the next one
            if index < words:
                drawn.add_column(column, min_width=least, overflow="fold")
            else:
                drawn.add_column("\n".join(wrap(column, least)), min_width=least, no_wrap=True, justify="right")
        for row in rows:
            drawn.add_row(*map(Text, row))
        console = Console(file=stdout, width=width, highlight=False)
        # A table that is wider than the terminal is broken by the terminal; rich would cut it off. Where TERM is unknown, rich
        # heeds no width without a height.
        console.size = ConsoleDimensions(max(console.width, needed), console.height)
        console.print(drawn, crop=False)
