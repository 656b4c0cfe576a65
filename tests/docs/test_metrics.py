"""`docs/metrics.md` and the declarations say the same, in both directions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.errors import DropReason
from common.runtime.bottleneck import WAITING, Kind
from services.actor.metrics import ActorMetrics
from services.evaluator.metrics import EvaluatorMetrics
from services.learner.metrics import LearnerMetrics

pytestmark = pytest.mark.service

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
DROP_REASONS = "[drop reasons](#drop-reasons)"


def rows(heading):
    """Cells of each row of the first table under a heading, less its two head rows."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def labels(cell):
    """{label: values} of a cell such as "`phase` (env, act)"; no values where none are listed."""
    found = re.findall(r"`(\w+)`(?: \((\[.*?\]\(.*?\)|[^)]*)\))?", cell)
    closed = {DROP_REASONS: tuple(map(str, DropReason)), "": ()}
    return {name: closed[values] if values in closed else tuple(values.split(", ")) for name, values in found}


@pytest.mark.parametrize(
    ("heading", "metrics"), [("learner", LearnerMetrics), ("actor", ActorMetrics), ("evaluator", EvaluatorMetrics)]
)
def test_the_table_of_a_service_is_its_declarations(heading, metrics):
    """A metric that is added, renamed or dropped without a word on the page fails here."""
    documented = [(name.strip("`"), kind, labels(cell)) for name, kind, cell, _ in rows(heading)]
    assert documented == [(d.name, d.type, dict(d.labels)) for d in metrics().declared]


@pytest.mark.parametrize("heading", ["learner", "actor", "evaluator"])
def test_every_row_says_something(heading):
    """A row without a meaning helps nobody."""
    assert all(meaning.endswith(".") for *_, meaning in rows(heading))


def test_the_drop_reasons_are_the_closed_list():
    """An operator who sees a reason finds it on the page."""
    assert [reason.strip("`") for reason, _ in rows("Drop reasons")] == [str(reason) for reason in DropReason]


def test_the_bottleneck_rule_names_every_verdict_and_its_threshold():
    """The page explains what the live view says."""
    section = PAGE.split("\n## Which side is the bottleneck\n")[1]
    assert all(f"`{kind}`" in section for kind in Kind)
    assert f"{WAITING:.0%}".replace("%", " %") in section
