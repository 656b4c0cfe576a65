"""The flags, variables, ports, paths and metrics named in manifests, containers and pages exist in the code.

And the reverse for settings: each can be set by an environment variable, since that is how a container gets its own.
"""

from __future__ import annotations

import re
from functools import partial
from itertools import chain

import pytest
import yaml

from common.config.endpoint import parse_endpoint
from common.config.errors import schema_at
from common.config.layers import leaves
from common.config.load import ENV_PREFIX, load_settings
from common.config.schema import Settings
from common.observability.health import Health
from common.observability.http import HttpServer
from common.observability.learner_metrics import METRICS
from common.observability.worker_metrics import ACTOR_METRICS, EVALUATOR_METRICS
from services import worker
from services.learner import startup as learner
from tests.k8s.manifests import K8S, OVERLAYS, WORKLOADS, named, of, overlay
from tests.system.conftest import Http

pytestmark = pytest.mark.service

ROOT = K8S.parent
SERVICES = {
    "learner": learner.parse,
    **{name: partial(worker.parse, name) for name in ("actor", "policy-server", "evaluator", "env-worker")},
}
FILES = sorted(
    path
    for path in chain(
        K8S.rglob("*"),
        (ROOT / "docker").rglob("*"),
        (ROOT / "docs").rglob("*.md"),
        ROOT.glob("services/**/README.md"),
        [ROOT / "README.md"],
    )
    if path.is_file() and (path.suffix in {".yaml", ".yml", ".json", ".md", ".sh"} or path.name == "Dockerfile")
)
PLACEHOLDERS = {"ROOKERY_SECTION__KEY"}
ALGORITHMS = schema_at(("algorithm", "name"), {})["enum"]

each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
each_overlay = pytest.mark.parametrize("name", OVERLAYS)


def lists(tree):
    """Every list in a tree of mappings and lists."""
    inside = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    found = [tree] if isinstance(tree, list) else []
    return found + [one for value in inside for one in lists(value)]


def containers(name):
    """The containers of an overlay."""
    return [manifest["spec"]["template"]["spec"]["containers"][0] for manifest in of(overlay(name), *WORKLOADS)]


def values(container):
    """Return the environment variables that have literal values."""
    return {variable["name"]: variable["value"] for variable in container["env"] if "value" in variable}


def known(variable):
    """Return whether an environment variable sets a setting of at least one algorithm."""
    prefix, _, keys = variable.partition("_")
    path = keys.lower().split("__")
    return (
        f"{prefix}_" == ENV_PREFIX and len(path) > 1 and any(schema_at(path, {"algorithm": {"name": one}}) for one in ALGORITHMS)
    )


@each_file
def test_every_variable_that_is_named_sets_something(path):
    """A misspelt variable is no error anywhere: the setting keeps its default."""
    named_here = set(re.findall(rf"\b{ENV_PREFIX}[A-Z0-9_]+\b", path.read_text(encoding="utf-8"))) - PLACEHOLDERS
    for name in named_here:
        if "__" in name:
            assert known(name), name
        else:  # none of a setting, unless it lacks an underscore
            section, _, key = name.removeprefix(ENV_PREFIX).partition("_")
            assert not known(f"{ENV_PREFIX}{section}__{key}"), name


@each_file
def test_every_metric_that_is_named_is_exported(path):
    """A query for a metric that is not there returns nothing, and looks like peace."""
    declared = {metric.name for metric in (*METRICS, *ACTOR_METRICS, *EVALUATOR_METRICS)}
    text = path.read_text(encoding="utf-8")
    for name in re.findall(r"(?<![\w:])rookery_(?:learner|actor|evaluator|build)_\w+(?![\w:])", text):
        assert declared & {name, re.sub(r"_(bucket|sum|count)$", "", name)}, name


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.suffix in {".yaml", ".yml"}], ids=lambda path: str(path.relative_to(ROOT))
)
def test_every_flag_of_a_service_is_one_of_its_own(path, capsys):
    """An unknown option ends a container with exit code 2, at each of its restarts."""
    found = [words for tree in yaml.safe_load_all(path.read_text(encoding="utf-8")) for words in lists(tree)]
    for words in [words for words in found if words and isinstance(words[0], str) and words[0] in SERVICES]:
        with pytest.raises(SystemExit):
            SERVICES[words[0]](["--help"], {})
        shown = capsys.readouterr().out
        assert [word for word in words if word.startswith("--") and not re.search(rf"{word}\b", shown)] == []


@each_overlay
def test_ports_are_those_of_the_services_settings(name):
    """A port that nobody listens on is a probe that fails, or actors that wait for ever."""
    expected = {"http": 9100, "workers": parse_endpoint(Settings().learner.bind).port}
    for container in containers(name):
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        settings = load_settings(
            preset=None, environ={key: value for key, value in values(container).items() if known(key)}
        ).settings
        assert ports["http"] == settings.metrics.port == expected["http"]
        assert settings.metrics.host == "0.0.0.0"  # probes and scrapes come from other hosts
        if container["name"] == "learner":
            assert settings.learner.bind == f"tcp://0.0.0.0:{ports['workers']}"
            assert ports["workers"] == expected["workers"]
        else:
            address = container["args"][container["args"].index("--learner") + 1]
            (service, port) = address.removeprefix("tcp://").split(":")
            assert int(port) in [entry["port"] for entry in named(overlay(name), "Service", service)["spec"]["ports"]]


@pytest.mark.parametrize("components", [[], ["curve-auth"]], ids=["open", "keys"])
@each_overlay
def test_every_pod_is_started_with_settings_that_its_service_takes(name, components):
    """Some settings are addresses of other machines, which need keys, or `insecure`."""
    for manifest in of(overlay(name, *components), *WORKLOADS):
        (container,) = manifest["spec"]["template"]["spec"]["containers"]
        role, *words = container["args"]
        given = words if role != "learner" else ["--config", str(K8S / "base" / "run.yaml")]
        environ = {key: value for key, value in values(container).items() if known(key)}
        own = getattr(SERVICES[role](given, environ).settings, role)
        assert bool(own.keys) == (not own.insecure) == bool(components)


def test_every_path_that_is_probed_is_answered():
    """A probe of a path that is not there kills the pod for ever."""
    probed = {
        container[f"{probe}Probe"]["httpGet"]["path"]
        for name in OVERLAYS
        for container in containers(name)
        for probe in ("startup", "readiness", "liveness")
    }
    with HttpServer(host="127.0.0.1", port=0, metrics=bytes, health=Health()) as server:
        answers = {path: Http(server.port).get(path)[0] for path in probed}
    assert answers == {"/healthz": 200, "/readyz": 503}


@each_overlay
def test_the_images_are_what_the_manifests_take_them_for(name):
    """The command of a pod is the words after the image's entry point, and its user must own the files it was built with."""
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    assert re.findall(r"^ENTRYPOINT (.*)$", dockerfile, re.MULTILINE) == ['["rookery"]']
    targets = set(re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.MULTILINE))
    (user,) = re.findall(r"^USER (\d+):(\d+)$", dockerfile, re.MULTILINE)
    for manifest in of(overlay(name), *WORKLOADS):
        pod = manifest["spec"]["template"]["spec"]
        assert (str(pod["securityContext"]["runAsUser"]), str(pod["securityContext"]["runAsGroup"])) == user
        (container,) = pod["containers"]
        assert container["image"].partition(":")[0].removeprefix("rookery-") in targets
        assert container["args"][0] in SERVICES


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_setting_can_be_set_by_a_variable(algorithm):
    """A setting that only a command line reaches would need an image of its own."""
    defaults = load_settings(preset=None, overrides=[f"algorithm.name={algorithm}"], environ={}).settings
    texts = {}
    for path, value in leaves(defaults.model_dump(mode="json")):
        texts[ENV_PREFIX + "__".join(path).upper()] = (
            value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n")
        )
    loaded = load_settings(preset=None, environ=texts)
    assert loaded.settings == defaults
    assert set(loaded.provenance.values()) == set(texts)
    assert len(texts) > 60
