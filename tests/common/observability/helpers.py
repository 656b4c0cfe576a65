"""Generated files and PromQL, for the tests of rules and dashboards."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from common.observability.__main__ import FOLDER, files

ROOT = Path(__file__).parents[3]
COMMITTED = ROOT / FOLDER
DASHBOARDS = {name: json.loads(text) for name, text in files().items() if name.endswith(".json")}
SERIES = re.compile(r"(?<![\w:])((?:rookery|process)_\w+|namespace\w*:[\w:]+|up)(\{[^}]*\})?(\[[^\]]*\])?(?![\w:])")
"""A selector: its metric, matchers and window."""

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian package prometheus)"
)


def promtool(*words: object, folder: Path) -> tuple[int, str]:
    """Exit code and all that it says."""
    environ = os.environ | {"GOGC": "400"}  # a process of a second: its garbage collection takes a quarter of it
    ran = subprocess.run(["promtool", *map(str, words)], cwd=folder, env=environ, capture_output=True, text=True, check=False)
    return ran.returncode, ran.stdout + ran.stderr


def metrics_in(expression: str) -> set[str]:
    """Names of the series that a PromQL expression reads."""
    return {metric for metric, _, _ in SERIES.findall(expression)}


def panels(dashboard):
    """All panels that show something."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries(dashboard):
    """All PromQL expressions of a dashboard."""
    return [target["expr"] for panel in panels(dashboard) for target in panel["targets"]]
