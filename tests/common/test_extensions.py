"""Lookup of a user's `package.module:attribute`: found, or refused with an error that names the mistake."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from common import extensions
from common.envs import hidden, probes
from common.errors import ConfigError

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.wire  # writes and imports modules

MODULE = """
from pathlib import Path

def rooms(length, *, dark=False):
    return length, dark

size = 3
"""


@pytest.fixture
def written(tmp_path, monkeypatch):
    """`written(text)`: a module of that text, which Python can import; its name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(text):
        name = f"own_{tmp_path.name}"
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


def test_what_is_named_is_found(written):
    """A function of a module that lies where Python looks."""
    assert extensions.import_attribute(f"{written(MODULE)}:rooms", setting="env.entry_point")(3) == (3, False)


@pytest.mark.parametrize(
    ("text", "entry_point", "line"),
    [
        (MODULE, "{0}", "env.entry_point is not complete: found '{0}', wanted package.module:function"),
        (MODULE, "{0}:", "env.entry_point is not complete: found '{0}:', wanted package.module:function"),
        (MODULE, "{0}s:rooms", "env.entry_point names a module that does not exist: found {0}s (No module named '{0}s'), wanted"),
        (MODULE, "{0}:room", "env.entry_point names no function of {0}: found room, wanted rooms"),
        (MODULE, "{0}:size", "names no function of {0}: found size, a value of type int, wanted one such as rooms, Path"),
        (MODULE, "{0}:gridworld", "env.entry_point names no function of {0}: found gridworld, wanted one such as rooms, Path"),
        ("size = 3", "{0}:rooms", "env.entry_point names no function of {0}: found rooms, wanted one that exists"),
        ("import no_such_thing", "{0}:rooms", "names a module that does not exist: found {0} (No module named 'no_such_thing')"),
        ("x = 1\n1 / 0", "{0}:rooms", "names a module that does not import: found ZeroDivisionError: division by zero ("),
        ("x = 1\n1 / 0", "{0}:rooms", "{0}.py line 2), wanted {0}; `python -c 'import {0}'` shows more"),
        ("x = 1\n\n1 +", "{0}:rooms", "found SyntaxError: invalid syntax ("),
        ("x = 1\n\n1 +", "{0}:rooms", "{0}.py line 3), wanted {0}"),
    ],
)
def test_an_import_that_fails_is_refused_with_setting_module_and_cause(written, text, entry_point, line):
    """A slip in the name, a package that another machine has, a module with a mistake of its own."""
    module = written(text)
    with pytest.raises(ConfigError) as caught:
        extensions.import_attribute(entry_point.format(module), setting="env.entry_point")
    assert line.format(module) in str(caught.value)


def test_arguments_are_given_when_they_fit():
    """A call that is made later, as often as it is needed."""
    call = extensions.bind_arguments(lambda a, *, b: (a, b), 1, entry_point="m:f", setting="env.kwargs", kwargs={"b": 2})
    assert call() == call() == (1, 2)


def test_arguments_that_do_not_fit_are_refused_before_the_call():
    """A slip in kwargs would otherwise be a TypeError from somewhere in the user's package."""
    with pytest.raises(ConfigError) as caught:
        extensions.bind_arguments(lambda *, b=1: b, entry_point="m:f", setting="env.kwargs", kwargs={"c": 2})
    found = "{'c': 2} (got an unexpected keyword argument 'c')"
    assert str(caught.value) == f"m:f does not take env.kwargs: found {found}, wanted arguments (*, b=1)"


# -- code that a run may name ----------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current directory with code of a user, runs, and links; code elsewhere."""
    here = tmp_path / "here"
    files = ("own_one.py", "own_pkg/__init__.py", "own_pkg/envs.py", "own_plain/envs.py")
    foreign = ("runs/gift/evil.py", "runs/mine/config.yaml", "gift/__init__.py", "gift/evil.py", "gift/one/config.yaml")
    for name in (*files, *foreign, "../elsewhere/__init__.py", "../elsewhere/evil.py"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text("raise SystemExit('ran')")
    (here / "__main__.py").touch()
    (here / "renamed").symlink_to(here / "gift/one")
    (here / "gift/far").symlink_to(tmp_path / "elsewhere")
    (here / "linked.py").symlink_to(tmp_path / "elsewhere/evil.py")
    (here / "own_pkg/linked.py").symlink_to(tmp_path / "elsewhere/evil.py")
    (here / "own_pkg/folder").symlink_to(tmp_path / "elsewhere")
    (here / "own_pkg/gift.py").symlink_to(here / "runs/gift/evil.py")
    (here / "init").mkdir()
    (here / "init/__init__.py").symlink_to(tmp_path / "elsewhere/__init__.py")
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(str(here))
    return here


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("module", "run", "local"),
    [
        ("own_one", "runs/mine", True),
        ("own_pkg.envs", "runs/mine", True),
        ("own_plain.envs", "runs/mine", True),
        ("own_pkg.envs", "../elsewhere", True),
        ("own_pkg.missing", "runs/mine", False),
        ("own_one.os", "runs/mine", False),
        ("runs.gift.evil", "runs/gift", False),
        ("runs.gift.evil", "runs/mine", False),
        ("gift.evil", "gift/one", False),
        ("own_one", ".", False),
        ("linked", "runs/mine", False),
        ("init", "runs/mine", False),
        ("own_pkg.linked", "runs/mine", False),
        ("own_pkg.folder.evil", "runs/mine", False),
        ("own_pkg.gift", "runs/gift", False),
        ("os", "runs/mine", False),
        ("sys", "runs/mine", False),
        ("", "runs/mine", False),
        ("__main__", "runs/mine", False),
        ("gift.evil", "renamed", False),
        ("gift.evil", "gift/far", False),
        (".own_one", "runs/mine", False),
        ("own_pkg..envs", "runs/mine", False),
    ],
)
def test_code_is_local_where_it_came_neither_from_elsewhere_nor_with_the_run(module, run, local):
    assert extensions.is_local(module, run=Path(run)) == local


def test_the_project_is_no_local_code_in_a_clone_of_it(monkeypatch):
    monkeypatch.chdir(ROOT)
    modules = ("common.extensions", "services.worker", "tests.conftest", "benchmarks.lockstep", "docker.requirements", "rookery")
    assert [module for module in modules if extensions.is_local(module, run=ROOT / "runs/gift")] == []


def test_the_project_is_no_local_code_in_a_folder_of_its_clone(monkeypatch):
    monkeypatch.chdir(ROOT / "services")
    assert not extensions.is_local("cli.app", run=ROOT / "runs/gift")


def test_code_of_a_user_may_have_a_name_of_the_project(here, monkeypatch):
    """A package `tests` beside the runs is the user's."""
    (here / "docker").mkdir()
    for name in ("__init__.py", "own.py"):
        (here / "docker" / name).touch()
    monkeypatch.delitem(sys.modules, "docker", raising=False)
    assert extensions.is_local("docker.own", run=here / "runs/mine")


@pytest.fixture
def searched(here, monkeypatch):
    """Python's path as `rookery` has it, in a directory with code of a user's; here is that directory."""
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(here))])
    yield here
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


def test_no_folder_is_imported_as_a_package_before_code_of_it_is_named(searched):
    """A run in a folder `jax` brings no module for an environment of the project that needs JAX, where that is not installed."""
    (searched / "absent_package.py").write_text("raise SystemExit('ran')")
    extensions.import_attribute("common.envs.hidden:TMaze", setting="env.entry_point")
    with pytest.raises(ImportError):
        importlib.import_module("absent_package")


def test_code_of_a_user_is_found_after_all_that_is_installed(searched):
    """A folder here with a name that is installed is not imported."""
    (searched / "own_named.py").write_text("import yaml\nmake = yaml.safe_load")
    (searched / "yaml.py").write_text("raise SystemExit('ran')")
    assert extensions.import_attribute("own_named:make", setting="env.entry_point") is yaml.safe_load
    assert sys.path[-1] == str(searched)


def test_code_that_is_named_finds_more_of_it_after_a_change_of_directory(searched, monkeypatch, tmp_path):
    (searched / "own_named.py").write_text("def make():\n    import own_lazy\n    return own_lazy.found")
    (searched / "own_lazy.py").write_text("found = 1")
    make = extensions.import_attribute("own_named:make", setting="env.entry_point")
    monkeypatch.chdir(tmp_path)
    assert make() == 1


def test_two_threads_do_not_lift_one_anothers_restriction(here):
    with ThreadPoolExecutor(1) as pool:
        with extensions.restricted(["os"], run=here):
            other = extensions.restricted((), run=here)
            pool.submit(other.__enter__).result()
            extensions.require_allowed("os", setting="env.entry_point")
            with pytest.raises(extensions.NotAllowedError):
                pool.submit(extensions.require_allowed, "os", setting="env.entry_point").result()
        assert pool.submit(extensions.is_restricted).result()
        pool.submit(other.__exit__, None, None, None).result()
    assert not extensions.is_restricted()


def test_threads_that_a_restricted_one_starts_are_restricted_and_wait_for_nothing(here):
    with extensions.restricted((), run=here), ThreadPoolExecutor(1) as pool:
        assert pool.submit(extensions.is_restricted).result()
        with pytest.raises(extensions.NotAllowedError):
            pool.submit(extensions.require_allowed, "os", setting="env.entry_point").result()


def test_a_program_started_as_a_module_is_not_imported_again(searched):
    """`python -m own_one`: the module that runs has that name in its spec."""
    assert extensions.is_local("own_one", run=searched / "runs/mine")
    (searched / "own_program.py").write_text(
        "from pathlib import Path\nfrom common import extensions\nprint(extensions.is_local('__main__', run=Path('runs/mine')))"
    )
    words = [sys.executable, "-m", "own_program"]
    assert subprocess.run(words, cwd=searched, capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_safe_path_stays_safe(searched, monkeypatch):
    (searched / "own_named.py").write_text("make = print")
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    with pytest.raises(ConfigError, match="a module that does not exist"):
        extensions.import_attribute("own_named:make", setting="env.entry_point")
    assert not extensions.is_local("own_named", run=searched / "runs/mine")


def test_each_environment_of_the_project_may_be_named():
    """A new function of the probes belongs into the list."""
    functions = {name for name, value in vars(probes).items() if inspect.isfunction(value) and name[0] != "_"}
    own = {f"common.envs.probes:{name}" for name in functions}
    own |= {f"{hidden.__name__}:{thing.__name__}" for thing in (hidden.TMaze, hidden.cartpole)}
    assert own | {"common.envs.functional:gymnax"} == extensions.ENVIRONMENTS
