"""The files that `python -m common.observability` writes, and their copies in the repository."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from common.errors import ConfigError
from common.observability import __main__ as monitoring
from common.observability.__main__ import FOLDER, PAGES, PARTS, files, generated
from tests.common.observability.helpers import COMMITTED, ROOT

pytestmark = pytest.mark.wire  # reads and writes files, starts nothing


def test_the_files_of_the_repository_are_what_the_code_writes():
    """`make monitoring` was forgotten, or somebody edited a dashboard by hand."""
    for name, text in files().items():
        assert (COMMITTED / name).read_text(encoding="utf-8") == text, f"{name}: run `make monitoring`"
    assert {path.name for path in (COMMITTED / "dashboards").iterdir()} == {
        name.rpartition("/")[2] for name in files() if name.startswith("dashboards/")
    }


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_tables_of_the_documentation_are_what_the_code_writes(page):
    """A metric or a check that is declared is in the documentation."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert generated(text) == text, f"{page}: run `make monitoring`"


def test_the_thresholds_of_the_bottleneck_are_compared_as_the_rule_compares_them():
    """A side that waits exactly 15 % waits; a core that lacks for exactly 40 % does not."""
    rows = dict(re.findall(r"^\| (bottleneck: [\w ]+) \| `(\S+) \S+` ", PARTS["thresholds"](), re.MULTILINE))
    waits, network, policies, cpu = rows.values()
    assert (waits, network, policies, cpu) == (">=", ">=", ">=", ">")


def test_every_generated_part_is_in_a_page():
    """A part that no page has would document nothing."""
    found = [name for page in PAGES for name in re.findall(r"<!-- generated: (.*?) -->", (ROOT / page).read_text())]
    assert sorted(found) == sorted(PARTS)


def test_a_part_of_an_unknown_name_is_refused():
    """A marker with a slip of the pen would stay empty."""
    with pytest.raises(ConfigError, match="no such generated part: found metricks"):
        generated("<!-- generated: metricks -->\n<!-- end -->")


def test_it_writes_them_all(tmp_path, monkeypatch):
    """From nothing but the folders and the pages."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / FOLDER).mkdir(parents=True)
    for page in PAGES:
        (tmp_path / page).parent.mkdir(exist_ok=True)
        (tmp_path / page).write_text("<!-- generated: metrics of an actor -->\n<!-- end -->\n")
    assert monitoring.main() == 0
    assert {str(path.relative_to(tmp_path / FOLDER)) for path in (tmp_path / FOLDER).rglob("*.*")} == set(files())
    assert all("rookery_actor_connected" in (tmp_path / page).read_text() for page in PAGES)


def test_elsewhere_it_writes_nothing_and_says_so(tmp_path, monkeypatch, capsys):
    """Started in the wrong folder it must not leave one behind."""
    monkeypatch.chdir(tmp_path)
    assert monitoring.main() == 2
    assert capsys.readouterr().err.startswith("python -m common.observability: error: no folder to write into: found ")
    assert list(tmp_path.iterdir()) == []


def test_the_operators_rules_are_the_same_rules():
    """In Kubernetes the same alerts fire as in compose."""
    resource = yaml.safe_load(files()["prometheusrule.yaml"])
    assert (resource["apiVersion"], resource["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert resource["spec"] == yaml.safe_load(files()["rules.yml"])


def test_the_component_takes_every_file_along():
    """A dashboard that no ConfigMap holds never reaches Grafana; one that is too large is refused by `kubectl apply`."""
    component = yaml.safe_load((COMMITTED / "kustomization.yaml").read_text(encoding="utf-8"))
    held = [file for generated in component["configMapGenerator"] for file in generated["files"]]
    assert set(held) == {name for name in files() if name.startswith("dashboards/")}
    assert component["generatorOptions"]["labels"] == {"grafana_dashboard": "1"}
    assert set(component["resources"]) == {"podmonitor.yaml", "prometheusrule.yaml"}
    for file in held:
        assert (COMMITTED / file).stat().st_size < 2**17
        json.loads((COMMITTED / file).read_text(encoding="utf-8"))


def test_the_pod_monitor_names_jobs_as_the_rules_expect_them():
    """`job` is the component, as in compose; else no alert about a process that is down would ever fire."""
    spec = yaml.safe_load((COMMITTED / "podmonitor.yaml").read_text(encoding="utf-8"))["spec"]
    assert spec["jobLabel"] == "app.kubernetes.io/component"
    assert [endpoint["path"] for endpoint in spec["podMetricsEndpoints"]] == ["/metrics"]


def test_with_the_address_of_the_documentation_each_alert_links_its_runbook(tmp_path, monkeypatch):
    """Without one there is a path within the repository, and no link that cannot be opened."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / FOLDER).mkdir(parents=True)
    for page in PAGES:
        (tmp_path / page).parent.mkdir(exist_ok=True)
        (tmp_path / page).touch()
    assert monitoring.main(["--docs", "https://example.org/docs/"]) == 0
    _, alerts = yaml.safe_load((tmp_path / FOLDER / "rules.yml").read_text())["groups"]
    links = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in alerts["rules"]}
    assert links["LearnerDown"] == "https://example.org/docs/monitoring.md#learnerdown"
    assert not any("runbook" in rule["annotations"] for rule in alerts["rules"])
    assert "runbook_url" not in files()["rules.yml"]
