"""The goals of a row, and how rows are printed and saved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from benchmarks.chaos.storm import FLOW_GOAL, MEMORY_GOAL, Row
from benchmarks.learning import machine
from common.units import Seconds

FLOW_WORST: Seconds = 10.0
LOG_BYTES = 1_000_000  # per minute
DESCRIPTORS = 5  # most that a learner holds more than before: its workers connect again before their old connections end
RESULTS = Path(__file__).parents[1] / "results" / "chaos.md"
COLUMNS = (
    "storm", "seconds", "env steps stepped", "trained", "dropped", "unseen", "unaccounted", "learner exits", "worker exits",
    "flow back, median / worst (s)", "env steps/s before, during", "learner RSS before / peak / after (MiB)",
    "descriptors", "threads", "log per minute (KB)", "verdict",
)  # fmt: skip


def faults(row: Row) -> list[str]:
    """Return the goals that the row misses, each with the value found; rates count only where the storm names a goal."""
    found = list(row.broken)
    if row.books.unaccounted or row.books.note:
        found.append(f"{row.books.unaccounted} env steps unaccounted {row.books.note}".rstrip())
    if row.learner_exits:
        found.append(f"{row.learner_exits} learner exits")
    if row.worker_exits:
        found.append(f"{row.worker_exits} workers ended by themselves")
    if not all(math.isfinite(seconds) for seconds in row.flow_back):
        found.append("flow did not come back")
    if row.before and row.after and row.after.descriptors > row.before.descriptors + DESCRIPTORS:
        found.append(f"descriptors {_change(row, 'descriptors')}")
    return found


def slow(row: Row) -> list[str]:
    """Return the missed goals that depend on the speed of the machine."""
    found: list[str] = []
    if row.flow_back and (
        median(row.flow_back) > row.storm.flow_goal or max(row.flow_back) > max(FLOW_WORST, row.storm.flow_goal)
    ):
        found.append(f"flow back {_flow(row)} s")
    if row.log_bytes_per_minute > LOG_BYTES:
        found.append(f"{row.log_bytes_per_minute / 1000:,.0f} KB of log per minute")
    if row.before and row.after and row.after.rss_mib > row.before.rss_mib + row.storm.memory_goal:  # of a backlog, too
        found.append(f"learner RSS {_memory(row)} MiB")
    goal, share = row.storm.rate_goal, row.rate_during / row.rate_before if row.rate_before else 0.0
    if goal is not None and share < goal:
        found.append(f"honest rate {share:.0%} of before, wanted {goal:.0%}")
    return found


def line(row: Row) -> str:
    """Return the row in lines to read, with the command that repeats it."""
    if row.skipped:
        return f"SKIP {row.storm.name}: {row.skipped}"
    missed = faults(row) + slow(row)
    books, pad = row.books, " " * 5
    text = f"""\
{"FAIL" if missed else "pass"} {row.storm.name}: {row.storm.what}
{pad}{row.seconds:.0f} s; env steps {books.stepped:,} stepped = {books.trained:,} trained + {books.dropped:,} dropped \
+ {books.unseen} unseen + {books.unaccounted} unaccounted
{pad}exits: learner {row.learner_exits}, workers {row.worker_exits}; flow back {_flow(row)} s; env steps/s {_rates(row)}
{pad}learner RSS {_memory(row)} MiB, descriptors {_change(row, "descriptors")}, threads {_change(row, "threads")}; \
log {row.log_bytes_per_minute / 1000:,.0f} KB/min"""
    again = f"again: python -m benchmarks.chaos --only {row.storm.name} --seed {row.seed}"
    notes = [f"note: {note}" for note in row.notes]
    return "\n".join([text, *(pad + extra for extra in (*notes, *(f"MISSED: {fault}" for fault in missed), again))])


def page(rows: Sequence[Row], *, command: str, names: Sequence[str] = (), before: str = "") -> str:
    """Return the whole table as Markdown, in the order of `names`; rows of other storms are those of the page `before`."""
    cells = {name: line for line in before.splitlines() if (name := line[2:].partition(":")[0]) in names}
    remarks = {line: line[3:].partition("`")[0] for line in before.splitlines() if line.startswith("- `")}
    kept = cells.keys() - {row.storm.name for row in rows}
    cells |= {row.storm.name: _cells(row) for row in rows}
    table = [cells[name] for name in names or cells if name in cells]
    passed, skipped = (sum(f"| {verdict}" in line for line in table) for verdict in ("passed |", "skipped: "))
    head = f"""# Chaos

`{command}` on {datetime.now(UTC):%Y-%m-%d}, {machine()}. {passed} of
{len(table) - skipped} storms passed, {skipped} were skipped.{f" {len(kept)} rows are of earlier commands." if kept else ""}
[reliability.md](../../docs/reliability.md) explains the storms and the columns.

Goals: 0 learner exits that the storm did not cause, 0 workers ended by themselves, 0 unaccounted env steps, flow back within
{FLOW_GOAL:g} s (median, unless the storm says another) and {FLOW_WORST:g} s (worst), log below {LOG_BYTES / 1e6:g} MB per minute,
honest rate as the storm says; after it at most {DESCRIPTORS} descriptors more, and {MEMORY_GOAL:g} MiB of RSS (unless the storm
says another).

| {" | ".join(COLUMNS)} |
|{"---|" * len(COLUMNS)}"""
    again = "Each row alone: `python -m benchmarks.chaos --only NAME --seed N`, with the seed of the row, 1 where it has none."
    earlier = [line for line, name in remarks.items() if name in kept]
    return "\n".join([head, *table, "", again, "", *earlier, *_remarks(rows)]) + "\n"


def _cells(row: Row) -> str:
    if row.skipped:
        return f"| {row.storm.name}: {row.storm.what} |" + " |" * (len(COLUMNS) - 2) + f" skipped: {row.skipped} |"
    books, missed = row.books, faults(row) + slow(row)
    storm = f"{row.storm.name}: {row.storm.what} (seed {row.seed}, {datetime.now(UTC):%Y-%m-%d})"
    cells = [
        storm, f"{row.seconds:.0f}", f"{books.stepped:,}", f"{books.trained:,}",
        f"{books.dropped:,}", f"{books.unseen}", f"{books.unaccounted}", f"{row.learner_exits}", f"{row.worker_exits}",
        _flow(row), _rates(row), _memory(row), _change(row, "descriptors"), _change(row, "threads"),
        f"{row.log_bytes_per_minute / 1000:,.0f}", "; ".join(missed) if missed else "passed",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _remarks(rows: Sequence[Row]) -> list[str]:
    return [f"- `{row.storm.name}`: {note}" for row in rows for note in row.notes]


def _flow(row: Row) -> str:
    return f"{median(row.flow_back):.1f} / {max(row.flow_back):.1f}" if row.flow_back else "-"


def _rates(row: Row) -> str:
    share = f" ({row.rate_during / row.rate_before:.0%})" if row.rate_before else ""
    return f"{row.rate_before:,.0f}, {row.rate_during:,.0f}{share}"


def _memory(row: Row) -> str:
    before, after = (f"{used.rss_mib:.0f}" if used else "?" for used in (row.before, row.after))
    return f"{before} / {row.peak_rss_mib:.0f} / {after}"


def _change(row: Row, name: str) -> str:
    before, after = (getattr(used, name) if used else "?" for used in (row.before, row.after))
    return f"{before} to {after}"
