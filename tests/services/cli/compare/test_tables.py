"""The tables of a comparison in a terminal."""

import io
import re
from collections import Counter

import pytest

from services.cli.compare.tables import TextTable, print_tables

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
