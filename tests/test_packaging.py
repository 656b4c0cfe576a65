"""The two locks and the citation agree with pyproject.toml."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.wire  # reads files, starts a checker

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def normalized(requirement):
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement)[0]).lower()


def pinned(name):
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()[1:]
    assert all("==" in line for line in lines)
    return {normalized(line) for line in lines}


def test_the_locks_pin_every_requirement_once():
    run, develop = pinned("requirements.lock"), pinned("requirements-dev.lock")
    assert not run & develop
    assert {normalized(text) for text in PROJECT["dependencies"]} <= run
    assert {normalized(text) for text in PROJECT["optional-dependencies"]["dev"]} <= develop


def test_the_citation_is_valid_and_names_this_version():
    checker = Path(sys.executable).with_name("check-jsonschema")
    words = [checker, "--builtin-schema", "vendor.citation-file-format", "CITATION.cff"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == PROJECT["version"]
