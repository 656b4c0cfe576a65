"""The tables of a comparison as text, which the page and the terminal show alike, and `rookery compare`, which prints them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.cli.compare.runs import Configuration, RunData, configurations, differing_settings
from services.cli.compare.statistics import Estimate, estimate
from services.cli.train.outcome import own_end

NONE = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """A table of text; the first `text_columns` are words, the others numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: int = 1


def number(value: float | None) -> str:
    """Format a number with four significant digits, whole ones in full; a dash for None."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if abs(value) >= 1000 or value == round(value) else f"{value:.4g}"  # noqa: PLR2004


def shown(found: Estimate | None) -> str:
    """Format an estimate as `value [low, high]`."""
    if found is None:
        return NONE
    bounds = "" if found.low is None else f" [{number(found.low)}, {number(found.high)}]"
    return number(found.value) + bounds


def configurations_table(groups: Sequence[Configuration]) -> TextTable:
    """Return one row for each configuration: interquartile means over its seeds, with 95 % intervals."""
    columns = ["configuration", "runs", "solved", "return (mean100)", "evaluation", "env steps to target"]
    columns += ["minutes", "env steps/s", "policy lag"]
    return TextTable(title="Configurations", columns=columns, rows=[_configuration_row(group) for group in groups])


def _configuration_row(group: Configuration) -> list[str]:
    def over(*keys: str) -> Estimate | None:
        return estimate([value for run in group.runs if (value := run.number(*keys)) is not None])

    reached = over("solved_at", "env_steps")
    seconds, rate, lag = over("wall_seconds"), over("env_steps_per_second"), over("policy_lag", "mean")
    return [
        group.label,
        str(len(group.runs)),
        f"{reached.count if reached else 0} of {len(group.runs)}",
        shown(over("mean100")),
        shown(over("last_evaluation", "mean")),
        shown(reached),
        number(seconds.value / 60) if seconds else NONE,
        number(round(rate.value)) if rate else NONE,
        number(lag.value) if lag else NONE,
    ]


def settings_table(groups: Sequence[Configuration]) -> TextTable:
    """Return one row for each setting that differs among the configurations."""
    differing = differing_settings(groups)
    rows = [[key, *(_value(value) for value in values)] for key, values in differing.items()]
    return TextTable(title="Settings that differ", columns=["setting", *(group.label for group in groups)], rows=rows)


def _value(value: Any) -> str:
    match value:
        case None:
            return NONE
        case bool():
            return str(value).lower()
        case list():
            return f"[{', '.join(map(_value, value))}]"
        case _:
            return str(value)


def runs_table(groups: Sequence[Configuration]) -> TextTable:
    """Return one row for each run."""
    columns = ["configuration", "result", "seed", "env steps", "updates", "minutes", "env steps/s", "return (mean100)"]
    columns += ["evaluation", "policy lag"]
    rows = [_run_row(group, run) for group in groups for run in group.runs]
    return TextTable(title="Runs", columns=columns, rows=rows, text_columns=2)


def _run_row(group: Configuration, run: RunData) -> list[str]:
    seconds, rate = run.number("wall_seconds"), run.number("env_steps_per_second")
    return [
        group.label,
        result(run),
        str(run.seed),
        number(run.number("env_steps")),
        number(run.number("learner_updates")),
        number(None if seconds is None else seconds / 60),
        number(None if rate is None else round(rate)),
        number(run.number("mean100")),
        number(run.number("last_evaluation", "mean")),
        number(run.number("policy_lag", "mean")),
    ]


def result(run: RunData) -> str:
    """Return how the run ended."""
    if not run.summary:
        return "no result yet"
    ended = own_end(
        run.summary, env_steps=run.settings.get("target.env_steps"), wall_seconds=run.settings.get("target.wall_seconds")
    )
    return ended or "not finished"


def ledger_table(groups: Sequence[Configuration]) -> TextTable:
    """Return the ledger of each run in env steps; drop reasons without any are left out."""
    rows = [_ledger_row(group, run) for group in groups for run in group.runs]
    columns = ["configuration", "seed", "produced", "trained", "queued", "in flight", "dropped", "reasons", "not accounted for"]
    return TextTable(title="Ledger, in env steps", columns=columns, rows=rows)


def _ledger_row(group: Configuration, run: RunData) -> list[str]:
    ledger = run.summary.get("ledger") or {}
    dropped = {reason: count for reason, count in (ledger.get("dropped") or {}).items() if count}
    parts = [run.number("ledger", name) for name in ("produced", "trained", "queued", "in_flight")]
    lost = sum(dropped.values())
    unaccounted = None if None in parts else float(parts[0] or 0) - sum(float(part or 0) for part in parts[1:]) - lost
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(dropped.items()))
    return [group.label, str(run.seed), *map(number, parts), number(lost if ledger else None), reasons, number(unaccounted)]


PIPE_WIDTH = 200  # columns of text where the output is no terminal


def compare(runs: Sequence[RunData], *, stdout: TextIO) -> int:
    """Print the configurations of `runs` and the settings that differ; return the exit code."""
    groups = configurations(runs)
    tables = [configurations_table(groups), settings_table(groups)]
    print_tables([table for table in tables if table.rows], stdout=stdout)
    return 0


def print_runs(runs: Sequence[RunData], *, stdout: TextIO) -> None:
    """Print a table of `runs` and one of their configurations."""
    groups = configurations(runs)
    print_tables([runs_table(groups), configurations_table(groups)], stdout=stdout)


def print_tables(tables: Sequence[TextTable], *, stdout: TextIO) -> None:
    """Print tables as wide as the terminal."""
    console = Console(file=stdout, width=None if stdout.isatty() else PIPE_WIDTH, highlight=False)
    for table in tables:
        drawn = Table(title=table.title, title_justify="left", title_style="bold")
        for index, column in enumerate(table.columns):
            drawn.add_column(column, justify="left" if index < table.text_columns else "right", overflow="fold")
        for row in table.rows:
            drawn.add_row(*map(Text, row))
        console.print(drawn)
