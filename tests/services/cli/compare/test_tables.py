"""The tables of a comparison in a terminal."""

import io
import re
from collections import Counter
from pathlib import Path

import pytest

from services.cli.compare.runs import RunData, configurations
from services.cli.compare.tables import TextTable, configurations_table, print_tables, runs_table

pytestmark = pytest.mark.pure


class Terminal(io.StringIO):
    """A terminal, whose width is in the variable COLUMNS."""

    def isatty(self):
        return True


@pytest.mark.parametrize(("width", "kind"), [(20, "xterm"), (60, "xterm"), (80, "xterm"), (80, "dumb"), (120, "xterm")])
def test_no_digit_is_cut_off_in_a_narrow_terminal(width, kind, monkeypatch):
    """At 80 columns 10,000,384 env steps were 10,000, and 121 minutes 12."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", kind)
    monkeypatch.setenv("NO_COLOR", "1")
    columns = ["#", "result", "choices", "env steps", "minutes", "env steps/s", "mean100", "evaluation", "policy lag"]
    row = ["1", "solved: the target was reached", "[64, 64]", "10,000,384", "121", "12,346"]
    row += ["3,311 [3,311, 3,512] (of 64 episodes)", "3,412 [3,311, 3,512]", "12.35"]
    for number in range(4):  # more than the 80 columns that an unknown terminal is taken to have
        columns, row = [*columns, f"return of {number}"], [*row, f"{number}0,123,456,789,012.3"]
    stdout = Terminal()
    print_tables([TextTable(title="Runs", columns=columns, rows=[row], text_columns=3)], stdout=stdout)
    shown = re.sub("\x1b\\[[0-9;]*m", "", stdout.getvalue())
    whole = re.split(r"  +|\n", shown)
    for cell in row[3:]:
        for line in re.split(r" (?=[\[(])", cell):
            assert line in {part.strip() for part in whole}
    assert Counter(" ".join([*columns, *row]).split()) <= Counter(shown.split())


@pytest.mark.parametrize(
    ("target", "scores", "cell"),
    [
        (475.0, [474.97], "474.97"),
        (475.0, [475.0], "475"),
        (475.0, [470.2], "470.2"),
        (5000.0, [4999.6], "4999.6"),
        (475.0, [474.97, 475.03], "475 [474.97, 475.03]"),
        (None, [474.97], "475"),
    ],
)
@pytest.mark.parametrize("column", ["mean100", "evaluation"])
def test_a_return_just_below_its_target_has_more_digits(column, target, scores, cell):
    """474.97 was 475, beside "0 of 1" runs that reached the target of 475."""
    settings, runs = {"target.env_steps": 9, f"target.{column}": target}, []
    for seed, score in enumerate(scores):
        summary = {"env_steps": 9, **({"mean100": score} if column == "mean100" else {"last_evaluation": {"mean": score}})}
        run = RunData(path=Path(str(seed)), settings={**settings, "run.seed": seed}, curve=[], summary=summary, command="")
        runs.append(run)
    for table in (configurations_table, runs_table) if len(runs) == 1 else (configurations_table,):
        found = table(configurations(runs))
        assert found.rows[0][list(found.columns).index(column)] == cell
