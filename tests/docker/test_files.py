"""Checks the files in docker/ with the tools that read them, without a Docker Engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from common.config.endpoint import parse_endpoint
from common.config.load import load_settings
from common.config.schema import Settings
from services import worker

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
FILES = ("compose.yaml", "compose.keys.yaml")
OURS = ("learner", "actor", "evaluator")
PROFILE = ("policy-server", "env-worker")  # services of the profile policy-server
DIGESTS = "CL-0019"  # asks for digests; they are added where the images are mirrored


def tool(name, *words):
    """Run a tool that came with the development dependencies."""
    program = Path(sys.executable).parent / name
    return subprocess.run([program, *words], capture_output=True, text=True, cwd=ROOT, check=False)


def test_hadolint_finds_nothing():
    done = tool("hadolint", "docker/Dockerfile")
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("file", FILES)
def test_the_compose_files_fit_their_schema(file):
    done = tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", f"docker/{file}")
    assert done.returncode == 0, done.stdout


def test_compose_lint_finds_nothing():
    report = json.loads(tool("compose-lint", "check", "--format", "json", "docker/compose.yaml").stdout)
    found = [finding for finding in report["findings"] if finding["rule_id"] != DIGESTS]
    assert found == []


def test_docker_compose_1_29_reads_it_too():
    if shutil.which("docker-compose") is None:
        pytest.skip("no docker-compose here")
    words = ["docker-compose", "--file", "docker/compose.yaml", "config", "--services"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert set(OURS) <= set(done.stdout.split())


@pytest.mark.parametrize("target", ["down", "logs"])
def test_make_ends_and_reads_the_services_of_every_profile(target):
    """`docker compose` leaves out the containers of a profile that is not named, though they run."""
    line = ["make", "--no-print-directory", "--dry-run", target, "COMPOSE=compose"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, check=True)
    profiles = {profile for service in COMPOSE["services"].values() for profile in service.get("profiles", ())}
    assert set(re.findall(r"--profile (\S+)", done.stdout)) == profiles


@pytest.mark.parametrize(("given", "words"), [([], []), (["PRESET=cartpole"], ["PRESET=cartpole"])])
def test_make_up_leaves_the_preset_that_is_not_named_to_docker_env(given, words):
    environ = {name: value for name, value in os.environ.items() if name not in {"ARGS", "KEYS", "MAKEFLAGS", "PRESET"}}
    line = ["make", "--no-print-directory", "--dry-run", "up", "COMPOSE=compose", *given]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, check=True, env=environ)
    assert done.stdout.split() == [*words, "compose", "--file", "docker/compose.yaml", "up", "--detach"]


def test_with_keys_each_service_gets_its_own_and_the_learner_takes_no_others():
    over = yaml.safe_load((DOCKER / "compose.keys.yaml").read_text())["services"]
    assert set(over) == {*OURS, "policy-server"}
    for name, service in over.items():
        (volume,) = service["volumes"]
        folder, _, rest = volume.partition("}")[2].rpartition(":/")
        assert folder == ("/learner" if name == "learner" else "/${WORKER:-worker}")
        environ = COMPOSE["services"][name].get("environment", {}) | service["environment"]
        given = {key: text for key, text in environ.items() if "$" not in text}
        settings = load_settings(preset=None, overrides=["policy_server.workers=1"], environ=given).settings  # as its --workers
        own = getattr(settings, "actor" if name == "policy-server" else name)  # towards the learner it is an actor
        assert "/" + rest == f"{own.keys}:ro"
        assert not own.insecure


def test_without_keys_compose_says_that_its_bridge_is_trusted():
    learner = COMPOSE["services"]["learner"]
    for name in OURS:
        assert COMPOSE["services"][name]["environment"][f"ROOKERY_{name.upper()}__INSECURE"] == "true"
    assert [port.rpartition(":")[2] for port in learner["ports"]] == ["9100"]


def test_docker_compose_1_29_reads_both_files_together():
    if shutil.which("docker-compose") is None:
        pytest.skip("no docker-compose here")
    words = ["docker-compose", *(word for file in FILES for word in ("--file", f"docker/{file}")), "config"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False, env=os.environ | {"KEYS": "/k"})
    assert done.returncode == 0, done.stderr
    learner = yaml.safe_load(done.stdout)["services"]["learner"]
    assert "/k/learner:/etc/rookery-keys:ro" in learner["volumes"]
    assert learner["environment"]["ROOKERY_LEARNER__INSECURE"] == "false"
    assert "/k/worker:/etc/rookery-keys:ro" in yaml.safe_load(done.stdout)["services"]["actor"]["volumes"]
    environ = os.environ | {"KEYS": "/k", "WORKER": "worker-2"}
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False, env=environ)
    for name in ("actor", "evaluator"):
        assert "/k/worker-2:/etc/rookery-keys:ro" in yaml.safe_load(done.stdout)["services"][name]["volumes"]
    without = {name: value for name, value in os.environ.items() if name != "KEYS"}
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False, env=without)
    assert done.returncode != 0
    assert "rookery keys" in done.stderr


def test_env_workers_of_compose_find_their_policy_server_and_fill_it():
    server, env_worker = (COMPOSE["services"][name] for name in PROFILE)
    assert server["profiles"] == env_worker["profiles"] == ["policy-server"]
    parsed = [worker.parse(one["command"][0], one["command"][1:], one["environment"]).settings for one in (server, env_worker)]
    assert parsed[0].policy_server.workers == env_worker["scale"]
    assert parsed[0].policy_server.learner_seconds is None
    assert parsed[0].actor.learner == f"tcp://learner:{parse_endpoint(Settings().learner.bind).port}"
    assert parsed[1].env_worker.policy_server == f"tcp://policy-server:{parse_endpoint(parsed[0].policy_server.bind).port}"


def test_every_port_is_on_loopback():
    ports = [port for service in COMPOSE["services"].values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert "ports" not in COMPOSE["services"]["actor"]  # or a second one could not start


def test_variables_in_compose_are_settings():
    text = "".join((DOCKER / name).read_text() for name in (*FILES, "Dockerfile"))
    names = set(re.findall(r"ROOKERY_([A-Z]+)__([A-Z_]+)", text))
    assert names >= {("METRICS", "PORT"), ("LEARNER", "BIND")}
    settings = Settings()
    for section, key in names:
        assert hasattr(getattr(settings, section.lower()), key.lower()), f"{section}__{key}"


def test_prometheus_looks_for_every_service_where_it_is():
    config = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
    (port,) = set(re.findall(r"ROOKERY_METRICS__PORT=(\d+)", (DOCKER / "Dockerfile").read_text()))
    jobs = {job["job_name"]: job["dns_sd_configs"] for job in config["scrape_configs"]}
    assert set(jobs) == {*OURS, *PROFILE}
    for name, (lookup,) in jobs.items():
        assert (lookup["names"], lookup["type"], lookup["port"]) == ([name], "A", int(port))
        assert name in COMPOSE["services"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here (Debian's prometheus package has it)")
def test_promtool_finds_nothing(tmp_path):
    shutil.copy(DOCKER / "prometheus.yml", tmp_path)
    mounted = {volume.split(":")[1]: volume.split(":")[0] for volume in COMPOSE["services"]["prometheus"]["volumes"]}
    rules = (DOCKER / mounted["/etc/prometheus/monitoring"] / "rules.yml").resolve()
    if not rules.is_file():
        pytest.skip("no rules here yet")
    (tmp_path / "monitoring").mkdir()
    shutil.copy(rules, tmp_path / "monitoring")
    words = ["promtool", "check", "config", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_grafana_has_the_datasource_and_the_home_that_dashboards_expect():
    (source,) = yaml.safe_load((DOCKER / "grafana/datasources/prometheus.yaml").read_text())["datasources"]
    assert (source["uid"], source["url"]) == ("prometheus", "http://prometheus:9090")
    grafana = COMPOSE["services"]["grafana"]
    mounted = {volume.split(":")[1]: volume.split(":")[0] for volume in grafana["volumes"]}
    (provider,) = yaml.safe_load((DOCKER / "grafana/dashboards/rookery.yaml").read_text())["providers"]
    folder = provider["options"]["path"]
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == folder
    dashboards = (DOCKER / mounted[folder]).resolve()
    if not dashboards.is_dir():
        pytest.skip("no dashboards here yet")
    assert json.loads((dashboards / home.name).read_text())["title"]


def test_what_an_image_installs_is_what_the_project_needs():
    every = tool("python", "docker/requirements.py").stdout.splitlines()
    assert any(line.startswith("torch==") for line in every)
    for line in (DOCKER / "Dockerfile").read_text().splitlines():
        if found := re.match(r"RUN python requirements.py ([^>]+) >", line):
            names = found[1].split()
            image = tool("python", "docker/requirements.py", *names).stdout.splitlines()
            assert [re.split("[=>]", line)[0] for line in every if line not in image] == names
    slip = tool("python", "docker/requirements.py", "tensorbord")
    assert slip.returncode == 1
    assert "not among the dependencies in pyproject.toml: tensorbord" in slip.stderr


def test_make_wheels_fails_where_the_requirements_cannot_be_read(tmp_path):
    """As with Python 3.10, which has no tomllib: without them pip would download setuptools alone, and succeed."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" != docker/requirements.py ]\n')
    python.chmod(0o755)
    line = ["make", "--no-print-directory", "wheels", f"PYTHON={python}"]
    assert subprocess.run(line, capture_output=True, text=True, cwd=ROOT, check=False).returncode != 0


def test_an_empty_torch_index_reaches_the_build():
    """Left out, it would be the Dockerfile's own: PyTorch's, which a network with a mirror alone does not reach."""
    line = ["make", "--dry-run", "images", "TORCH_INDEX=", "IMAGES=actor"]
    assert "--build-arg TORCH_INDEX= " in subprocess.run(line, capture_output=True, text=True, cwd=ROOT, check=True).stdout


def test_only_what_the_images_need_goes_to_the_builder():
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [
        word
        for line in (DOCKER / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for word in line.split()[1:-1]
    ]
    assert copied
    for word in copied:
        assert any(line == word or line.startswith(f"{word}/") for line in kept), word
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*"
