"""The one table of limits."""

from __future__ import annotations

import math
import re

import pytest

from common.monitoring.thresholds import ACTORS, STARVED, TABLE, WAITING
from common.runtime import bottleneck
from tests.common.monitoring.helpers import ROOT

pytestmark = pytest.mark.pure


def test_a_limit_says_the_same_to_prometheus_and_to_the_doctor():
    """An alert that fires where the doctor finds nothing, or the reverse, sends people the wrong way."""
    assert (STARVED.comparison, ACTORS.comparison) == ("> 0.5", "< 0.8")
    assert [STARVED.passed(figure) for figure in (0.4, 0.5, 0.6, math.nan)] == [False, False, True, False]
    assert [ACTORS.passed(figure) for figure in (0.7, 0.8, 0.9, math.nan)] == [True, False, False, False]


def test_the_bottleneck_has_one_limit():
    """The live view and the dashboard give the same verdict."""
    assert WAITING.value == bottleneck.WAITING


def test_the_page_has_the_table():
    """A reader of an alert finds its limit and the reason for it without reading code."""
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8").split("\n## Thresholds\n")[1].split("\n## ")[0]
    rows = [
        tuple(cell.strip(" `") for cell in line.strip("|").split("|")) for line in re.findall(r"^\|.*$", page, re.MULTILINE)[2:]
    ]
    assert rows == [(limit.name, limit.comparison, limit.unit, limit.why) for limit in TABLE]
    assert len({limit.name for limit in TABLE}) == len(TABLE)
