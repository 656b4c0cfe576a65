"""The dashboards against the types that Grafana publishes, checked by TypeScript."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess

import pytest

from tests.common.observability.helpers import DASHBOARDS, ROOT

HERE = ROOT / "tests" / "common" / "observability" / "grafana"
COMPILER = HERE / "node_modules" / ".bin" / "tsc"
STRICT = [
    "--noEmit",
    "--strict",
    "--skipLibCheck",
    "--module",
    "nodenext",
    "--moduleResolution",
    "nodenext",
    "--target",
    "es2022",
]
OF_PROMETHEUS = {"expr", "titleFormat", "textFormat", "step"}  # fields of an annotation that its data source defines

pytestmark = [
    pytest.mark.wire,
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
    pytest.mark.skipif(not COMPILER.exists(), reason="Grafana's schema is not installed (make grafana-schema)"),
]


def parts(dashboard):
    """Yield each part of a dashboard with the name of its type."""
    page = copy.deepcopy(dashboard)
    panels = page.pop("panels")
    for annotation in page["annotations"]["list"]:
        for name in OF_PROMETHEUS:
            del annotation[name]
    for variable in page["templating"]["list"]:
        variable.pop("definition", None)  # Grafana's own list of variables shows it, and its schema leaves it out
    yield "dashboard", page
    for panel in panels:
        if panel["type"] == "row":
            yield "row", panel
            continue
        yield "panel", panel
        yield panel["type"], panel["options"]
        if panel["type"] == "timeseries":
            yield "curve", panel["fieldConfig"]["defaults"]["custom"]


def complaints(parts):
    """Return the lines of the compiler about these parts, each a constant of its type."""
    names = sorted({name for name, _ in parts})
    constants = [f"const _{number}: {name} = {json.dumps(part)};" for number, (name, part) in enumerate(parts)]
    source = HERE / "checked.ts"
    source.write_text("\n".join([f'import type {{ {", ".join(names)} }} from "./types.js";', *constants]), encoding="utf-8")
    try:
        ran = subprocess.run([COMPILER, *STRICT, source.name], cwd=HERE, capture_output=True, text=True, check=False)
    finally:
        source.unlink()
    return ran.stdout.splitlines()


def test_every_dashboard_has_the_types_of_grafanas_schema():
    """Grafana ignores a field that it does not know, and shows a panel that lacks one with an error."""
    checked = [part for dashboard in DASHBOARDS.values() for part in parts(dashboard)]
    assert complaints(checked) == []


@pytest.mark.parametrize(
    "change", [{"lineWidth": "thin"}, {"drawStyle": "lines"}, {"lineWidht": 1}], ids=["type", "value", "slip of the pen"]
)
def test_a_curve_that_grafana_would_not_understand_is_found(change):
    """The check itself."""
    curve = next(part for name, part in parts(DASHBOARDS["dashboards/rookery-learner.json"]) if name == "curve")
    assert len(complaints([("curve", curve | change)])) == 1
