"""What `python -m common.monitoring` writes, and whether the files of the repository are that."""

from __future__ import annotations

import json

import pytest
import yaml

from common.monitoring import __main__ as monitoring
from common.monitoring.__main__ import FOLDER, files
from tests.common.monitoring.helpers import COMMITTED

pytestmark = pytest.mark.wire  # reads and writes files, starts nothing


def test_the_files_of_the_repository_are_what_the_code_writes():
    """`make monitoring` was forgotten, or somebody edited a dashboard by hand."""
    for name, text in files().items():
        assert (COMMITTED / name).read_text(encoding="utf-8") == text, f"{name}: run `make monitoring`"
    assert {path.name for path in (COMMITTED / "dashboards").iterdir()} == {
        name.rpartition("/")[2] for name in files() if name.startswith("dashboards/")
    }


def test_it_writes_them_all(tmp_path, monkeypatch):
    """From nothing but the folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / FOLDER).mkdir(parents=True)
    assert monitoring.main() == 0
    assert {str(path.relative_to(tmp_path / FOLDER)) for path in (tmp_path / FOLDER).rglob("*.*")} == set(files())


def test_elsewhere_it_writes_nothing_and_says_so(tmp_path, monkeypatch, capsys):
    """Started in the wrong folder it must not leave one behind."""
    monkeypatch.chdir(tmp_path)
    assert monitoring.main() == 2
    assert capsys.readouterr().err.startswith("python -m common.monitoring: error: no folder to write into: found ")
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
