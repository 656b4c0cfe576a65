"""Tests of the values of a configuration that name code, and of those that a worker accepts from a learner."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import gymnasium
import pytest

from common.config import code_references as naming
from common.config.code_references import code_references
from common.config.load import load_settings
from common.config.run_config import EnvRunConfig, RunConfig
from common.config.schema import Settings
from common.errors import ConfigError
from services.allowed_code import read_run

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[2]
RUN = json.loads(RunConfig.of(Settings(), run_id="run-1").model_dump_json())


def changed(**sections):
    """The run's configuration with some settings changed, as values."""
    return RUN | {section: RUN[section] | change for section, change in sections.items()}


def received(values, *overrides, role="actor"):
    """Return the configuration that a worker started with `overrides` reads from a Welcome with these values."""
    text = values if isinstance(values, str) else json.dumps(values)
    return read_run(text, role=role, settings=load_settings(preset=None, overrides=overrides, environ={}).settings)


@pytest.fixture
def plugin():
    """Register an environment id with gymnasium, as an installed package does."""
    wrapper = gymnasium.envs.registration.WrapperSpec(name="W", entry_point="plugin.wraps:W", kwargs={})
    gymnasium.register("Plugin/Corridor-v0", entry_point="plugin.envs:Corridor", additional_wrappers=(wrapper,))
    gymnasium.register("Plugin/Local-v0", entry_point=lambda: None, vector_entry_point="plugin.vector:Locals")
    yield
    del gymnasium.registry["Plugin/Corridor-v0"], gymnasium.registry["Plugin/Local-v0"]


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, []),
        ({"env": {"entry_point": "os:system"}}, [("env.entry_point", "os:system", "os")]),
        ({"model": {"entry_point": "a.b:Net"}}, [("model.entry_point", "a.b:Net", "a.b")]),
        ({"algorithm": {"name": "a.b:ENTRY"}}, [("algorithm.name", "a.b:ENTRY", "a.b")]),
        ({"algorithm": {"name": "dqn"}}, []),
        ({"env": {"entry_point": "common.units:own"}}, [("env.entry_point", "common.units:own", "common.units")]),
        ({"env": {"id": "evil:CartPole-v1"}}, [("env.id", "evil:CartPole-v1", "evil")]),
        ({"env": {"id": "fine:Plugin/Local-v0"}}, [
            ("env.id", "fine:Plugin/Local-v0", "fine"),
            ("env.id", "fine:Plugin/Local-v0", __name__),
            ("env.id", "fine:Plugin/Local-v0", "plugin.vector"),
        ]),
        ({"env": {"id": "ALE/Pong-v5"}}, []),
        ({"env": {"id": "no-such-id"}}, []),
        (
            {"env": {"id": "Plugin/Corridor-v0"}},
            [("env.id", "Plugin/Corridor-v0", "plugin.envs"), ("env.id", "Plugin/Corridor-v0", "plugin.wraps")],
        ),
        (
            {"env": {"id": "Plugin/Local-v0"}},
            [("env.id", "Plugin/Local-v0", __name__), ("env.id", "Plugin/Local-v0", "plugin.vector")],
        ),
        (
            {"env": {"entry_point": "a:b"}, "model": {"entry_point": "c:d"}, "algorithm": {"name": "e:f"}},
            [("env.entry_point", "a:b", "a"), ("model.entry_point", "c:d", "c"), ("algorithm.name", "e:f", "e")],
        ),
    ],
)  # fmt: skip
def test_every_kind_of_reference_to_code_is_listed(sections, expected):
    """Any reference missing from this list would be imported unchecked."""
    assert [tuple(reference) for reference in code_references(changed(**sections))] == expected


@pytest.mark.parametrize(
    "values", [None, 3, [], "os:system", {"env": "os:system"}, {"env": {"id": 5, "entry_point": ["os:system"]}}]
)
def test_values_of_a_wrong_type_name_nothing(values):
    """Validation refuses them before they are used."""
    assert list(code_references(values)) == []


def test_every_setting_from_which_the_project_imports_is_checked():
    """A new setting that names code must be added to the list."""
    sources = [path for folder in ("common", "services") for path in (ROOT / folder).rglob("*.py")]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sources}
    found = {
        setting
        for text in texts.values()
        for setting in re.findall(r'extensions\.import_attribute\([^)]*setting="([\w.]+)"', text)
    }
    assert found == {f"{section}.{key}" for section, key in naming._NAMING}
    importing = [path for path, text in texts.items() if re.search(r"importlib\.import_module|__import__|runpy", text)]
    assert importing == ["common/extensions.py"]
    reading = [path for path, text in texts.items() if "RunConfig.from_json(" in text]
    assert reading == ["services/allowed_code.py"]


@pytest.mark.parametrize("role", ["actor", "evaluator"])
@pytest.mark.parametrize(
    ("sections", "says"),
    [
        (
            {"env": {"entry_point": "os:system", "kwargs": {"command": "true"}}},
            ["env.entry_point 'os:system'", "--allow-code os"],
        ),
        ({"env": {"id": "evil.envs:CartPole-v1"}}, ["env.id 'evil.envs:CartPole-v1'", "--allow-code evil.envs"]),
        ({"env": {"id": "Plugin/Corridor-v0"}}, ["env.id 'Plugin/Corridor-v0' (module 'plugin.envs')", "-code plugin.envs"]),
        ({"model": {"entry_point": "evil:Net"}}, ["model.entry_point 'evil:Net'", "--allow-code evil"]),
        ({"algorithm": {"name": "evil:ENTRY"}}, ["algorithm.name 'evil:ENTRY'", "--allow-code evil"]),
        ({"env": {"entry_point": "e\nvil:\x1b[2J" + 999 * "x"}}, [r"env.entry_point 'e\nvil:\x1b[2Jxx", "--allow-code PACKAGE"]),
    ],
)
@pytest.mark.usefixtures("plugin")
def test_code_that_was_not_allowed_is_refused_in_one_line_and_not_imported(role, sections, says):
    """Setting, value, the learner's address, what to do."""
    with pytest.raises(ConfigError) as caught:
        received(changed(**sections), f"{role}.learner=tcp://127.0.0.1:5999", role=role)
    line = str(caught.value)
    for words in ("the learner at tcp://127.0.0.1:5999 names code", f"the owner of this {role}", *says):
        assert words in line
    assert line.isprintable()
    assert len(line) < 1000
    assert not {"evil", "plugin"} & set(sys.modules)


@pytest.mark.parametrize(
    ("packages", "module", "allowed"),
    [
        (("mygames",), "mygames", True),
        (("mygames",), "mygames.envs.small", True),
        (("mygames.envs",), "mygames.envs", True),
        (("mygames.envs",), "mygames.envs.small", True),
        (("other", "mygames"), "mygames.envs", True),
        ((), "mygames", False),
        (("mygames.envs",), "mygames", False),
        (("mygames.envs",), "mygames.envs2", False),
        (("os",), "osmnx", False),
        (("mygames",), "", False),
        (("mygames",), ".mygames", False),
        (("mygames",), "MyGames", False),
    ],
)
def test_an_allowed_package_allows_its_own_modules_and_no_other(packages, module, allowed):
    """`os` is not the beginning of `osmnx`."""
    values = changed(env={"entry_point": f"{module}:make"})
    settings = Settings.model_validate({"actor": {"allow_code": packages}})
    if allowed:
        assert read_run(json.dumps(values), role="actor", settings=settings).env.entry_point == f"{module}:make"
        return
    with pytest.raises(ConfigError, match="did not allow"):
        read_run(json.dumps(values), role="actor", settings=settings)


def test_a_role_has_its_own_list():
    """The allow list of an evaluator does not hold for an actor on the same machine."""
    values = changed(env={"entry_point": "mygames:make"})
    assert received(values, "evaluator.allow_code=[mygames]", role="evaluator").env.entry_point == "mygames:make"
    with pytest.raises(ConfigError, match="did not allow"):
        received(values, "evaluator.allow_code=[mygames]", role="actor")


def test_what_the_workers_own_settings_name_is_allowed_exactly():
    """Under `rookery train` each actor has the run's config.yaml, which allows the code by itself."""
    own = "env.entry_point=common.envs.probes:Box"
    assert received(changed(env={"entry_point": "common.envs.probes:Box"}), own).env.num_envs == RUN["env"]["num_envs"]
    for change in ({"env": {"entry_point": "common.envs.probes:Dict"}}, {"model": {"entry_point": "common.envs.probes:Box"}}):
        with pytest.raises(ConfigError, match="did not allow"):
            received(changed(**change), own)


@pytest.mark.parametrize("name", ["common.envs.hidden:TMaze", "common.envs.hidden:cartpole", "common.envs.probes:counting"])
def test_environments_of_the_project_need_no_permission(name):
    """As presets name them; nothing else that their modules hold."""
    assert received(changed(env={"entry_point": name})).env.entry_point == name
    with pytest.raises(ConfigError, match=r"--allow-code common\.envs\.hidden$"):
        received(changed(env={"entry_point": "common.envs.hidden:Any"}))


@pytest.mark.usefixtures("plugin")
def test_an_id_of_a_plug_in_is_allowed_by_its_package_or_by_the_workers_own_settings():
    """Both modules that it is built from must lie in the package."""
    values = changed(env={"id": "Plugin/Corridor-v0"})
    assert received(values, "actor.allow_code=[plugin]").env.id == received(values, "env.id=Plugin/Corridor-v0").env.id
    with pytest.raises(ConfigError, match=re.escape("plugin.wraps")):
        received(values, "actor.allow_code=[plugin.envs]")


HUGE = json.dumps(changed(env={"entry_point": "os:system", "kwargs": {"n": 77}})).replace("77", 5000 * "7")


@pytest.mark.parametrize("text", ["{", 10_000 * "[", "nonsense", HUGE])
def test_a_configuration_that_cannot_be_checked_is_refused(text):
    """The validator's parser reads numbers that Python's does not: unchecked values must not reach it."""
    with pytest.raises(ConfigError, match="run configuration in the Welcome is no JSON"):
        received(text)


def test_the_values_that_are_checked_are_the_values_that_are_used():
    """A key that stands twice in the text could be read in two ways."""
    text = json.dumps(RUN)[:-1] + ', "env": {"entry_point": "os:system"}, "env": ' + json.dumps(RUN["env"]) + "}"
    assert received(text).env.entry_point == ""
    text = json.dumps(RUN)[:-1] + ', "env": {"entry_point": "os:system"}}'
    with pytest.raises(ConfigError, match="did not allow"):
        received(text)


@pytest.mark.parametrize(("role", "section"), [("actor", RunConfig), ("env_worker", EnvRunConfig)])
def test_the_values_that_were_checked_are_those_that_are_read(role, section, monkeypatch):
    """A parser that takes the first of two equal keys would read code that was not checked."""
    read = []
    monkeypatch.setattr(section, "from_json", read.append)
    received(json.dumps(RUN).replace("{", '{"env": {"entry_point": "os:system"}, ', 1), role=role)
    assert [json.loads(text) for text in read] == [RUN]
    assert "os:system" not in read[0]
