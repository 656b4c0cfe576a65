"""The hand-written parts of `docs/metrics.md` that list a closed set are complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import DropReason
from common.observability.bottleneck import WAITING, Kind

pytestmark = pytest.mark.service

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")


def rows(heading):
    """Cells of each row of the first table under a heading, less its two head rows."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def test_the_drop_reasons_are_the_closed_list():
    assert [reason.strip("`") for reason, _ in rows("Drop reasons")] == [str(reason) for reason in DropReason]


def test_the_bottleneck_rule_names_every_verdict_and_its_threshold():
    """The page explains what the live view says."""
    section = PAGE.split("\n## Which side is the bottleneck\n")[1]
    assert all(f"`{kind}`" in section for kind in Kind)
    assert f"{WAITING:.0%}".replace("%", " %") in section
