"""The two locks and the citation agree with pyproject.toml."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
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


def test_a_folder_named_after_the_module_does_not_hide_an_editable_install(tmp_path):
    """Python that is started in the folder above a clone sees the clone first, as a namespace package."""
    clone, site = tmp_path / "rookery", tmp_path / "site"
    clone.mkdir()
    for name in ("pyproject.toml", "README.md", "rookery.py"):
        shutil.copy(ROOT / name, clone)
    for name in ("common", "presets", "services"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "import sys; from setuptools import build_meta; print(build_meta.build_editable(sys.argv[1]))"
    wheel = subprocess.run(
        [sys.executable, "-c", build, tmp_path], cwd=clone, capture_output=True, text=True, check=True
    ).stdout.split()[-1]
    with zipfile.ZipFile(tmp_path / wheel) as archive:
        archive.extractall(site)
    find = "import site, sys, importlib.util as util; site.addsitedir(sys.argv[1]); print(util.find_spec('rookery').origin)"
    found = subprocess.run([sys.executable, "-S", "-c", find, site], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()) == clone / "rookery.py"
