"""The public module and the page that is written for its users."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import rookery
from common.algorithms import api

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[1]


def imports(source):
    """The modules and the names that a text of Python imports."""
    nodes = list(ast.walk(ast.parse(source)))
    plain = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    origins = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    return {*plain, *(node.module for node in origins)}, [alias.name for node in origins for alias in node.names]


def test_it_only_re_exports():
    source = (ROOT / "rookery.py").read_text(encoding="utf-8")
    kinds = [type(node) for node in ast.parse(source).body]
    assert kinds[0] is ast.Expr  # the docstring
    assert set(kinds[1:-1]) == {ast.ImportFrom}
    modules, names = imports(source)
    assert {module.split(".")[0] for module in modules} == {"common"}
    assert sorted(names) == sorted(rookery.__all__)


@pytest.mark.parametrize("name", rookery.__all__)
def test_every_public_name_has_a_docstring_of_its_own(name):
    text = vars(rookery)[name].__doc__
    assert text
    assert not text.startswith(f"{name}(")  # dataclass and NamedTuple write that where there is none


def test_every_interface_of_an_algorithm_is_public():
    interfaces = {name for name, value in vars(api).items() if isinstance(value, type) and value.__module__ == api.__name__}
    assert "Algorithm" in interfaces
    assert interfaces <= set(rookery.__all__)


def test_a_users_package_imports_nothing_else_of_the_project():
    page = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    modules = {module.split(".")[0] for block in blocks for module in imports(block)[0]}
    assert "rookery" in modules
    assert not modules & {"common", "services", "presets"}
